"""Which task is played next: an endless, weighted, seeded stream, and a queue in front of it.

Tasks whose groups were abandoned come back to the stream. Groups that a restart cut off come
first, each under the number that it had.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from gradus.config import CurriculumConfig, UniformConfig
from gradus.errors import ConfigError, CorruptStateError, EnvironmentFailure
from gradus.gate import plugin_name
from gradus.orchestrator.failures import CURRICULUM_FAILED, blaming
from gradus.orchestrator.play.curriculum import (
    LARGEST_GROUP,
    TaskDraw,
    TaskResult,
    build_curriculum,
)
from gradus.orchestrator.types import EpisodeFailed, TaskPointer

MAX_RETURNS = 2
"""How often the task of a draw comes back to its source before it is given up."""
_SKIPS_PER_TASK = 10
"""How many draws in a row may hit tasks that were set aside, for each such task."""


@dataclass(frozen=True)
class SourceShare:
    """How much of the stream one source supplies, how many tasks it has, and in which order."""

    name: str
    ratio: float
    num_tasks: int | None
    """None means endless: task n of the source has index n."""
    curriculum: CurriculumConfig = field(default_factory=UniformConfig)


class TaskOrder(msgspec.Struct, frozen=True):
    """Where the stream of tasks stands; each dict is by source."""

    counts: dict[str, int]
    """Draws so far."""
    ratios: dict[str, float]
    num_tasks: dict[str, int | None]
    returned: dict[str, list[TaskPointer]]
    """Tasks that came back."""
    aside: dict[str, set[int]]
    """Tasks that are not drawn again."""


class TaskSource:
    """Owns the order of tasks: which source comes next, and which of its tasks.

    After n tasks every source has supplied its share of n, give or take two. A task that came back
    is drawn before new ones of its source, and counts towards the share again: otherwise a source
    whose tasks are always too slow would take the whole stream. It comes back `MAX_RETURNS` times;
    then its draw is given up, or tasks that are always too slow would take their whole source.

    A task that cannot be played is set aside: it is not drawn again in this run.

        >>> tasks = TaskSource([SourceShare("words", ratio=1.0, num_tasks=2)], seed=0)
        >>> first = tasks.next_task()
        >>> tasks.give_back(first)
        True
        >>> again = tasks.next_task()
        >>> again.index == first.index, again.attempt
        (True, 1)
    """

    def __init__(self, shares: Sequence[SourceShare], *, seed: int) -> None:
        for share in shares:
            if share.num_tasks == 0:
                raise ConfigError(
                    f"source {share.name!r} has no tasks; check its taskset settings and data"
                )
        self._shares = {share.name: share for share in shares}
        self._total_ratio = sum(share.ratio for share in shares)
        self._counts = dict.fromkeys(self._shares, 0)
        self._returned: dict[str, deque[TaskPointer]] = {name: deque() for name in self._shares}
        self._aside: dict[str, set[int]] = {name: set() for name in self._shares}
        self.curricula = {
            # By source.
            share.name: build_curriculum(
                share.curriculum, source=share.name, num_tasks=share.num_tasks, seed=seed
            )
            for share in shares
        }

    def next_task(self) -> TaskPointer:
        """The next task of the stream; EnvironmentFailure when its source has none left."""
        name = self._most_behind()
        self._counts[name] += 1
        if self._returned[name]:
            return self._returned[name].popleft()
        aside = self._aside[name]
        for _ in range(1 + _SKIPS_PER_TASK * len(aside)):
            draw = self._draw(name)
            if draw.index not in aside:
                return TaskPointer(name, draw.pass_number, draw.index, group_size=draw.group_size)
        raise self._no_task_error(name)

    def _no_task_error(self, name: str) -> EnvironmentFailure:
        num_aside, num_tasks = len(self._aside[name]), self._shares[name].num_tasks
        if num_tasks is None or num_aside < num_tasks:
            return EnvironmentFailure(
                f"{plugin_name('curriculum', self.curricula[name])}, source {name!r}: next_task "
                f"draws nothing but the {num_aside} tasks that were set aside; each is reported "
                "to its `record` as Ending.SET_ASIDE, and it must draw others then"
            )
        return EnvironmentFailure(
            f"source {name!r} has no task left to play: {num_aside} of {num_tasks} tasks were set "
            "aside, see task_set_aside in journal.jsonl; fix its data, or leave the source out"
        )

    def _draw(self, name: str) -> TaskDraw:
        """The curriculum's next task; ConfigError when it raises, or when there is no such task."""
        curriculum = self.curricula[name]
        try:
            where = f"source {name!r}, next_task"
            with blaming("curriculum", curriculum, where, failure=CURRICULUM_FAILED):
                draw = curriculum.next_task()
                size = None if draw.group_size is None else operator.index(draw.group_size)
                index = operator.index(draw.index)
                draw = TaskDraw(index, operator.index(draw.pass_number), size)
        except EpisodeFailed as failed:
            raise ConfigError(f"{failed.failure.message}; no task can be drawn") from failed
        num_tasks = self._shares[name].num_tasks
        if draw.index < 0 or (num_tasks is not None and draw.index >= num_tasks):
            problem = f"task {draw.index}; the source has {num_tasks or 'endless'}, counted from 0"
        elif draw.group_size is not None and not 1 <= draw.group_size <= LARGEST_GROUP:
            problem = f"group_size = {draw.group_size} for task {draw.index}"
            problem += f"; use 1 to {LARGEST_GROUP}"
        else:
            return draw
        raise ConfigError(f"{plugin_name('curriculum', curriculum)}, {where}: it draws {problem}")

    def give_back(self, task: TaskPointer) -> bool:
        """Draw a task again that could not be trained in time; False when it is given up."""
        if task.attempt >= MAX_RETURNS or task.index in self._aside[task.source]:
            return False
        self._returned[task.source].append(replace(task, attempt=task.attempt + 1))
        return True

    def set_aside(self, task: TaskPointer) -> bool:
        """Never draw this task again; False when it was set aside before."""
        if task.index in self._aside[task.source]:
            return False
        self._aside[task.source].add(task.index)
        returned = self._returned[task.source]
        self._returned[task.source] = deque(t for t in returned if t.index != task.index)
        return True

    def is_aside(self, task: TaskPointer) -> bool:
        return task.index in self._aside[task.source]

    def record(self, task: TaskPointer, result: TaskResult) -> None:
        """Tell the source's curriculum what became of a task; EpisodeFailed when it raises."""
        curriculum = self.curricula[task.source]
        where = f"source {task.source!r}, record of task {task.index}"
        with blaming("curriculum", curriculum, where, failure=CURRICULUM_FAILED):
            curriculum.record(task.index, result)

    @property
    def state(self) -> TaskOrder:
        """All that a resume needs besides the curricula."""
        return TaskOrder(
            counts=self._counts,
            ratios={name: share.ratio for name, share in self._shares.items()},
            num_tasks={name: share.num_tasks for name, share in self._shares.items()},
            returned={name: list(tasks) for name, tasks in self._returned.items()},
            aside=self._aside,
        )

    @state.setter
    def state(self, state: TaskOrder) -> None:
        """CorruptStateError for the state of other sources, or of other data."""
        if set(state.counts) != set(self._counts):
            raise CorruptStateError(
                f"task order is of sources {sorted(state.counts)}, this run has "
                f"{sorted(self._counts)}; resume with the same sources"
            )
        for name, share in self._shares.items():
            if state.num_tasks[name] != share.num_tasks:
                raise CorruptStateError(
                    f"source {name!r} had {state.num_tasks[name]} tasks when the checkpoint was "
                    f"made and has {share.num_tasks} now, so its order means other tasks; put its "
                    "data back, or start a new run"
                )
        # With other ratios the counts begin again, or the source that seems behind would take all.
        if state.ratios == self.state.ratios:
            self._counts = state.counts
        self._returned = {name: deque(tasks) for name, tasks in state.returned.items()}
        self._aside = state.aside

    def _most_behind(self) -> str:
        """The source that is furthest behind its share; the first of the list when several do."""
        total = sum(self._counts.values()) + 1
        return max(
            self._shares.values(),
            key=lambda share: share.ratio / self._total_ratio * total - self._counts[share.name],
        ).name


@dataclass(frozen=True)
class Draw:
    """A task on its way to its group."""

    number: int
    """Of the group, counted over the whole run."""
    task: TaskPointer


class TaskQueue:
    """Owns the numbers of groups, and the draws whose group is not open yet.

    >>> queue = TaskQueue(TaskSource([SourceShare("words", 1.0, num_tasks=None)], seed=0))
    >>> draw = queue.next()
    >>> draw.number, len(queue.waiting)
    (0, 1)
    >>> queue.opened(draw)
    >>> len(queue.waiting)
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
        """Draws without an open group, oldest first."""
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
        del self._fetching[draw.number]

    def redraw(self, draw: Draw) -> None:
        """The task of `draw` cannot be played: another one gets its number."""
        del self._fetching[draw.number]
        self._interrupted.appendleft(Draw(draw.number, self._tasks.next_task()))

    def restore(self, interrupted: Iterable[Draw], *, num_drawn: int) -> None:
        """Continue after `num_drawn` draws; tasks of groups that a restart cut off come first."""
        self._interrupted = deque(sorted(interrupted, key=lambda d: d.number))
        self.num_drawn = num_drawn
