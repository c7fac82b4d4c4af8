"""Our metrics under the names of Prometheus, and the text that is scraped."""

from __future__ import annotations

import math
import re

import pytest
from catalogue_names import spelled_out
from prometheus_client.parser import text_string_to_metric_families

from gradus.monitor.catalogue import METRICS
from gradus.tracking.prometheus.exposition import MAX_LABEL_CHARACTERS, Page
from gradus.tracking.prometheus.names import UNKNOWN, export

LEGAL = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def read(page: Page) -> dict[str, list[tuple[dict[str, str], float]]]:
    """What Prometheus's own reader sees."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(page.text()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_every_name_of_the_catalogue_is_legal_and_names_one_metric() -> None:
    names = [name for metric in METRICS for name in spelled_out(metric.pattern)]
    exported = {name: export(name) for name in names}
    assert [n for n, e in exported.items() if not LEGAL.fullmatch(e.name)] == []
    assert [n for n, e in exported.items() if any(not LEGAL.fullmatch(x) for x in e.labels)] == []
    taken: dict[str, str] = {}
    for name, metric in exported.items():
        assert metric.name != UNKNOWN, name
        assert taken.setdefault(metric.name, name) == name


def test_sources_agents_and_parts_are_labels() -> None:
    found = export("episode/words/agent/judge/reward/clarity/mean")
    assert found.name == "gradus_episode_source_agent_agent_reward_part_mean"
    assert found.labels == {"source": "words", "agent": "judge", "part": "clarity"}


@pytest.mark.parametrize(
    ("metric", "name", "scale"),
    [
        ("throughput/peak_memory_gib", "gradus_throughput_peak_memory_bytes", 2.0**30),
        (
            "throughput/model_teraflops_per_second",
            "gradus_throughput_model_flops_per_second",
            1e12,
        ),
        ("time/step_seconds", "gradus_time_step_seconds", 1.0),
        ("sample/dropped/sum", "gradus_sample_dropped", 1.0),
        ("optimizer/skipped/total", "gradus_optimizer_skipped_total", 1.0),
        ("eval/pass@4", "gradus_eval_pass_at_k", 1.0),
        ("eval/pass^4", "gradus_eval_pass_all_k", 1.0),
    ],
)
def test_units_are_base_units_and_signs_become_words(metric: str, name: str, scale: float) -> None:
    assert (export(metric).name, export(metric).scale) == (name, scale)


def test_a_metric_that_nobody_knows_is_a_label() -> None:
    found = export("my loss/ünï/mean")
    assert (found.name, found.labels) == (UNKNOWN, {"name": "my loss/ünï/mean"})


@pytest.mark.parametrize("value", ['a"b', "a\\b", "a\nb", "a\\nb", "{x=1}", "ünï 🙂", "a,b", ""])
def test_a_label_says_what_it_said(value: str) -> None:
    page = Page({"run": value})
    page.add("gradus_x", 1.0, help="A \\ help\nof two lines.", labels={"name": value})
    assert read(page)["gradus_x"] == [({"run": value, "name": value}, 1.0)]


def test_a_lone_surrogate_and_a_huge_value_are_cut_to_what_can_be_sent() -> None:
    page = Page({})
    page.add("gradus_x", 1.0, help="", labels={"name": "\ud800" + "x" * 10_000})
    ((labels, _),) = read(page)["gradus_x"]
    assert labels["name"] == "?" + "x" * (MAX_LABEL_CHARACTERS - 1)


@pytest.mark.parametrize("value", [0.0, -1.5, 1e-30, 1.7e308, 2.0**60, math.inf, -math.inf])
def test_a_value_comes_back_exactly(value: float) -> None:
    page = Page({})
    page.add("gradus_x", value, help="")
    assert read(page)["gradus_x"] == [({}, value)]


def test_nan_comes_back_as_nan() -> None:
    page = Page({})
    page.add("gradus_x", math.nan, help="")
    assert math.isnan(read(page)["gradus_x"][0][1])


def test_a_family_has_one_help_and_one_type_line() -> None:
    page = Page({})
    for source in ("a", "b"):
        page.add("gradus_x_total", 1.0, help="It counts.", kind="counter", labels={"s": source})
    lines = page.text().splitlines()
    assert lines[:2] == ["# HELP gradus_x_total It counts.", "# TYPE gradus_x_total counter"]
    assert len(lines) == 4
