"""What ran when in some steps of a run, from its journal and the seconds that its records name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from gradus.errors import ConfigError
from gradus.run.json_lines import whole_lines
from gradus.run.paths import RunDirectory
from gradus.run.records import Record

MAX_STEPS = 20
_MAX_LINES = 200_000
_MAX_BARS = 12
_BUCKETS = 200
_NEAR_BYTES = 1 << 16
_DRAWN = ("policy_applied", "checkpoint_committed", "run_resumed")
"""Events that are marks."""
_TRAINER = {
    "time/receive_seconds": "waits for a batch",
    "time/forward_backward_seconds": "learns",
    "time/optimize_seconds": "updates weights",
    "time/publish_seconds": "copies weights",
}
_SHARES = {
    "time/receive_seconds": "the trainer waited for a batch",
    "weights/pause_seconds": "the engine stood still for new weights",
    "time/generate_wait_seconds": "a batch waited for its last episodes",
    "time/evaluation_hold_seconds": "a version waited for an evaluation",
}


class _Event(msgspec.Struct):
    """A line of the journal, as far as a drawing needs it."""

    event: str
    time: float
    episode: str = ""
    outcome: str = ""
    group: str = ""
    source: str = ""
    step: int | None = None
    version: int | None = None
    reason: Any = None


@dataclass
class _Drawing:
    """What the events of a window become."""

    begin: float
    end: float
    started: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    played: list[tuple[float, float, str, str]] = field(default_factory=list)
    """Start, end, name and how it ended."""
    stages: dict[int, dict[str, float]] = field(default_factory=dict)
    """Of a batch: when it was cut, shipped and trained."""
    evaluations: dict[int, list[float]] = field(default_factory=dict)
    marks: list[dict[str, Any]] = field(default_factory=list)

    def take(self, it: _Event) -> None:
        number = it.version if it.step is None else it.step
        if it.event in ("run_started", "run_resumed"):
            self.started.clear()  # What ran before ended without a line.
        if it.event == "group_opened":
            self.sources[it.group] = it.source
        elif it.event == "episode_started":
            self.started[it.episode] = it.time
        elif it.event == "episode_ended":
            start = self.started.pop(it.episode, self.begin)
            self.played.append((start, it.time, it.episode, it.outcome))
        elif it.event in ("batch_cut", "batch_shipped", "step_finished"):
            self.stages.setdefault(number or 0, {})[it.event] = it.time
        elif it.event in ("evaluation_started", "evaluation_ended"):
            self.evaluations.setdefault(number or 0, []).append(it.time)
        elif it.event in _DRAWN and self.begin <= it.time <= self.end:
            self.marks.append({"time": it.time, "what": it.event, "number": number})


def timeline_page(
    run_dir: RunDirectory, steps: Sequence[Record], last: int | None, count: int
) -> dict[str, Any]:
    """The `count` steps up to `last`, the newest without one; ConfigError where there is none."""
    by_step = {it.step: it for it in steps}
    if not by_step:
        raise ConfigError("no step has ended yet, so there is no time to show")
    if not run_dir.journal.is_file():
        raise ConfigError("journal.jsonl is not there: only a run of gradus rl keeps one")
    last = max(by_step) if last is None else last
    if last not in by_step:
        raise ConfigError(f"step {last + 1} has no record; the last is step {max(by_step) + 1}")
    shown = [by_step[step] for step in sorted(by_step) if last - count < step <= last]
    before = by_step.get(shown[0].step - 1)
    begin = before.time if before else shown[0].time - _seconds(shown[0], "time/step_seconds")
    drawing = _Drawing(begin, shown[-1].time)
    # Episodes that still ran at the beginning began at most about as long before.
    margin = max(60.0, drawing.end - begin)
    is_whole = _read(run_dir.journal, begin - margin, drawing)
    return {
        "first": shown[0].step,
        "last": last,
        "newest": max(by_step),
        "oldest": min(by_step),
        "begin": begin,
        "end": drawing.end,
        "lanes": _lanes(drawing, shown),
        "playing": _playing(drawing),
        "marks": drawing.marks,
        "shares": _shares(shown, drawing.end - begin),
        "is_whole": is_whole,
    }


def _read(path: Path, begin: float, drawing: _Drawing) -> bool:
    """Give the events of the window to the drawing; whether all of them were read."""
    with path.open("rb") as file:
        _seek(file, begin)
        for number, line in enumerate(whole_lines(file)):
            event = _event(line.content)
            if event is None:
                continue
            if number > _MAX_LINES:
                return False
            # Batches are cut before what ends them; a little behind the end says how they ended.
            if event.time > drawing.end + 1.0:
                break
            drawing.take(event)
    return True


def _event(content: bytes | None) -> _Event | None:
    try:
        return msgspec.json.decode(content or b"", type=_Event)
    except (msgspec.DecodeError, RecursionError):
        return None


def _seek(file: BinaryIO, time: float) -> None:
    """Stand at a line before which nothing of the window lies, found by halves."""
    low, high = 0, file.seek(0, os.SEEK_END)
    while high - low > _NEAR_BYTES:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()
        event = _event(file.readline())
        if event is not None and event.time < time:
            low = middle
        else:
            high = middle
    file.seek(low)
    if low:
        file.readline()


def _lanes(drawing: _Drawing, shown: Sequence[Record]) -> list[dict[str, Any]]:
    trainer, batches = [], []
    end = drawing.end
    for record in reversed(shown):
        # A step may be noted late, while its version waits; the trainer was at the next by then.
        stages = drawing.stages.get(record.step, {})
        end = min(end, stages.get("step_finished", record.time))
        for name, said in reversed(_TRAINER.items()):
            if not (seconds := _seconds(record, name)):
                continue
            trainer.append([end - seconds, end, said, record.step])
            end -= seconds
    for step, stages in drawing.stages.items():
        cut, trained = stages.get("batch_cut"), stages.get("step_finished")
        if cut is not None and (trained or drawing.end) >= drawing.begin:
            batches.append([cut, trained or drawing.end, "waits for the trainer, and trains", step])
    held = [
        [times[0], times[1] if len(times) > 1 else drawing.end, "evaluates", version]
        for version, times in drawing.evaluations.items()
    ]
    pauses = [
        [mark["time"] - pause, mark["time"], "stands still", mark["number"]]
        for mark in drawing.marks
        if mark["what"] == "policy_applied"
        for record in shown
        if record.step + 1 == mark["number"]
        and (pause := _seconds(record, "weights/pause_seconds")) > 0
    ]
    within = [it for it in drawing.played if it[1] >= drawing.begin]
    slow = sorted(within, key=lambda it: it[0] - it[1])[:_MAX_BARS]
    bars = [
        [
            start,
            end,
            f"{drawing.sources.get(name.partition('.')[0], 'episode')} {name}: {how}",
            name,
        ]
        for start, end, name, how in sorted(slow)
    ]
    lanes = {"trainer": trainer, "batches": batches, "engine": pauses, "evaluation": held}
    return [{"name": name, "spans": spans} for name, spans in lanes.items() if spans] + [
        {"name": "longest episodes" if number == 0 else "", "spans": [bar]}
        for number, bar in enumerate(bars)
    ]


def _playing(drawing: _Drawing) -> list[float]:
    """How many episodes ran in each part of the window, on average."""
    width = (drawing.end - drawing.begin) / _BUCKETS
    if width <= 0:
        return []
    running = [0.0] * _BUCKETS
    still = [(start, drawing.end) for start in drawing.started.values()]
    for start, end in [*((it[0], it[1]) for it in drawing.played), *still]:
        first, last = ((at - drawing.begin) / width for at in (start, min(end, drawing.end)))
        for place in range(max(0, int(first)), min(_BUCKETS, int(last) + 1)):
            running[place] += max(0.0, min(last, place + 1) - max(first, place))
    return [round(it, 2) for it in running]


def _shares(shown: Sequence[Record], window: float) -> list[dict[str, Any]]:
    """Who stood still, as a share of the time of these steps, with what a restart took of it."""
    whole = max(window, sum(_seconds(it, "time/step_seconds") for it in shown))
    found = [(said, sum(_seconds(it, name) for it in shown)) for name, said in _SHARES.items()]
    return [
        {"said": said, "seconds": seconds, "share": seconds / whole}
        for said, seconds in found
        if whole > 0 and seconds > 0
    ]


def _seconds(record: Record, name: str) -> float:
    return max(0.0, record.metrics.get(name, 0.0))


def events_on_curves(path: Path) -> Iterator[Mapping[str, Any]]:
    """Resumes, checkpoints and evaluations of the whole journal, for the axis of a curve."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in whole_lines(file):
            content = line.content or b""
            # Most lines are about episodes: they need not be decoded.
            if not any(word in content[:60] for word in _MARKED):
                continue
            event = _event(content)
            if event is not None and (event.step is not None or event.version is not None):
                number = event.version if event.step is None else event.step
                yield {"what": event.event, "step": number}


_MARKED = (b'"run_resumed"', b'"checkpoint_committed"', b'"evaluation_ended"')
