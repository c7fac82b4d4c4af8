"""Runs on disk for trackers to follow, and a tracker that fails where a test tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from gradus.config import MonitorConfig
from gradus.config.schema.monitor import OwnMonitorConfig
from gradus.files import write_json
from gradus.monitor import JsonlMonitor
from gradus.run.lease import mark_run
from gradus.run.paths import RunDirectory


def build_tracked_run(root: Path, *, num_records: int = 0, config: Any = None) -> RunDirectory:
    """The folder of a run with some records."""
    root.mkdir(parents=True, exist_ok=True)
    run_dir = RunDirectory(root)
    mark_run(run_dir, "rl")
    if config is not None:
        write_json(run_dir.launched, {"config": config, "code_version": "1", "packages": {}})
    record_steps(run_dir, range(num_records))
    return run_dir


def record_steps(run_dir: RunDirectory, steps: Sequence[int], *, value: float = 0.0) -> None:
    """Append a record of each step; its loss is the step plus `value`."""
    monitor = JsonlMonitor(run_dir.metrics, clock=lambda: 1_800_000_000.0)
    for step in steps:
        monitor.record({"loss/total/mean": step + value}, step=step)
    monitor.close()


def record_episodes(run_dir: RunDirectory, step: int, rewards: Sequence[float | None]) -> None:
    """The episodes of a step; a reward of None is an episode that failed."""
    path = run_dir.episodes / f"step_{step}" / "train.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(_episode(number, reward)) for number, reward in enumerate(rewards)]
    path.write_text("".join(f"{line}\n" for line in lines))


def _episode(number: int, reward: float | None) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "episode": f"g{number}.0",
        "source": "words",
        "task": {"index": number, "key": f"task {number}"},
        "advantages": [] if reward is None else [reward - 0.5],
        "error": {"type": "TaskError", "message": "no answer"} if reward is None else None,
    }
    if reward is None:
        return {"gradus": fields}
    nodes = [
        {"message": {"role": "user", "content": f"question {number}"}, "sampled": False},
        {"message": {"role": "assistant", "content": f"answer {number}"}, "sampled": True},
    ]
    trace = {"rewards": {"exact": {"score": reward, "weight": 1.0}}, "nodes": nodes}
    return {"gradus": fields, "traces": [trace]}


@dataclass
class TrackedPlace:
    """What arrived at one scripted tracker, over all its connections."""

    runs: list[Any] = field(default_factory=list)
    """What each connection was opened with."""
    safe: list[Any] = field(default_factory=list)
    """Records that a flush confirmed."""
    episodes: dict[int, list[Any]] = field(default_factory=dict)
    outcomes: list[str] = field(default_factory=list)
    alerts: list[tuple[str, str, int]] = field(default_factory=list)
    refuses_alerts: int = 0
    """How many alerts still raise."""
    shown_by: str | None = None
    """What the tracker says of where to look."""
    open_failures: int = 0
    """How many connections are still refused."""
    is_down: bool = False
    """Whether a flush raises."""
    refused: set[int] = field(default_factory=set)
    """Steps whose records raise."""
    refuses_tables: bool = False
    failure: Exception | None = None
    """What every flush raises."""
    hangs: threading.Event = field(default_factory=threading.Event)
    """While it is clear, nothing hangs; once set, `log` waits for `released`."""
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def steps(self) -> list[int]:
        """Steps of the safe records, in the order of their arrival."""
        return [record.step for record in self.safe]


class ScriptedTracker:
    """Brings records to the `TrackedPlace` of its name, and fails as that says.

    >>> config = scripted_monitor("here")
    """

    places: ClassVar[dict[str, TrackedPlace]] = {}

    def __init__(self, place: str) -> None:
        self._place = self.places.setdefault(place, TrackedPlace())
        self._pending: list[Any] = []

    def open(self, run: Any) -> None:
        """Refuses as often as the place says."""
        if self._place.open_failures:
            self._place.open_failures -= 1
            raise ConnectionError("connection refused")
        self.shown_by = self._place.shown_by
        self._place.runs.append(run)
        if run.resume_step is not None:
            kept = [record for record in self._place.safe if record.step < run.resume_step]
            self._place.safe[:] = kept

    def alert(self, title: str, text: str, step: int) -> None:
        if self._place.refuses_alerts:
            self._place.refuses_alerts -= 1
            raise ConnectionError("connection refused")
        self._place.alerts.append((title, text, step))

    def log(self, record: Any) -> None:
        """Hangs while the place says so."""
        if self._place.hangs.is_set():
            self._place.released.wait(60)
        if record.step in self._place.refused:
            raise ValueError(f"step {record.step} has a number that nobody can show")
        self._pending.append(record)

    def log_episodes(self, step: int, rows: Sequence[Any]) -> None:
        """Keep the table."""
        if self._place.refuses_tables:
            raise TypeError("no tables here")
        self._place.episodes[step] = list(rows)

    def flush(self) -> str:
        """Records are safe now, unless the place is down."""
        if self._place.is_down:
            raise ConnectionError("the server is gone")
        if self._place.failure is not None:
            raise self._place.failure
        self._place.safe += self._pending
        self._pending.clear()
        return f"{len(self._place.safe)} safe"

    def close(self, outcome: str) -> None:
        """Note how the run ended."""
        if not self._pending:
            self._place.outcomes.append(outcome)


def scripted_monitor(
    place: str, *, options: Mapping[str, Any] | None = None, **shared: Any
) -> MonitorConfig:
    """The config of a scripted tracker."""
    return OwnMonitorConfig(
        type=f"{__name__}:ScriptedTracker",
        name=place,
        options={"place": place, **(options or {})},
        **shared,
    )
