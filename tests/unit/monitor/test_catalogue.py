"""The catalogue: what it says of a name, and that its own words agree."""

from __future__ import annotations

from pathlib import Path

from gradus.monitor.catalogue import METRICS, Kind, describe_metric, entries_of

ROOT = Path(__file__).resolve().parents[3]
UNITS_IN_NAMES = {
    "_seconds": "seconds",
    "_tokens": "tokens",
    "_bytes": "bytes",
    "_gib": "GiB",
    "_per_second": "/s",
}
"""What a quantity ends with, and how its unit ends."""


def test_a_name_gives_its_labels_and_the_name_without_them() -> None:
    found = describe_metric("episode/words/agent/judge/metric/num calls/mean")
    assert found is not None
    assert found.labels == {"source": "words", "agent": "judge", "name": "num calls"}
    assert found.family == "episode/source/agent/agent/metric/name/mean"
    assert found.kind is Kind.MEAN


def test_the_number_of_all_sources_has_no_label_and_a_family_of_its_own() -> None:
    total, one = describe_metric("episode/reward/p95"), describe_metric("episode/words/reward/p95")
    assert total is not None
    assert one is not None
    assert total.labels == {}
    assert total.metric is one.metric
    assert total.family != one.family


def test_a_name_that_nobody_makes_has_no_description() -> None:
    assert describe_metric("episode/words/reward/median") is None
    assert describe_metric("") is None


def test_a_part_of_a_reward_may_have_any_name() -> None:
    for part in ("mean", "p50", "reward", "a/b", "ünï\ncode", "x" * 500):
        found = describe_metric(f"episode/words/reward/{part}/mean")
        assert found is not None
        assert found.labels["part"] == part


def test_a_metric_with_the_name_of_another_quantity_stays_a_metric() -> None:
    for name in ("reward", "agent", "error/share", "metric/x"):
        assert [it.pattern for it in entries_of(f"episode/words/metric/{name}/mean")] == [
            "episode/<source>/metric/<name>/mean"
        ]


def test_the_unit_in_a_name_is_the_unit_of_its_entry() -> None:
    for metric in METRICS:
        words = metric.pattern.replace("}", "").split("/")
        for ending, unit in UNITS_IN_NAMES.items():
            if any(word.endswith(ending) and "trainable" not in word for word in words):
                assert metric.unit.endswith(unit) or metric.pattern.endswith("share"), metric


def test_no_pattern_stands_in_the_table_twice() -> None:
    patterns = [metric.pattern for metric in METRICS]
    assert len(patterns) == len(set(patterns))
