"""Our metrics under the names of Prometheus."""

from __future__ import annotations

import re

import pytest
from catalogue_names import spelled_out

from gradus.monitor.catalogue import METRICS
from gradus.tracking.prometheus.board import UNKNOWN, export

LEGAL = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


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
