"""What Prometheus is shown of a run, and under which names.

The page has the records of the last step, the last evaluation, and `live.json` as it is at the
moment of the scrape. One rule turns a metric of ours into a name with labels:

1. What the catalogue has in angle brackets (`<source>`, `<agent>`, `<part>`, ...) becomes a label;
   its own word takes its place, and all parts are joined by `_` behind `gradus_`. So a name with
   labels is never that of the number over all of them.
2. Numbers are in base units: `_gib` becomes `_bytes`, `_teraflops` becomes `_flops`.
3. A last part `sum` (in one step) is left out, because Prometheus keeps that word for histograms. A
   last part `total` makes a counter; everything else is a gauge.

A metric that is not in the catalogue becomes `gradus_metric{name="..."}`.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from gradus.monitor.catalogue import Kind, describe_metric
from gradus.monitor.live import read_live
from gradus.run.paths import RunDirectory
from gradus.run.records import Record
from gradus.tracking.base import RunOutcome, TrackedRun

SeriesKind = Literal["gauge", "counter"]

PREFIX = "gradus_"
UNKNOWN = f"{PREFIX}metric"
"""Holds every metric that is not in the catalogue."""

_SIGNS = {"@": "_at_", "^": "_all_"}
"""They tell `pass@<k>` and `pass^<k>` apart."""
_BASE_UNITS = {"gib": ("bytes", 2.0**30), "teraflops": ("flops", 1e12)}
_MAX_REMEMBERED = 8192
MAX_LABEL_CHARACTERS = 200
LIVE_UNTIL_SECONDS = 15.0
"""Older gauges of `live.json` are of a process that ended or hangs, and are not shown."""
_STEPS = "step"
_KEPT_STAGES = ("eval", "validation")
"""Recorded now and then: their numbers stay until there are newer ones."""


@dataclass(frozen=True)
class ExportedMetric:
    """What Prometheus calls one metric of ours."""

    name: str
    labels: Mapping[str, str]
    kind: SeriesKind
    scale: float
    """Our number times this is theirs."""
    help: str


Number = tuple[ExportedMetric, float]
"""A metric, and its value in our unit."""


@lru_cache(maxsize=_MAX_REMEMBERED)
def export(metric: str) -> ExportedMetric:
    """The name, labels and unit of a metric.

    >>> export("episode/words/reward/accuracy/mean").name
    'gradus_episode_source_reward_part_mean'
    >>> dict(export("episode/words/reward/accuracy/mean").labels)
    {'source': 'words', 'part': 'accuracy'}
    >>> export("throughput/peak_memory_gib").name
    'gradus_throughput_peak_memory_bytes'
    """
    found = describe_metric(metric)
    if found is None:
        text = "A metric that is not in the catalogue."
        return ExportedMetric(UNKNOWN, {"name": metric}, "gauge", 1.0, text)
    family = found.family
    for sign, word in _SIGNS.items():
        family = family.replace(sign, word)
    words, scale = [word for word in re.split(r"[^A-Za-z0-9]+", family) if word], 1.0
    if found.kind is Kind.SUM:
        words.pop()
    for position, word in enumerate(words):
        if word in _BASE_UNITS:
            words[position], scale = _BASE_UNITS[word]
    is_counter = found.kind is Kind.TOTAL
    return ExportedMetric(
        name=PREFIX + "_".join(words),
        labels=found.labels,
        kind="counter" if is_counter else "gauge",
        scale=scale,
        help=f"{found.metric.meaning} [{found.metric.unit}; {found.metric.pattern}]",
    )


class NumberBoard:
    """Owns the numbers that are shown; records come from one thread, scrapes from another."""

    def __init__(
        self, run: TrackedRun, directory: RunDirectory, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._run = run
        self._directory = directory
        self._clock = clock
        self._lock = threading.Lock()
        self._shown: dict[str, dict[str, float]] = {}
        """Kind of record → the numbers of its newest step."""
        self._newest: dict[str, int] = {}
        self._recorded_at = 0.0
        self._outcome: RunOutcome | None = None

    def add(self, record: Record) -> None:
        """Show a record: of a newer step in place of what was there, of the same step beside it."""
        numbers = record.numbers
        with self._lock:
            self._recorded_at = max(self._recorded_at, record.time)
            for kind in sorted({_kind(name) for name in numbers}):
                newest = self._newest.get(kind, record.step)
                if record.step < newest:
                    continue  # The follower sends again what `open` read from the file.
                old = self._shown.get(kind, {}) if record.step == newest else {}
                self._shown[kind] = old | {n: v for n, v in numbers.items() if _kind(n) == kind}
                self._newest[kind] = record.step

    def end(self, outcome: RunOutcome) -> None:
        with self._lock:
            self._outcome = outcome

    def collect(self) -> Iterator[Metric]:
        """Every family of this moment; of two numbers with the same labels the later one counts."""
        families: dict[str, tuple[ExportedMetric, dict[tuple[str, ...], float]]] = {}
        for about, value in (*self._recorded(), *self._live(), *self._processes()):
            _, values = families.setdefault(about.name, (about, {}))
            values[tuple(map(_label, about.labels.values()))] = value * about.scale
        for name, (about, values) in sorted(families.items()):
            kind = CounterMetricFamily if about.kind == "counter" else GaugeMetricFamily
            family = kind(name, about.help, labels=["run", *about.labels])
            for labels, value in values.items():
                family.add_metric([_label(self._run.name), *labels], value)
            yield family

    def _recorded(self) -> Iterator[Number]:
        facts = {"kind": self._run.kind, "id": self._run.id, "version": self._run.code_version}
        yield _fact("run_info", "1; labels say what runs.", **facts), 1.0
        with self._lock:
            numbers = [it for shown in self._shown.values() for it in shown.items()]
            step, recorded_at = self._newest.get(_STEPS), self._recorded_at
            ended = self._outcome
        yield from ((export(name), value) for name, value in numbers)
        if step is not None:
            yield _fact("step", "Step of the last record, from 0."), float(step)
        if recorded_at:
            yield _fact("record_timestamp_seconds", "Unix time of the last record."), recorded_at
        for outcome in ("done", "solved", "stalled", "alarmed", "failed", "interrupted"):
            text = "1 for how the run ended; all 0 while it runs."
            yield _fact("run_ended", text, outcome=outcome), float(outcome == ended)

    def _live(self) -> Iterator[Number]:
        live = read_live(self._directory.live)
        if live is None:
            return
        yield (
            _fact("live_timestamp_seconds", "Unix time of the last look at the queues."),
            live.time,
        )
        is_old = self._clock() - live.time > LIVE_UNTIL_SECONDS
        for name, value in live.numbers.items():
            if not is_old or name.endswith("/total"):
                yield export(name), value

    def _processes(self) -> Iterator[Number]:
        text = "Unix time of the last sign of life of a process."
        for process, seconds in _heartbeats(self._directory.alive).items():
            yield _fact("process_alive_timestamp_seconds", text, process=process), seconds


def _fact(name: str, help: str, **labels: str) -> ExportedMetric:
    return ExportedMetric(f"{PREFIX}{name}", labels, "gauge", 1.0, help)


def _label(text: str) -> str:
    return text[:MAX_LABEL_CHARACTERS].encode("utf-8", "replace").decode()


def _heartbeats(folder: Path) -> dict[str, float]:
    try:
        paths = [path for path in folder.iterdir() if path.suffix == ".json"]
    except OSError:
        return {}
    found = {}
    for path in paths:
        with contextlib.suppress(OSError):  # It was replaced or deleted a moment ago.
            found[path.stem] = os.stat(path).st_mtime
    return found


def _kind(name: str) -> str:
    """Which records bring a metric: those of steps, or some that come now and then."""
    stage = name.partition("/")[0]
    return stage if stage in _KEPT_STAGES else _STEPS
