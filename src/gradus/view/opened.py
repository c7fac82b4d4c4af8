"""One run that somebody looks at: what was read of it, for all who look, and what is new."""

from __future__ import annotations

import fnmatch
import importlib
import io
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from gradus.errors import ConfigError
from gradus.heartbeat import STRANDS
from gradus.monitor import alarms_on, describe_metric, read_live, verdict_on
from gradus.monitor.goal import evaluated_average
from gradus.monitor.metric_table import SECTIONS
from gradus.report.choice import direction, shown_first
from gradus.report.folder import (
    RunFolder,
    notices,
    read_folder,
    read_object,
    read_outcome,
)
from gradus.report.series import Axis, CollectedSeries, RunSeries, read_series
from gradus.run.episodes import read_record
from gradus.run.paths import Purpose, RunDirectory
from gradus.run.records import Place, is_sampled, read_block
from gradus.run.settings import ALARM_THRESHOLDS, planned_steps
from gradus.view.episode import TokenRecords, episode_page, whole_text
from gradus.view.index import EpisodePlace, open_index
from gradus.view.screens.about import machine_now
from gradus.view.screens.changes import followed_task, grown_tokens, ranked_replies
from gradus.view.screens.slots import SlotBoard
from gradus.view.screens.timeline import events_on_curves
from gradus.view.shelf import reward_of

_INDEX_ROWS, _INDEX_SECONDS = 300, 0.03
"""Read in one go, and how long it goes on; then the server answers others."""
_SAMPLED_SECONDS = 30.0
"""Between two readings of a file of metrics that is too long to follow."""
_FOLDER_SECONDS = 2.0
_MAX_POINTS = 4_000
"""Of one curve."""
_MAX_NOTICES = 60
_MAX_MARKS = 400
_MAX_TEXT = 2_000
_WAITS = {
    "time/receive_seconds": "the trainer waits for a batch",
    "time/forward_backward_seconds": "the trainer learns",
    "time/optimize_seconds": "the trainer updates weights",
    "time/publish_seconds": "the trainer copies weights",
    "time/generate_wait_seconds": "a batch waits for its last episodes",
    "time/evaluation_hold_seconds": "a version waits for an evaluation",
    "weights/pause_seconds": "the engine stands still for new weights",
}
"""Bars of who waits for whom, from the newest steps."""
_LOSSES = ("loss/total/mean", "validation/loss/mean")
"""On the first screen of a supervised run."""
_NEWEST = 10
"""Steps whose waits are averaged."""


class OpenRun:
    """Owns all that was read of a run. Its methods read files and block: call them on a thread,
    one at a time.

    >>> run = OpenRun(RunDirectory(Path("runs/demo")))  # doctest: +SKIP
    >>> run.look()["records"]  # doctest: +SKIP
    10
    """

    def __init__(self, run_dir: RunDirectory) -> None:
        self.run_dir = run_dir
        self.index = open_index(run_dir)
        self.tokens = TokenRecords(run_dir)
        self._collected = CollectedSeries()
        self._place = Place()
        self._series = RunSeries()
        self._sampled_at = -math.inf
        self._sampled_size = -1
        self._folder: RunFolder | None = None
        self._folder_at = -math.inf
        self._newest_files: Sequence[tuple[Purpose, int, Path, int]] | None = None
        self._newest_found: dict[str, Any] = {}
        self._looked: dict[str, Any] = {}
        self._overview: dict[str, Any] = {}
        self._overview_of: dict[str, Any] = {}
        self._overview_at = -math.inf
        self._slots = SlotBoard(run_dir.journal)
        self._changed_at: tuple[int, int] = (-1, -1)
        self._changes: dict[str, Any] = {}
        self._marked_size = -1
        self._marked: dict[str, list[int]] = {}

    def look(self) -> dict[str, Any]:
        """Read what is new, some of it; numbers that change when there is something new to show."""
        self._follow_metrics()
        until = time.monotonic() + _INDEX_SECONDS
        while has_more := self.index.advance(max_rows=_INDEX_ROWS):
            if time.monotonic() > until:
                break
        done, total = self.index.progress()
        live = read_live(self.run_dir.live)
        outcome = read_outcome(self.run_dir)
        if self._folder and self._folder.outcome != outcome:
            self._folder = None  # It just ended.
        newest = max(
            (it.time for it in (*self._series.steps[-1:], *self._series.evaluations[-1:])),
            default=0.0,
        )
        self._looked = {
            "records": len(self._series.steps) + len(self._series.evaluations),
            "newest": newest,
            "episodes": self.index.num_rows,
            "generation": self.index.generation,
            "read_bytes": done,
            "all_bytes": total,
            "has_more": has_more,
            "live": live.time if live else None,
            "outcome": outcome,
        }
        return self._looked

    def _follow_metrics(self) -> None:
        path = self.run_dir.metrics
        if is_sampled(path):
            size, age = path.stat().st_size, time.monotonic() - self._sampled_at
            if size != self._sampled_size and age > _SAMPLED_SECONDS:
                self._series = read_series(path)
                self._sampled_at, self._sampled_size = time.monotonic(), size
            return
        while True:
            block = read_block(self.run_dir, self._place)
            if block.was_cut:  # Read all of it again, as if the cuts so far were of no concern.
                self._collected = CollectedSeries()
                self._place = Place(num_cuts=block.after.num_cuts)
                continue
            if block.after == self._place:
                break
            for record in block.records:
                self._collected.add(record)
            self._collected.broken.count += block.broken.count
            self._place = block.after
        self._series = self._collected.series(run_dir=self.run_dir)

    @property
    def series(self) -> RunSeries:
        return self._series

    @property
    def folder(self) -> RunFolder:
        """What the folder says; read again when it was read some seconds ago."""
        if self._folder is None or time.monotonic() - self._folder_at > _FOLDER_SECONDS:
            self._folder = read_folder(self.run_dir.root)
            self._folder_at = time.monotonic()
        return self._folder

    def overview(self) -> dict[str, Any]:
        """The first screen; found once for all who ask within a second after the same look."""
        if self._overview_of != self._looked or time.monotonic() - self._overview_at > 1.0:
            self._overview = self._first_screen()
            self._overview_of, self._overview_at = self._looked, time.monotonic()
        return self._overview

    def _first_screen(self) -> dict[str, Any]:
        folder, series = self.folder, self._series
        verdict = verdict_on(folder.kind, folder.outcome, series.steps)
        times = [it.time for it in (*series.steps, *series.evaluations)]
        return {
            "name": folder.name,
            "kind": folder.kind,
            "outcome": folder.outcome,
            "cause": folder.cause[:_MAX_TEXT],
            "versions": folder.versions,
            "model": folder.settings.values.get("model.name"),
            "launches": folder.num_launches,
            "steps": max((it.step + 1 for it in series.steps), default=0),
            "planned": planned_steps(
                folder.summary.get("max_steps") or folder.settings.values.get("max_steps")
            ),
            "began": min(times, default=None),
            "newest": max(times, default=None),
            "now": time.time(),
            "verdict": {"text": str(verdict), "word": str(verdict.word), "advice": verdict.advice}
            if verdict
            else None,
            "rewards": self._rewards(),
            "losses": self.curves(_LOSSES, "steps") if folder.kind == "sft" else {},
            "evaluations": [
                [it.step, value]
                for it in series.evaluations
                if (value := evaluated_average(it.metrics)) is not None
            ],
            "alarms": self._alarms(),
            "notices": [it[:_MAX_TEXT] for it in notices(self.run_dir)[-_MAX_NOTICES:]],
            "live": self._live(),
            "slots": self._slots.cells(),
            "slots_held": self._slots.counts(),
            "waits": self._waits(),
            "processes": self._processes(),
            "machine": machine_now(self.run_dir),
            "newest_replies": self._newest_replies(),
            "problems": self._problems(),
        }

    def _rewards(self) -> dict[str, Any]:
        """The reward of each step, its spread where it was recorded, and its parts."""
        last = {it.step: it for it in self._series.steps}  # Launches may overlap.
        steps = [last[step] for step in sorted(last)[-_MAX_POINTS:]]
        names = [
            name
            for name in self._series.names
            if name.endswith("/mean") and name.startswith("episode/") and "/reward/" in name
        ]
        means = [reward_of(it) for it in steps]
        # A run of agents that play against each other has no reward of its own.
        kind = "agent" if all(it is None for it in means) else "part"
        parts = [name for name in names if (it := describe_metric(name)) and kind in it.labels]
        parts = parts if kind == "part" else [it for it in parts if it.endswith("/reward/mean")]
        spreads = [name for name in names if name.endswith("/reward/mean")]
        low, high = (
            [_only(it.metrics, spreads, quantile) for it in steps] for quantile in ("p5", "p95")
        )
        return {
            "steps": [it.step + 1 for it in steps],
            "mean": means,
            "p5": low,
            "p95": high,
            "parts": {name: [it.metrics.get(name) for it in steps] for name in parts[:8]},
        }

    def _alarms(self) -> list[dict[str, Any]]:
        """Those that are on, with the last line that a person was told of each."""
        if not self._series.steps:
            return []
        last = self._series.steps[-1]
        told = list(reversed(notices(self.run_dir)))
        return [
            {
                "name": name,
                "step": last.step + 1,
                "value": last.metrics.get(f"alarm/{name}/value"),
                "told": next((it for it in told if "alarm" in it and name in it), "")[:_MAX_TEXT],
            }
            for name in alarms_on(last.metrics)
        ]

    def _live(self) -> dict[str, Any] | None:
        live = read_live(self.run_dir.live)
        return {"time": live.time, "numbers": live.numbers} if live else None

    def _waits(self) -> list[dict[str, Any]]:
        steps = self._series.steps[-_NEWEST:]
        whole = [
            it.metrics["time/step_seconds"] for it in steps if "time/step_seconds" in it.metrics
        ]
        found = []
        for name, meaning in _WAITS.items():
            values = [it.metrics[name] for it in steps if name in it.metrics]
            if values and whole:
                found.append({"name": name, "meaning": meaning, "seconds": fmean(values)})
        return (
            [
                {"name": "time/step_seconds", "meaning": "a whole step", "seconds": fmean(whole)},
                *found,
            ]
            if found
            else []
        )

    def _processes(self) -> list[dict[str, Any]]:
        """Signs of life: what each process did last, and how long ago."""
        now, found = time.time(), []
        folder = self.run_dir.alive
        for path in islice(
            sorted([*folder.glob("*.json"), *folder.glob(f"{STRANDS}/*.json")]), 200
        ):
            try:
                age = now - path.stat().st_mtime
            except OSError:
                continue
            sign = read_object(path)
            name = path.stem if path.parent == folder else f"{path.stem} (beside it)"
            found.append(
                {
                    "name": name,
                    "age": age,
                    "last": str(sign.get("last") or "")[:200],
                    "step": sign.get("step"),
                    "pid": sign.get("pid"),
                }
            )
        return found

    def _newest_replies(self) -> dict[str, Any]:
        """Best, median and worst reply of the newest step that has episodes."""
        newest = self.index.newest_files(3)
        if newest != self._newest_files:  # Else what was found stands.
            self._newest_files = newest
            found = (ranked_replies(purpose, step, path) for purpose, step, path, _ in newest)
            self._newest_found = next((it for it in found if it["replies"]), {"replies": []})
        return self._newest_found

    def _problems(self) -> list[str]:
        """What of the files could not be read, and what is missing."""
        found = []
        if not (self._series.steps or self._series.evaluations):
            found.append("metrics.jsonl has no record: no step and no evaluation came to its end.")
        if self._series.broken.count:
            found.append(f"metrics.jsonl has {self._series.broken}.")
        if self._series.is_sampled:
            found.append("metrics.jsonl is long: an even sample of its records is shown.")
        if self.index.broken.count:
            found.append(f"Records of episodes/ that cannot be read: {self.index.broken.count:,}.")
        is_without = self.folder.kind == "sft" and not self._series.evaluations
        if not is_without and not self.run_dir.episodes.is_dir():
            found.append("episodes/ is not there: nothing was recorded yet, or it was deleted.")
        if lost := self._series.non_finite():
            names = ", ".join(
                f"{name} ({len(steps)} times)" for name, steps in islice(lost.items(), 8)
            )
            found.append(f"Not finite, so missing in the curves: {names}.")
        return found

    def changes(self) -> dict[str, Any]:
        """One task over the steps and the tokens that grew, found anew after each step."""
        done, total = self.index.progress()
        if done < total:
            return {"is_reading": True}
        ((step,),) = self.index.select("max(step)", {}).fetchall()
        newest = (self.index.generation, -1 if step is None else step)
        if newest != self._changed_at:
            self._changed_at = newest
            grown = grown_tokens(self.run_dir, self.tokens.texts())
            self._changes = {"followed": followed_task(self.index), "grown": grown}
        return self._changes

    def catalogue(self) -> list[dict[str, Any]]:
        """Every metric of the run in the groups of docs/metrics.md."""
        sections = {metric.pattern: it.title for it in SECTIONS for metric in it.metrics}
        lost = self._series.non_finite()
        wanted = (*shown_first([self.folder.kind]), "episode/*/reward/*/mean")
        first = [re.compile(fnmatch.translate(it)) for it in wanted]
        found = []
        for name in self._series.names:
            about = describe_metric(name)
            found.append(
                {
                    "name": name,
                    "section": sections[about.metric.pattern] if about else "Others",
                    "unit": about.metric.unit if about and about.metric.unit != "1" else "",
                    "meaning": about.metric.meaning if about else "",
                    "direction": direction(name),
                    "first": any(it.match(name) for it in first),
                    "lost": lost.get(name, [])[:50],
                }
            )
        order = {it.title: place for place, it in enumerate(SECTIONS)}
        found.sort(key=lambda it: order.get(str(it["section"]), len(order)))
        return found

    def marks(self) -> dict[str, Any]:
        """What stands on the axis of curves: steps with a resume, a checkpoint, an evaluation, or
        an alarm that began or ended."""
        size = _size(self.run_dir.journal)
        if size != self._marked_size:
            self._marked_size = size
            found: dict[str, set[int]] = {}
            for it in events_on_curves(self.run_dir.journal):
                found.setdefault(it["what"], set()).add(it["step"])
            self._marked = {name: sorted(steps) for name, steps in found.items()}
        before: set[str] = set()
        alarms = []
        for record in self._series.steps:
            now = set(alarms_on(record.metrics))
            alarms += [[record.step + 1, name, name in now] for name in sorted(now ^ before)]
            before = now
        limits = {
            name: limit
            for name in self._series.names
            if name.startswith("alarm/") and name.endswith("/value")
            if (limit := ALARM_THRESHOLDS.get(name.split("/")[-2])) is not None
        }
        return {"events": self._marked, "alarms": alarms[-_MAX_MARKS:], "limits": limits}

    def curves(self, names: Sequence[str], over: Axis) -> dict[str, Any]:
        """Places and values of each metric; of a long one evenly spread points and the last."""
        found = {}
        for name in names:
            points = self._series.positions(name, over)
            stride = max(1, math.ceil(len(points) / _MAX_POINTS))
            kept = (
                points[::stride] if stride == 1 or not points else [*points[::stride], points[-1]]
            )
            found[name] = {
                "x": [x for x, _ in kept],
                "y": [y for _, y in kept],
                "count": len(points),
            }
        return found

    def curves_as_parquet(self, names: Sequence[str], over: Axis) -> bytes:
        """A row for each point, none left out."""
        found = [(name, x, y) for name in names for x, y in self._series.positions(name, over)]
        names = ("metric", over, "value")
        return _parquet({name: [it[n] for it in found] for n, name in enumerate(names)})

    def episodes_as_parquet(
        self, where: Mapping[str, Sequence[str]], sort: str
    ) -> Callable[[], bytes]:
        """What writes the table of the episodes that pass, while others ask the run; steps count
        from 0."""
        return lambda: _parquet(self.index.columns(where, sort))

    def episode(self, key: EpisodePlace, *, first: int = 0) -> dict[str, Any]:
        """One episode; ConfigError when its record went away."""
        return {"row": self.index.cells_of(key), **episode_page(self._record(key), first=first)}

    def episode_tokens(self, key: EpisodePlace) -> dict[str, Any]:
        return self.tokens.of(self._record(key))

    def episode_text(self, key: EpisodePlace, trace: int, node: int) -> str:
        return whole_text(self._record(key), trace, node)

    def _record(self, key: EpisodePlace) -> Mapping[str, Any]:
        place = self.index.find(key)
        if place is None:
            raise ConfigError(
                "no episode begins there: it was deleted, cut off by a resume, or is not read yet"
            )
        try:
            record = read_record(*place)
        except OSError as error:
            raise ConfigError(f"the record of the episode went away: {error.strerror}") from error
        if record is None:
            raise ConfigError("the record of the episode cannot be read any more")
        return record


def _only(metrics: Mapping[str, float], names: Sequence[str], quantile: str) -> float | None:
    """A percentile of the reward where one source alone, or all together, has one."""
    if "episode/reward/mean" in names:
        return metrics.get(f"episode/reward/{quantile}")
    return metrics.get(names[0].removesuffix("mean") + quantile) if len(names) == 1 else None


def _parquet(columns: Mapping[str, Any]) -> bytes:
    """NaN is null. ConfigError without pyarrow, which nothing else here needs."""
    try:
        arrow, written = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    except ImportError:
        raise ConfigError(
            "Parquet needs pyarrow, which is not installed beside gradus view: pip install "
            "pyarrow. The CSV of a chart has every digit too."
        ) from None
    file = io.BytesIO()
    found = {name: arrow.array(it, from_pandas=True) for name, it in columns.items()}
    written.write_table(arrow.table(found), file)
    return file.getvalue()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
