"""What a journal must satisfy, checked line by line (pure).

    conservation  every started episode ends once: finished, failed or cancelled, or is still open
                  at the end of a journal that was cut off; every group is trained, dropped,
                  abandoned, or open
    training      a sample trains in one batch only, batches are in step order, and a sample that
                  was dropped does not train
    versions      the served version never goes back within one term

Only the surviving lineage counts, see `journal.surviving`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradus.orchestrator.records.journal import JournalEvent, surviving

Line = dict[str, Any]


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
    """What must not be, in words; empty for a sound journal."""


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
