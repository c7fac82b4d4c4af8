"""Every task once per pass, each pass in a seeded order of its own."""

from __future__ import annotations

import random
from typing import Any

from gradus.orchestrator.curriculum.base import TaskDraw, TaskResult


class Uniform:
    """Owns the count of draws; everything else follows from the seed.

    >>> tasks = Uniform(2, seed="0/words")
    >>> sorted(tasks.next_task().index for _ in range(2))
    [0, 1]
    """

    def __init__(self, num_tasks: int | None, *, seed: str) -> None:
        self._num_tasks = num_tasks
        self._seed = seed
        self._count = 0
        self._order: tuple[int, list[int]] | None = None

    def next_task(self) -> TaskDraw:
        """The next task of this pass; task n of an endless source has index n."""
        count = self._count
        self._count = count + 1
        if self._num_tasks is None:
            return TaskDraw(index=count, pass_number=0)
        pass_number, position = divmod(count, self._num_tasks)
        return TaskDraw(self._order_of(pass_number)[position], pass_number)

    def record(self, index: int, result: TaskResult) -> None:
        """Results change nothing here."""

    def state(self) -> dict[str, Any]:
        """The count is all."""
        return {"count": self._count}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on after so many draws."""
        self._count = int(state["count"])

    def _order_of(self, pass_number: int) -> list[int]:
        if self._order is None or self._order[0] != pass_number:
            self._order = (
                pass_number,
                shuffled(self._num_tasks or 0, seed=f"{self._seed}/{pass_number}"),
            )
        return self._order[1]


def shuffled(number: int, *, seed: str) -> list[int]:
    """0 … number-1 in the order that belongs to `seed`."""
    order = list(range(number))
    # Seeding by text goes through SHA-512: the same on every machine and in every process.
    random.Random(seed).shuffle(order)
    return order
