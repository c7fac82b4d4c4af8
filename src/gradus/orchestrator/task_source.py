"""An endless, weighted, seeded stream of tasks, to which abandoned tasks come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradus.config.curriculum import CurriculumConfig
from gradus.errors import ConfigError, CorruptStateError
from gradus.orchestrator.curriculum import build_curriculum
from gradus.plugins import describe, plain_state


@dataclass(frozen=True)
class SourceShare:
    """How much of the stream one source supplies, how many tasks it has, and in which order."""

    name: str
    ratio: float
    num_tasks: int | None
    """None means endless: task n of the source has index n."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)


@dataclass(frozen=True)
class TaskPointer:
    """Where one task of the stream is found."""

    source: str
    pass_number: int
    """How often the task was drawn anew before."""
    index: int
    attempt: int = 0
    """How often this draw came back to its source before it could be trained."""


class TaskSource:
    """Owns the order of tasks: which source comes next, and which of its tasks.

    After n tasks every source has supplied its share of n, give or take two. A task that came back
    is drawn before new ones of its source, and counts towards the share again: otherwise a source
    whose tasks are always too slow would take the whole stream.

        >>> tasks = TaskSource([SourceShare("words", ratio=1.0, num_tasks=2)], seed=0)
        >>> first = tasks.next_task()
        >>> tasks.give_back(first)
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
        self._curricula = {
            share.name: build_curriculum(
                share.curriculum, source=share.name, num_tasks=share.num_tasks, seed=seed
            )
            for share in shares
        }

    def next_task(self) -> TaskPointer:
        """The next task of the stream."""
        name = self._most_behind()
        self._counts[name] += 1
        if self._returned[name]:
            return self._returned[name].popleft()
        draw = self._curricula[name].next_task()
        return TaskPointer(name, draw.pass_number, draw.index)

    def give_back(self, task: TaskPointer) -> None:
        """Draw a task again that was drawn before and could not be trained."""
        self._returned[task.source].append(replace(task, attempt=task.attempt + 1))

    def record(self, task: TaskPointer, rewards: Sequence[float]) -> None:
        """Tell the source's curriculum the rewards of a group that was played to its end."""
        if rewards:
            self._curricula[task.source].record(task.index, rewards)

    def state(self) -> dict[str, Any]:
        """Draws so far, the tasks that came back, and each curriculum: all that a resume needs."""
        return {
            "counts": dict(self._counts),
            "ratios": {name: share.ratio for name, share in self._shares.items()},
            "num_tasks": {name: share.num_tasks for name, share in self._shares.items()},
            "returned": {
                name: [[task.pass_number, task.index, task.attempt] for task in tasks]
                for name, tasks in self._returned.items()
            },
            "curricula": {
                name: plain_state(f"{describe('curriculum', c)} of source {name!r}", c.state())
                for name, c in self._curricula.items()
            },
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on after `state`; refuses the state of other sources, or of other data."""
        if set(state["counts"]) != set(self._counts):
            raise CorruptStateError(
                f"task order is of sources {sorted(state['counts'])}, this run has "
                f"{sorted(self._counts)}; resume with the same sources"
            )
        for name, share in self._shares.items():
            if state["num_tasks"][name] != share.num_tasks:
                raise CorruptStateError(
                    f"source {name!r} had {state['num_tasks'][name]} tasks when the checkpoint was "
                    f"made and has {share.num_tasks} now, so its order means other tasks; put its "
                    "data back, or start a new run"
                )
        # With other ratios counted anew: the whole stream would go to the source that seems behind.
        if state["ratios"] == {name: share.ratio for name, share in self._shares.items()}:
            self._counts = {name: int(count) for name, count in state["counts"].items()}
        for name, curriculum in self._curricula.items():
            self._returned[name] = deque(
                TaskPointer(name, *map(int, task)) for task in state["returned"][name]
            )
            curriculum.load_state(state["curricula"][name])

    def _most_behind(self) -> str:
        """The source that misses most of its share; the first of the list when several do."""
        total = sum(self._counts.values()) + 1
        return max(
            self._shares.values(),
            key=lambda share: share.ratio / self._total_ratio * total - self._counts[share.name],
        ).name
