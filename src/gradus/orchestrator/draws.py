"""Which task the next group plays, and under which number; interrupted groups come first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from gradus.orchestrator.task_source import TaskPointer, TaskSource


@dataclass(frozen=True)
class Draw:
    """A task on its way to its group."""

    number: int
    """Of the group, counted over the whole run."""
    task: TaskPointer


class Draws:
    """Owns the numbers of groups, and the draws whose group is not open yet.

    >>> draws = Draws(TaskSource([SourceShare("words", 1.0, num_tasks=None)], seed=0))
    >>> draw = draws.next()
    >>> draw.number, len(draws.waiting)
    (0, 1)
    >>> draws.opened(draw)
    >>> len(draws.waiting)
    0
    """

    def __init__(self, tasks: TaskSource) -> None:
        self.num_drawn = 0
        """Groups that got a number."""
        self._tasks = tasks
        self._interrupted: deque[Draw] = deque()
        self._fetching: dict[int, Draw] = {}

    @property
    def waiting(self) -> list[Draw]:
        """Draws that no open group stands for, oldest first."""
        return sorted([*self._fetching.values(), *self._interrupted], key=lambda d: d.number)

    def next(self) -> Draw:
        """The next task to play; it counts as waiting until `opened`."""
        if self._interrupted:
            draw = self._interrupted.popleft()
        else:
            draw = Draw(self.num_drawn, self._tasks.next_task())
            self.num_drawn += 1
        self._fetching[draw.number] = draw
        return draw

    def opened(self, draw: Draw) -> None:
        """The group of `draw` is open."""
        del self._fetching[draw.number]

    def redraw(self, draw: Draw) -> None:
        """The task of `draw` cannot be played: another one gets its number."""
        del self._fetching[draw.number]
        self._interrupted.appendleft(Draw(draw.number, self._tasks.next_task()))

    def restore(self, interrupted: Iterable[Draw], *, num_drawn: int) -> None:
        """Go on after `num_drawn` draws; those of groups that a restart cut off are drawn first."""
        self._interrupted = deque(sorted(interrupted, key=lambda d: d.number))
        self.num_drawn = num_drawn
