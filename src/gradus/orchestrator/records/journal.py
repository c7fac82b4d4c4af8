"""One append-only record of every decision and outcome, one JSON object per line.

It is what resume, replay and `check_journal` read. A line counts once its newline is there: a torn
last line is not an event. What a journal must satisfy, in the lines that `surviving` keeps:

    conservation  every started episode ends once: finished, failed or cancelled, or is still open
                  at the end of a journal that was cut off; every group is trained, dropped,
                  abandoned, or open
    training      a sample trains in one batch only, batches are in step order, and a sample that
                  was dropped does not train
    versions      the served version never goes back within one term
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec

from gradus.errors import CorruptStateError, StorageError
from gradus.files import DISK_ERRORS, PatientLines, storage_error, unlinked
from gradus.log import get_logger

Line = dict[str, Any]
_LOG = get_logger(__name__)


class JournalEvent(StrEnum):
    """What a line can say."""

    RUN_STARTED = "run_started"
    RUN_RESUMED = "run_resumed"
    GROUP_OPENED = "group_opened"
    EPISODE_STARTED = "episode_started"
    EPISODE_RETRIED = "episode_retried"
    EPISODE_ENDED = "episode_ended"
    GROUP_GRADED = "group_graded"
    GROUP_DROPPED = "group_dropped"
    GROUP_ABANDONED = "group_abandoned"
    TASK_RETURNED = "task_returned"
    TASK_GIVEN_UP = "task_given_up"
    TASK_SET_ASIDE = "task_set_aside"
    SAMPLES_DROPPED = "samples_dropped"
    BATCH_CUT = "batch_cut"
    BATCH_SHIPPED = "batch_shipped"
    STEP_FINISHED = "step_finished"
    POLICY_APPLIED = "policy_applied"
    EVALUATION_STARTED = "evaluation_started"
    EVALUATION_ENDED = "evaluation_ended"
    CHECKPOINT_COMMITTED = "checkpoint_committed"
    RUN_ENDED = "run_ended"


class Journal(AbstractContextManager["Journal"]):
    """Owns the open file; each line carries the term of the writer's lease."""

    def __init__(self, path: Path, *, term: int, now: Callable[[], float]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = io.FileIO(path, "ab", opener=unlinked)
        self._lines = PatientLines(self._file.fileno())
        whole = path.read_bytes()
        self._file.truncate(whole.rfind(b"\n") + 1)
        self.num_lines = whole.count(b"\n")
        """Lines of the file, those of earlier launches too."""
        self._term = term
        self._now = now
        self._encoder = msgspec.json.Encoder()

    def write(self, event: JournalEvent, **fields: Any) -> None:
        """Append one line; it is with the operating system when this returns, or waits for a disk
        that does not take it: what must not be without it asks `flush` or `sync` first."""
        record = {"event": event, "time": self._now(), "term": self._term, **fields}
        was_waiting = self._lines.num_waiting > 0
        self.num_lines += 1
        try:
            self._lines.add(self._encoder.encode(record) + b"\n")
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise storage_error(error, self._path) from error
            if not was_waiting:
                _LOG.error("its lines wait in memory: %s", storage_error(error, self._path))

    def flush(self) -> None:
        """StorageError while the disk does not take all lines."""
        try:
            self._lines.flush()
        except OSError as error:
            raise storage_error(error, self._path) from error

    def sync(self) -> None:
        """Make all lines durable, also against a power cut; takes as long as the disk does."""
        self.flush()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise storage_error(error, self._path) from error

    def __exit__(self, *_: object) -> None:
        try:
            self.flush()
        except StorageError as error:
            _LOG.error("%d of its lines are lost: %s", self._lines.num_waiting, error)
        self._file.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Every whole line; refuses a line in the middle that is not JSON."""
    lines = path.read_bytes().split(b"\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            records.append(msgspec.json.decode(line))
        except (ValueError, RecursionError) as error:
            raise CorruptStateError(f"{path} line {number} is not JSON ({error})") from error
    return records


def last_end(path: Path) -> int:
    """The last step that was trained when the run last came to an end; -1 if it never did, or
    if what led there was done again."""
    found = -1
    for line in read_journal(path):
        if line["event"] == JournalEvent.RUN_ENDED:
            found = line["step"]
        elif line["event"] == JournalEvent.RUN_RESUMED:
            found = min(found, line["step"] - 1)
    return found


_COUNT: Any = Annotated[int, msgspec.Meta(ge=0)]
_EPISODE = {"episode": str, "version": int}
_NEEDED: Mapping[JournalEvent, Mapping[str, Any]] = {
    JournalEvent.RUN_RESUMED: {"lines": _COUNT, "reopened": list[str], "cut_off": list[str]},
    JournalEvent.GROUP_OPENED: {
        **{"group": str, "source": str, "index": int},
        **{"key": str | int, "pass_number": int, "attempt": int},
    },
    JournalEvent.EPISODE_STARTED: _EPISODE,
    JournalEvent.EPISODE_RETRIED: _EPISODE,
    JournalEvent.EPISODE_ENDED: {**_EPISODE, "outcome": str},
    JournalEvent.GROUP_GRADED: {"group": str, "samples": list[str]},
    JournalEvent.GROUP_DROPPED: {"group": str},
    JournalEvent.GROUP_ABANDONED: {"group": str},
    JournalEvent.SAMPLES_DROPPED: {"samples": list[str]},
    JournalEvent.BATCH_CUT: {"step": _COUNT, "groups": list[str]},
    JournalEvent.BATCH_SHIPPED: {
        **{"step": _COUNT, "groups": list[str]},
        **{"samples": list[str], "digests": dict[str, str]},
    },
    JournalEvent.STEP_FINISHED: {"step": _COUNT},
    JournalEvent.POLICY_APPLIED: {"version": int, "weights": str | None},
    JournalEvent.CHECKPOINT_COMMITTED: {"step": _COUNT},
}
"""What a reader needs of a line besides its term; a line may say more."""
_SHAPES = {
    event: msgspec.defstruct("Line", {"term": _COUNT, **_NEEDED.get(event, {})}.items())
    for event in JournalEvent
}


def refuse_damaged(records: Sequence[Any]) -> None:
    """CorruptStateError for the first line that lacks what its event must say."""
    for number, record in enumerate(records, start=1):
        event = record.get("event") if isinstance(record, dict) else None
        if event not in list(JournalEvent):
            raise CorruptStateError(
                f"line {number} of the journal has the event {event!r}, which is none of this "
                "version; the line is damaged, or another version of gradus wrote it"
            )
        try:
            msgspec.convert(record, _SHAPES[JournalEvent(event)])
        except msgspec.ValidationError as error:
            raise CorruptStateError(
                f"line {number} of the journal, {event!r}, does not say enough for a replay "
                f"({error}); it is damaged, or another version of gradus wrote it"
            ) from error


def surviving(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the one lineage that the last launch belongs to; the others are void.

    `run_resumed` voids every line after the first `lines` of the file, and all of the groups that
    it names as `reopened`; `run_started` voids everything before it.
    """
    kept: list[tuple[int, dict[str, Any]]] = []
    for number, record in enumerate(records):
        if record["event"] == JournalEvent.RUN_STARTED:
            kept.clear()
        if record["event"] == JournalEvent.RUN_RESUMED:
            reopened = set(record["reopened"])
            kept = [(n, r) for n, r in kept if n < record["lines"] and _group_of(r) not in reopened]
        kept.append((number, record))
    return [record for _, record in kept]


def _group_of(record: dict[str, Any]) -> str | None:
    """The group that a line is about; None for a line about the run or about a batch."""
    group = record.get("group")
    if group is None and "episode" in record:
        group = str(record["episode"]).rpartition(".")[0]
    return group


@dataclass
class Conservation:
    """What became of everything that a run started."""

    ended: Counter[str] = field(default_factory=Counter)
    """Episodes by outcome."""
    open_episodes: set[str] = field(default_factory=set)
    """Started and not ended."""
    groups: dict[str, str] = field(default_factory=dict)
    """Group → `open`, `trained`, `dropped` or `abandoned`."""
    batches: dict[int, list[str]] = field(default_factory=dict)
    """Step → ids of its samples."""
    problems: list[str] = field(default_factory=list)
    """What is wrong, in words; empty for a sound journal."""


def check_journal(records: Sequence[Line]) -> Conservation:
    """Follow the surviving lineage of a journal; what is wrong stands in `problems`."""
    follower = _Follower()
    for line in surviving(records):
        follower.follow(line)
    return follower.finish()


class _Follower:
    def __init__(self) -> None:
        self.found = Conservation()
        self._finished: set[str] = set()
        self._started: set[str] = set()
        self._dropped: set[str] = set()
        self._step_of: dict[str, int] = {}
        self._version = (0, 0)
        self._has_ended = False
        self._rules: dict[str, Callable[[Line], None]] = {
            JournalEvent.GROUP_OPENED: self._open,
            JournalEvent.EPISODE_STARTED: self._start,
            JournalEvent.EPISODE_ENDED: self._end,
            JournalEvent.GROUP_DROPPED: lambda line: self._close(line, "dropped"),
            JournalEvent.GROUP_ABANDONED: lambda line: self._close(line, "abandoned"),
            JournalEvent.SAMPLES_DROPPED: self._drop_samples,
            JournalEvent.BATCH_SHIPPED: self._ship,
            JournalEvent.POLICY_APPLIED: self._apply,
            JournalEvent.RUN_RESUMED: self._resume,
            JournalEvent.RUN_ENDED: self._note_end,
        }

    def follow(self, line: Line) -> None:
        rule = self._rules.get(line["event"])
        if rule is not None:
            rule(line)

    def finish(self) -> Conservation:
        if self._has_ended:
            for episode in sorted(self.found.open_episodes):
                self._complain(f"episode {episode} was started and has no end")
            for group, outcome in self.found.groups.items():
                if outcome == "open":
                    self._complain(f"group {group} is neither trained, dropped nor abandoned")
        return self.found

    def _complain(self, problem: str) -> None:
        self.found.problems.append(problem)

    def _open(self, line: Line) -> None:
        group = line["group"]
        if group in self.found.groups:
            self._complain(f"group {group} was opened twice")
        self.found.groups[group] = "open"

    def _start(self, line: Line) -> None:
        episode = line["episode"]
        if episode in self._started:
            self._complain(f"episode {episode} was started twice")
        self._started.add(episode)
        self.found.open_episodes.add(episode)

    def _end(self, line: Line) -> None:
        episode = line["episode"]
        if episode not in self.found.open_episodes:
            self._complain(f"episode {episode} ended without a start, or twice")
        self.found.open_episodes.discard(episode)
        self.found.ended[line["outcome"]] += 1
        if line["outcome"] == "finished":
            self._finished.add(episode)

    def _close(self, line: Line, outcome: str) -> None:
        group = line["group"]
        if self.found.groups.get(group) != "open":
            self._complain(f"group {group} is {outcome} and was not open")
        self.found.groups[group] = outcome

    def _drop_samples(self, line: Line) -> None:
        self._dropped.update(line["samples"])
        for sample in line["samples"]:
            if sample in self._step_of:
                self._complain(f"sample {sample} was dropped after it trained")

    def _ship(self, line: Line) -> None:
        step, samples = line["step"], line["samples"]
        if self.found.batches.get(step) == samples:
            return  # A resumed run sends the same batch again.
        if step != len(self.found.batches):
            self._complain(f"batch {step} came after {len(self.found.batches)} batches")
        self.found.batches[step] = samples
        for sample in samples:
            self._train(sample, step)
        for group in line["groups"]:
            self._close({"group": group}, "trained")

    def _train(self, sample: str, step: int) -> None:
        if sample in self._step_of:
            self._complain(f"sample {sample} trains in batch {self._step_of[sample]} and {step}")
        if sample in self._dropped:
            self._complain(f"sample {sample} trains in batch {step} and was dropped")
        if sample.split("/", 1)[0] not in self._finished:
            self._complain(f"sample {sample} trains in batch {step}; its episode did not finish")
        self._step_of[sample] = step

    def _apply(self, line: Line) -> None:
        version = (line["term"], line["version"])
        if version <= self._version:
            self._complain(f"version {line['version']} was applied after {self._version[1]}")
        self._version = version

    def _resume(self, line: Line) -> None:
        """What still ran of abandoned groups is gone with the process."""
        gone = {e for e in self.found.open_episodes if e.rpartition(".")[0] in line["cut_off"]}
        self.found.open_episodes -= gone
        self.found.ended["cancelled"] += len(gone)

    def _note_end(self, _: Line) -> None:
        self._has_ended = True
