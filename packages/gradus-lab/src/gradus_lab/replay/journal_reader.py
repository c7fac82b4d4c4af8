"""Reads a journal as the decisions that made the batches, in their order (pure).

Two decisions move samples into batches: a group was graded, a batch was cut. Between them lies no
choice that is not computed again: which samples are too old follows from the order of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradus.errors import CorruptStateError
from gradus.orchestrator.records.journal import (
    JournalEvent,
    Line,
    check_journal,
    refuse_damaged,
    surviving,
)
from gradus.orchestrator.types import TaskPointer

_SHOWN_PROBLEMS = 3


@dataclass(frozen=True)
class RecordKey:
    """Where the record of an episode lies."""

    term: int
    """Of the launch that played it."""
    id: str


@dataclass(frozen=True)
class GradedGroup:
    """The last episode of a group ended, and its samples got their credit."""

    id: str
    pointer: TaskPointer
    task_key: str | int
    episodes: tuple[RecordKey, ...]
    """In the order of their ends."""
    samples: tuple[str, ...]
    """Ids of the samples that the filters left."""
    failure: str | None = None
    """Kind of failure of the whole group."""


@dataclass(frozen=True)
class CutBatch:
    """The groups that waited became the batch of a step."""

    step: int
    groups: tuple[str, ...]
    samples: tuple[str, ...]
    """Ids, in the order of training."""
    digests: Mapping[str, str]
    """See `digest_samples`."""


Decision = GradedGroup | CutBatch


@dataclass(frozen=True)
class Decisions:
    """What a run decided, in the one lineage that its weights come from."""

    order: tuple[Decision, ...]
    """Up to the last batch that was sent."""
    num_trained: int
    """Batches that were trained and served; one more may have been sent, which ended the run."""
    weights: Mapping[int, str | None]
    """Version → digest of its tensors; None when it was not known."""
    terms: tuple[int, ...]
    """The launches that played, sent or served some of it."""
    is_finished: bool
    """Whether the run came to its end."""

    @property
    def num_batches(self) -> int:
        return sum(isinstance(decision, CutBatch) for decision in self.order)

    def first(self, num_steps: int) -> tuple[Decision, ...]:
        """The decisions that the first `num_steps` batches need."""
        chosen: list[Decision] = []
        for decision in self.order:
            if num_steps == 0:
                break
            chosen.append(decision)
            num_steps -= isinstance(decision, CutBatch)
        return tuple(chosen)


def read_decisions(records: Sequence[dict[str, Any]]) -> Decisions:
    """The decisions of the surviving lineage of a journal.

    CorruptStateError when the journal breaks its rules, or when it says too little to repeat the
    run because another version of gradus wrote it.
    """
    refuse_damaged(records)
    if problems := check_journal(records).problems:
        shown = "; ".join(problems[:_SHOWN_PROBLEMS])
        raise CorruptStateError(
            f"the journal contradicts itself in {len(problems)} places: {shown}"
        )
    reader = _Reader()
    for number, line in enumerate(surviving(records), start=1):
        try:
            reader.read(line)
        except KeyError as error:
            raise CorruptStateError(
                f"line {number} of the journal's surviving lines, {line['event']!r}, speaks of "
                f"{error}, of which no line before it does; the journal is damaged"
            ) from error
    return reader.finish()


@dataclass
class _Reader:
    """Follows the lines; batches get their samples from a line that may come much later."""

    order: list[GradedGroup | int] = field(default_factory=list)
    """Graded groups, and the steps of batches where they were cut."""
    opened: dict[str, Line] = field(default_factory=dict)
    ended: dict[str, list[RecordKey]] = field(default_factory=dict)
    cut: dict[int, tuple[str, ...]] = field(default_factory=dict)
    shipped: dict[int, CutBatch] = field(default_factory=dict)
    weights: dict[int, str | None] = field(default_factory=dict)
    terms: set[int] = field(default_factory=set)
    last_event: str = ""

    def read(self, line: Line) -> None:
        rules: dict[str, Callable[[Line], None]] = {
            JournalEvent.GROUP_OPENED: self._open,
            JournalEvent.EPISODE_ENDED: self._end,
            JournalEvent.GROUP_GRADED: self._grade,
            JournalEvent.BATCH_CUT: self._cut,
            JournalEvent.BATCH_SHIPPED: self._ship,
            JournalEvent.POLICY_APPLIED: self._apply,
        }
        self.last_event = line["event"]
        if rule := rules.get(self.last_event):
            rule(line)
            self.terms.add(int(line["term"]))

    def finish(self) -> Decisions:
        num_shipped = num_trained = 0
        while num_shipped in self.shipped:
            num_shipped += 1
        while num_trained < num_shipped and num_trained + 1 in self.weights:
            num_trained += 1
        if uncut := sorted(set(range(num_shipped)) - self.cut.keys()):
            raise CorruptStateError(
                f"batch {uncut[0]} was sent and never cut; the journal is damaged"
            )
        order: list[Decision] = []
        for decision in self.order:
            if isinstance(decision, GradedGroup):
                order.append(decision)
            elif decision < num_shipped:
                order.append(self._batch(decision))
        while order and isinstance(order[-1], GradedGroup):
            order.pop()
        return Decisions(
            tuple(order),
            num_trained,
            self.weights,
            tuple(sorted(self.terms)),
            is_finished=self.last_event == JournalEvent.RUN_ENDED,
        )

    def _batch(self, step: int) -> CutBatch:
        batch = self.shipped[step]
        if batch.groups != self.cut[step]:
            raise CorruptStateError(
                f"batch {step} was cut from groups {list(self.cut[step])} and sent with "
                f"{list(batch.groups)}; the journal is damaged"
            )
        return batch

    def _open(self, line: Line) -> None:
        self.opened[line["group"]] = line

    def _end(self, line: Line) -> None:
        episode = RecordKey(int(line["term"]), str(line["episode"]))
        self.ended.setdefault(episode.id.rpartition(".")[0], []).append(episode)

    def _grade(self, line: Line) -> None:
        opened = self.opened[line["group"]]
        pointer = TaskPointer(
            opened["source"], opened["pass_number"], opened["index"], opened["attempt"]
        )
        episodes = tuple(self.ended.pop(line["group"]))
        samples = tuple(line["samples"])
        error = line["error"]
        self.order.append(
            GradedGroup(line["group"], pointer, opened["key"], episodes, samples, error)
        )

    def _cut(self, line: Line) -> None:
        self.cut[line["step"]] = tuple(line["groups"])
        self.order.append(int(line["step"]))

    def _ship(self, line: Line) -> None:
        self.shipped[line["step"]] = CutBatch(
            line["step"], tuple(line["groups"]), tuple(line["samples"]), dict(line["digests"])
        )

    def _apply(self, line: Line) -> None:
        self.weights[int(line["version"])] = line["weights"]
