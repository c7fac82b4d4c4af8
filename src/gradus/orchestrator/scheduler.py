"""Which episode starts next: oldest group first, so many at once and per minute (pure)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gradus.orchestrator.concurrency import AdmissionRate


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

    def __init__(self, *, max_in_flight: int, rate: AdmissionRate | None = None) -> None:
        self.max_in_flight = max_in_flight
        """May change at any time; what runs already goes on."""
        self._rate = rate or AdmissionRate(per_minute=None)
        self._planned: deque[PlannedEpisode] = deque()
        self.in_flight = 0

    @property
    def wants_group(self) -> bool:
        """Whether a new group's first episode could start at once.

        A group opens as late as possible, so that it starts on the newest version.
        """
        return not self._planned and self.in_flight < self.max_in_flight

    def plan(self, group_id: str, episode_ids: Sequence[str]) -> None:
        """Queue the episodes of a new group behind those of older groups."""
        self._planned.extend(PlannedEpisode(episode_id, group_id) for episode_id in episode_ids)

    def wait_seconds(self, *, now: float) -> float:
        """How long the rate holds the next episode back."""
        return self._rate.wait_seconds(now=now)

    def next_episode(self, *, now: float = 0.0) -> PlannedEpisode | None:
        """The episode that starts now, counted as in flight; None when none may."""
        if not self._planned or self.in_flight >= self.max_in_flight:
            return None
        if self._rate.wait_seconds(now=now) > 0:
            return None
        self._rate.take(now=now)
        self.in_flight += 1
        return self._planned.popleft()

    def ended(self) -> None:
        """An episode in flight ended, in whatever way."""
        assert self.in_flight > 0, "an episode ended that was not in flight"
        self.in_flight -= 1

    def forget(self, group_id: str) -> None:
        """Take the planned episodes of an abandoned group out of the queue."""
        self._planned = deque(e for e in self._planned if e.group_id != group_id)
