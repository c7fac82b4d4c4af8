"""The runs that a view was started with, and a line about each."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradus.errors import ConfigError, GradusError
from gradus.monitor import alarms_on
from gradus.report.folder import is_run, read_object, read_outcome
from gradus.run.json_lines import last_lines
from gradus.run.lease import read_marker
from gradus.run.paths import RunDirectory
from gradus.run.recording import read_launched
from gradus.run.records import Record, parse_record
from gradus.run.settings import planned_steps

MAX_RUNS = 500
"""Shown of one folder, the newest ones."""
_TAIL_BYTES = 1 << 18
_REWARD = "episode/reward/mean"
_REWARD_OF_SOURCE = re.compile(r"episode/[^/]+/reward/mean")


@dataclass(frozen=True)
class Shelf:
    """Runs by their id, which is what an address on the page may name.

    >>> list(open_shelf([Path("runs/demo")]).runs)  # doctest: +SKIP
    ['demo']
    """

    runs: dict[str, RunDirectory]
    num_left_out: int = 0


def open_shelf(paths: Sequence[Path]) -> Shelf:
    """The runs that paths name, each a run or a folder of runs.

    ConfigError for one that is neither, and for a run that this version cannot read.
    """
    found: list[Path] = []
    num_left_out = 0
    for path in paths or [Path("runs")]:
        if not path.is_dir():
            raise ConfigError(
                f"{path} is no folder (seen from {Path.cwd()}); name the folder of a run, such as "
                "runs/NAME, or a folder of runs"
            )
        if is_run(RunDirectory(path)):
            read_marker(RunDirectory(path))
            found.append(path)
            continue
        below = [it for it in path.iterdir() if _is_shown(it)]
        if not below:
            raise ConfigError(
                f"{path} is not the folder of a run, which has metrics or a config, and no folder "
                "in it is one"
            )
        below.sort(key=_changed, reverse=True)
        num_left_out += max(0, len(below) - MAX_RUNS)
        found += below[:MAX_RUNS]
    return Shelf(_by_id(found), num_left_out)


def _is_shown(path: Path) -> bool:
    """Whether it is a run, or a folder that cannot be looked into: one line will say so."""
    try:
        return path.is_dir() and is_run(RunDirectory(path))
    except OSError:
        return True


def _changed(path: Path) -> float:
    metrics = RunDirectory(path).metrics
    try:
        return (metrics if metrics.is_file() else path).stat().st_mtime
    except OSError:
        return 0.0


def _by_id(paths: Sequence[Path]) -> dict[str, RunDirectory]:
    """Names of folders that an address can hold; a number tells equal ones apart."""
    runs: dict[str, RunDirectory] = {}
    for path in dict.fromkeys(it.resolve() for it in paths):
        name = re.sub(r"[^\w.-]", "_", path.name) or "run"
        number = 1
        while (run_id := name if number == 1 else f"{name}~{number}") in runs:
            number += 1
        runs[run_id] = RunDirectory(path)
    return runs


def row_of(run_id: str, run_dir: RunDirectory) -> dict[str, Any]:
    """What the list says of a run: status, steps, last reward, alarms, age of the last record."""
    row: dict[str, Any] = {"id": run_id, "name": run_dir.root.name}
    try:
        marker = read_marker(run_dir)
        records = [
            it
            for line in last_lines(run_dir.metrics, max_bytes=_TAIL_BYTES)
            if (it := parse_record(line)) is not None
        ]
        steps = [it for it in records if not it.is_evaluation]
        return row | {
            "kind": marker.kind if marker else "",
            "outcome": read_outcome(run_dir),
            "planned": planned_steps(
                read_object(run_dir.summary).get("max_steps")
                or read_launched(run_dir).config.get("max_steps")
            ),
            "steps": max((it.step + 1 for it in steps), default=0),
            "reward": next((r for it in reversed(steps) if (r := reward_of(it)) is not None), None),
            "alarms": alarms_on(steps[-1].metrics) if steps else [],
            "age": max(0.0, time.time() - records[-1].time) if records else None,
        }
    except GradusError as error:
        return row | {"outcome": "unreadable", "problem": str(error)}
    except OSError as error:
        return row | {"outcome": "unreadable", "problem": f"{error.strerror}: {error.filename}"}


def reward_of(record: Record) -> float | None:
    """The mean reward of a step: of all sources, else the mean over those it names."""
    if _REWARD in record.metrics:
        return record.metrics[_REWARD]
    found = [v for name, v in record.metrics.items() if _REWARD_OF_SOURCE.fullmatch(name)]
    return sum(found) / len(found) if found else None
