"""Which episode starts next: oldest group first, at most so many at once (pure)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PlannedEpisode:
    """An episode that waits for its start."""

    id: str
    group_id: str


class Scheduler:
    """Owns the queue of planned episodes and the count of those in flight.

    >>> scheduler = Scheduler(max_in_flight=1)
    >>> scheduler.plan("g0", ["g0.0", "g0.1"])
    >>> scheduler.next_episode().id, scheduler.next_episode()
    ('g0.0', None)
    """

    def __init__(self, *, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._planned: deque[PlannedEpisode] = deque()
        self.in_flight = 0

    @property
    def wants_group(self) -> bool:
        """Whether a new group's first episode could start at once.

        A group opens as late as possible, so that it starts on the newest version.
        """
        return not self._planned and self.in_flight < self._max_in_flight

    def plan(self, group_id: str, episode_ids: Sequence[str]) -> None:
        """Queue the episodes of a new group behind those of older groups."""
        self._planned.extend(PlannedEpisode(episode_id, group_id) for episode_id in episode_ids)

    def next_episode(self) -> PlannedEpisode | None:
        """The episode that starts now, counted as in flight; None when none may."""
        if not self._planned or self.in_flight >= self._max_in_flight:
            return None
        self.in_flight += 1
        return self._planned.popleft()

    def ended(self) -> None:
        """An episode in flight ended, in whatever way."""
        assert self.in_flight > 0, "an episode ended that was not in flight"
        self.in_flight -= 1

    def forget(self, group_id: str) -> None:
        """Take the planned episodes of an abandoned group out of the queue."""
        self._planned = deque(e for e in self._planned if e.group_id != group_id)
