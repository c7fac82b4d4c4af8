"""The life cycle and the slot of every group (pure).

A group takes a slot when it opens. A group that trains keeps it until inference serves a version
trained on it; a group without samples gives it back at once, because its replacement belongs to the
same batch. With `(max_lag + 1) * groups per batch` slots no group starts that must end too old: it
is always among the next `max_lag + 1` batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from gradus.orchestrator.types import EpisodeOutcome, GroupPhase


@dataclass
class _Group:
    id: str
    planned: set[str]
    is_frozen: bool = False
    phase: GroupPhase = GroupPhase.OPEN
    holds_slot: bool = True
    is_abandoned: bool = False
    running: dict[str, int] = field(default_factory=dict)
    """Episode id → version at its start."""
    versions: dict[str, int] = field(default_factory=dict)
    """Version at the start of every episode that started, also of those that ended."""
    step: int | None = None
    ended: Counter[EpisodeOutcome] = field(default_factory=Counter)


class EndedEpisodes(msgspec.Struct, frozen=True):
    """How many episodes ended in which way, as a restart at this point counts them."""

    of_outcomes: dict[EpisodeOutcome, int]


class GroupSlots:
    """Owns the state of all groups, and counts what became of every started episode.

    >>> slots = GroupSlots(budget=1)
    >>> episode_ids = slots.open("g0", size=2)
    >>> slots.free_slots
    0
    """

    def __init__(self, *, budget: int, total_groups: int | None = None) -> None:
        """`total_groups` is how many groups train in the whole run; more are never open at once."""
        self._budget = budget
        self._untrained = total_groups
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, str] = {}
        self._occupied = 0
        self.started = 0
        self.ended: Counter[EpisodeOutcome] = Counter()

    @property
    def free_slots(self) -> int:
        budget = self._budget if self._untrained is None else min(self._budget, self._untrained)
        return budget - self._occupied

    @property
    def is_scoring(self) -> bool:
        return any(group.phase is GroupPhase.SCORING for group in self._groups.values())

    def phases(self) -> Counter[GroupPhase]:
        return Counter(group.phase for group in self._groups.values())

    def phase(self, group_id: str) -> GroupPhase:
        """Where the group stands; GONE once its slot is free and its episodes ended."""
        group = self._groups.get(group_id)
        return group.phase if group else GroupPhase.GONE

    def open(self, group_id: str, *, size: int, is_frozen: bool = False) -> list[str]:
        """Take a slot for a new group; the ids of its episodes.

        A frozen group is not sampled by the policy, so it is never too old.
        """
        assert self.free_slots > 0, f"group {group_id} opened without a free slot"
        assert group_id not in self._groups, f"group {group_id} opened twice"
        episode_ids = [f"{group_id}.{number}" for number in range(size)]
        self._groups[group_id] = _Group(group_id, set(episode_ids), is_frozen)
        self._group_of.update(dict.fromkeys(episode_ids, group_id))
        self._occupied += 1
        return episode_ids

    def start(self, episode_id: str, *, version: int) -> None:
        """A planned episode starts to run while `version` is served."""
        group = self._groups[self._group_of[episode_id]]
        assert not group.is_abandoned, f"episode {episode_id} started in an abandoned group"
        group.planned.remove(episode_id)
        group.running[episode_id] = version
        group.versions[episode_id] = version
        self.started += 1

    def restart(self, episode_id: str, *, version: int) -> None:
        """A running episode starts again; its age no longer counts what it played before."""
        group = self._groups[self._group_of[episode_id]]
        group.running[episode_id] = version
        group.versions[episode_id] = version

    def end(self, episode_id: str, outcome: EpisodeOutcome) -> bool:
        """A running episode ended; True when that completed its group for scoring."""
        group = self._groups[self._group_of.pop(episode_id)]
        group.running.pop(episode_id)
        self.ended[outcome] += 1
        group.ended[outcome] += 1
        if group.running or group.planned:
            return False
        if group.is_abandoned:
            self._forget(group)
            return False
        group.phase = GroupPhase.SCORING
        return True

    def complete(self, group_id: str) -> None:
        """A group whose episodes ended is scored."""
        group = self._groups[group_id]
        assert group.phase is GroupPhase.SCORING, (
            f"group {group_id} is {group.phase}, not being scored"
        )
        group.phase = GroupPhase.COMPLETE

    def abandon(self, group_id: str) -> list[str]:
        """Give up an open group and free its slot; the ids of the episodes to cancel."""
        group = self._groups[group_id]
        assert group.phase is GroupPhase.OPEN, (
            f"group {group_id} is {group.phase}, only open ones abandon"
        )
        group.is_abandoned = True
        for episode_id in group.planned:
            del self._group_of[episode_id]
        group.planned.clear()
        self._free_slot(group)
        to_cancel = list(group.running)
        if not to_cancel:
            self._forget(group)
        return to_cancel

    def drop(self, group_id: str) -> None:
        """A complete group has no sample to train: free its slot."""
        group = self._groups[group_id]
        assert group.phase is GroupPhase.COMPLETE, (
            f"group {group_id} is {group.phase}, not complete"
        )
        self._free_slot(group)
        self._forget(group)

    def ship(self, group_ids: Iterable[str], *, step: int) -> None:
        """Complete groups became part of the batch of `step`; they keep their slots."""
        for group_id in group_ids:
            group = self._groups[group_id]
            assert group.phase is GroupPhase.COMPLETE, (
                f"group {group_id} is {group.phase}, not complete"
            )
            group.phase = GroupPhase.SHIPPED
            group.step = step

    def release_trained(self, *, version: int) -> int:
        """`version` is served: free the slots of all groups that it was trained on; how many."""
        trained = [g for g in self._groups.values() if g.step is not None and g.step < version]
        for group in trained:
            self._free_slot(group)
            self._forget(group)
        if self._untrained is not None:
            self._untrained -= len(trained)
        return len(trained)

    def must_end_too_old(self, *, step: int, max_staleness: int) -> list[str]:
        """Open groups whose oldest episode is over the bound if batch `step` trains it."""
        return [
            group.id
            for group in self._groups.values()
            if group.phase is GroupPhase.OPEN
            and group.holds_slot
            and not group.is_frozen
            and (oldest := min(group.versions.values(), default=None)) is not None
            and step - oldest > max_staleness
        ]

    @property
    def state(self) -> EndedEpisodes:
        """Without groups that are open or being scored, which a resume plays again from their
        start; what of an abandoned one still runs is lost."""
        ended = Counter(self.ended)
        for group in self._groups.values():
            if group.is_abandoned:
                ended[EpisodeOutcome.CANCELLED] += len(group.running)
            elif group.phase in (GroupPhase.OPEN, GroupPhase.SCORING):
                ended -= group.ended
        return EndedEpisodes({outcome: ended[outcome] for outcome in EpisodeOutcome})

    @state.setter
    def state(self, state: EndedEpisodes) -> None:
        """`restore` brings back the groups that still hold a slot."""
        self.ended = Counter(state.of_outcomes)
        self.started = self.ended.total()

    def abandoned(self) -> list[str]:
        """Groups that were given up and of which something still runs."""
        return [group.id for group in self._groups.values() if group.is_abandoned]

    def restore(self, group_id: str, *, step: int | None = None) -> None:
        """A group that was complete before a restart holds its slot; `step` is its batch's."""
        phase = GroupPhase.COMPLETE if step is None else GroupPhase.SHIPPED
        self._groups[group_id] = _Group(group_id, set(), phase=phase, step=step)
        self._occupied += 1

    def _free_slot(self, group: _Group) -> None:
        assert group.holds_slot, f"slot of group {group.id} freed twice"
        group.holds_slot = False
        self._occupied -= 1

    def _forget(self, group: _Group) -> None:
        group.phase = GroupPhase.GONE
        del self._groups[group.id]
