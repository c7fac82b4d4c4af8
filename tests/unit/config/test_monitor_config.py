"""Trackers in a config: what is refused, and what of them starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from configs import build_run_config, build_run_values, contradictions_of

from gradus.config import RunConfig, load_config, resolve
from gradus.config.schema.monitor import MonitorConfig
from gradus.errors import ConfigError


def refusals(*monitors: dict[str, Any]) -> list[str]:
    config = build_run_config({"monitor": list(monitors)})
    return [str(problem) for problem in contradictions_of(config)]


def test_two_trackers_of_one_type_need_two_names() -> None:
    found = refusals({"type": "tensorboard"}, {"type": "tensorboard"})
    assert found == [
        "monitor.1.name: two trackers are called 'tensorboard'; give this one another name"
    ]
    assert refusals({"type": "tensorboard"}, {"type": "tensorboard", "name": "second"}) == []


def test_a_library_that_serves_one_tracker_in_a_process_gets_one() -> None:
    (found,) = refusals({"type": "wandb"}, {"type": "wandb", "name": "second"})
    assert found.startswith("monitor.1.type: a run sends to one tracker of the type 'wandb'")
    assert refusals({"type": "wandb"}, {"type": "trackio"}) == []


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"type": "tensorbord"}, "did you mean 'tensorboard'"),
        ({"type": "tensorboard", "foldr": "x"}, "monitor.0.folder"),
        ({"type": "tensorboard", "name": "../up"}, "monitor.0.name"),
        ({"type": "tensorboard", "name": "x.json"}, "monitor.0.name"),
        ({"type": "tensorboard", "episodes_interval_steps": 0}, ".0.episodes_interval_steps: 0: "),
        ({"type": "tensorboard", "flush_seconds": -1.0}, ".0.flush_seconds: -1.0: "),
        ({"name": "x"}, "monitor.0"),
    ],
)
def test_a_table_that_cannot_work_is_refused(
    tmp_path: Path, table: dict[str, Any], words: str
) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(build_run_values({"monitor": [table]})))
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, ["@", str(file)])
    assert words in str(caught.value)


def test_every_registered_tracker_with_a_library_names_its_extra() -> None:
    known = MonitorConfig.registered().values()
    assert [kind for kind in known if bool(kind.library) != bool(kind.extra)] == []


def test_trackers_start_one_process_and_none_starts_none(tmp_path: Path) -> None:
    without = resolve(build_run_config(), run_dir=tmp_path, term=3)
    assert "tracker" not in without.by_process()
    config = build_run_config({"monitor": [{"type": "tensorboard"}, {"type": "a:B"}]})
    tracker = resolve(config, run_dir=tmp_path, term=3).tracker
    assert tracker is not None
    assert (tracker.term, [it.title for it in tracker.monitor]) == (3, ["tensorboard", "B"])
