"""The groups that hold a slot of the buffer at this moment, from the journal as it grows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from gradus.run.json_lines import whole_lines
from gradus.wire.versions import VersionSpan, staleness

_FIRST_BYTES = 4 << 20
"""Of the end of a journal that is opened late; older groups are gone."""
_MAX_LINES = 100_000
"""In one look."""
_MAX_CELLS = 512
STATES = ("playing", "scoring", "complete", "shipped", "not served")


class _Event(msgspec.Struct):
    """A line of the journal, as far as the slots need it."""

    event: str
    group: str = ""
    groups: list[str] = []
    episode: str = ""
    size: int = 0
    step: int | None = None
    version: int | None = None
    lines: int = 0
    reopened: list[str] = []


@dataclass
class _Held:
    """A group with a slot."""

    size: int
    state: str = "playing"
    ended: int = 0
    step: int | None = None
    """The batch that it is in."""
    versions: dict[str, int] = field(default_factory=dict)
    """Served at the start of each episode."""


class SlotBoard:
    """Follows a journal; owns the groups that hold a slot.

    >>> SlotBoard(run_dir.journal).cells()  # doctest: +SKIP
    [{"group": "g000041", "state": "playing", "staleness": 1, "ended": 3, "size": 8}]
    """

    def __init__(self, journal: Path) -> None:
        self._path = journal
        self._begin, self._offset = 0, -1
        self._void: list[tuple[int, int]] = []
        """Lines from one number on, up to a byte, that a resume did not continue from."""
        self._held: dict[str, _Held] = {}
        self._filling = 0
        """The batch that fills now."""

    def cells(self) -> list[dict[str, Any]]:
        """Read on; a cell for each slot that is held, by state, and the staleness that its oldest
        episode will have when it trains, or would have in the batch that fills now."""
        self._follow()
        ordered = sorted(self._held.items(), key=lambda it: (STATES.index(it[1].state), it[0]))
        return [
            {
                "group": group,
                "state": held.state,
                "staleness": self._staleness(held),
                "ended": held.ended,
                "size": held.size,
            }
            for group, held in ordered[:_MAX_CELLS]
        ]

    def counts(self) -> dict[str, int]:
        """How many hold a slot in each state; the cells are of some of them."""
        return Counter(held.state for held in self._held.values())

    def _staleness(self, held: _Held) -> int | None:
        if not held.versions:
            return None
        oldest = min(held.versions.values())
        step = self._filling if held.step is None else held.step
        return staleness(max(step, oldest), VersionSpan(oldest, oldest))

    def _follow(self) -> None:
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if not 0 <= self._offset <= size:
                    self._held.clear()
                    self._void = []
                    self._begin = max(0, size - _FIRST_BYTES)
                    file.seek(self._begin)
                    self._begin += len(file.readline()) if self._begin else 0
                    self._offset = self._begin
                file.seek(self._offset)
                void = self._void
                for line in islice(whole_lines(file), _MAX_LINES):
                    self._offset = line.end
                    if (it := _event(line.content)) is not None:
                        self._take(it)
                        if it.event == "run_resumed":
                            earlier = [both for both in self._void if both[0] < it.lines]
                            self._void = [*earlier, (it.lines, line.end)]
                if self._void is not void:
                    self._take_again(file)
        except OSError:  # There is none, or it went.
            self._held.clear()

    def _take_again(self, file: BinaryIO) -> None:
        """All lines but those that a resume did not continue from."""
        self._held.clear()
        self._filling = 0
        number = _num_lines(file, self._begin)
        for place, line in enumerate(whole_lines(file, stop=self._offset), number):
            is_void = any(first <= place and line.end < end for first, end in self._void)
            if not is_void and (it := _event(line.content)) is not None:
                self._take(it)

    def _take(self, it: _Event) -> None:
        if it.event == "run_started":
            self._held.clear()
            self._filling = it.version or 0
        elif it.event == "run_resumed":
            for group in it.reopened:
                self._held.pop(group, None)
            self._filling = max(self._filling, it.step or 0)
        elif it.event == "group_opened":
            self._held[it.group] = _Held(it.size)
        elif it.event in ("group_dropped", "group_abandoned"):
            self._held.pop(it.group, None)
        elif it.event.startswith("episode_"):
            self._take_episode(it)
        elif it.event == "policy_applied":
            served = it.version or 0
            gone = [k for k, v in self._held.items() if v.step is not None and v.step < served]
            for group in gone:
                del self._held[group]
        else:
            self._take_batch(it)

    def _take_episode(self, it: _Event) -> None:
        held = self._held.get(it.episode.partition(".")[0])
        if held is None:
            return
        if it.event == "episode_ended":
            held.ended += 1
            held.state = "scoring" if held.ended >= held.size else held.state
        elif it.version is not None and it.version >= 0:  # Started, or again.
            held.versions[it.episode] = it.version

    def _take_batch(self, it: _Event) -> None:
        if it.event == "group_graded" and it.group in self._held:
            self._held[it.group].state = "complete"
        elif it.event in ("batch_cut", "batch_shipped") and it.step is not None:
            self._filling = it.step + 1
            for group in (self._held[name] for name in it.groups if name in self._held):
                group.step = it.step
                if it.event == "batch_shipped":
                    group.state = "shipped"
        elif it.event == "step_finished":
            for group in self._held.values():
                if group.step == it.step and group.state == "shipped":
                    group.state = "not served"


def _event(content: bytes | None) -> _Event | None:
    try:
        return msgspec.json.decode(content or b"", type=_Event)
    except (msgspec.DecodeError, RecursionError):
        return None


def _num_lines(file: BinaryIO, end: int) -> int:
    """How many end before that byte, where the file stands afterwards."""
    file.seek(0)
    parts = range(0, end, _FIRST_BYTES)
    return sum(file.read(min(_FIRST_BYTES, end - at)).count(b"\n") for at in parts)
