"""Runs, records and sample episodes as a tracker gets them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradus.run.records import Record
from gradus.tracking.base import EpisodeRow, TrackedRun

TIME = 1_767_225_600.125
"""When the first step was recorded."""


def tracked_run(folder: Path, **changes: Any) -> TrackedRun:
    """A run with an id of its own."""
    run = TrackedRun(
        id=uuid.uuid4().hex,
        name="demo",
        kind="rl",
        folder=folder,
        tracker="tracker",
        config={"seed": 0},
        code_version="0.1.0",
        packages={"torch": "2.13.0"},
    )
    return replace(run, **changes)


def tracked_record(
    step: int, metrics: Mapping[str, float], *, non_finite: tuple[str, ...] = ()
) -> Record:
    """The record of a step; steps are ten seconds apart."""
    return Record(step, TIME + 10 * step, metrics, non_finite)


def episode_row(**changes: Any) -> EpisodeRow:
    """An episode that went well."""
    row = EpisodeRow(
        purpose="train",
        episode="0-1-2",
        source="words",
        task="cat",
        prompt="Reverse cat.",
        reply="tac",
        reward=1.0,
        advantage=0.5,
    )
    return replace(row, **changes)
