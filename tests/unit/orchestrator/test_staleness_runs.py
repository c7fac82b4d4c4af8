"""Whole simulated runs: staleness is spread out below its bound, and never above it."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def staleness() -> Any:
    """The benchmark, as a module."""
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("staleness", BENCHMARKS / "staleness.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path
    sys.modules.pop("simulation", None)


def run_short(staleness: Any, name: str, root: Path, **settings: int) -> dict[str, Any]:
    case = staleness.CASES[name]
    case = replace(case, max_steps=12, settings={**case.settings, **settings})
    run = staleness.run_simulated(staleness.play(case, root))
    found: dict[str, Any] = staleness.summarize(run, case)
    return found


@pytest.fixture(scope="module")
def slow_episodes(staleness: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run with slow episodes comes to."""
    return run_short(staleness, "slow_episodes", tmp_path_factory.mktemp("slow"))


def test_behind_a_slow_trainer_staleness_is_the_lag_and_nothing_is_lost(
    staleness: Any, tmp_path: Path
) -> None:
    found = run_short(staleness, "slow_trainer", tmp_path)
    assert list(found["samples_by_staleness"]) == ["0", "1", "2", "3"]
    assert found["max_staleness_seen"] == found["settings"]["max_lag"] == 3
    assert found["groups_abandoned"] == 0
    assert found["trainer_idle_share"] == 0.0


def test_slow_episodes_are_given_up_at_the_bound_and_their_tasks_return(
    slow_episodes: dict[str, Any],
) -> None:
    found = slow_episodes
    assert found["max_staleness_seen"] <= 4
    assert len(found["samples_by_staleness"]) > 3
    assert found["groups_abandoned"] > 0
    assert found["tasks_returned"] + found["tasks_given_up"] == found["groups_abandoned"]
    assert found["slow_bias_at_the_end"] > 0


def test_a_wider_bound_loses_fewer_slow_tasks(staleness: Any, tmp_path: Path) -> None:
    narrow = run_short(staleness, "slow_episodes", tmp_path / "narrow", max_staleness=3)
    wide = run_short(staleness, "slow_episodes", tmp_path / "wide", max_staleness=8)
    assert wide["groups_abandoned"] < narrow["groups_abandoned"]
    assert narrow["max_staleness_seen"] <= 3


def test_a_simulated_run_is_the_same_each_time(
    staleness: Any, slow_episodes: dict[str, Any], tmp_path: Path
) -> None:
    assert run_short(staleness, "slow_episodes", tmp_path) == slow_episodes


def test_the_stored_results_keep_the_bound() -> None:
    stored = json.loads((BENCHMARKS / "results" / "staleness.json").read_text())
    assert set(stored) == {"slow_trainer", "slow_episodes"}
    for case in stored.values():
        assert case["max_staleness_seen"] <= case["settings"]["max_staleness"]
        assert sum(case["samples_by_staleness"].values()) > 1000
