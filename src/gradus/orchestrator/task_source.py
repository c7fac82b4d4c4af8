"""An endless, weighted, seeded stream of tasks; its state is one count per source."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradus.errors import ConfigError, CorruptStateError


@dataclass(frozen=True)
class SourceShare:
    """How much of the stream one source supplies, and how many tasks it has."""

    name: str
    ratio: float
    num_tasks: int | None
    """None means endless: task n of the source has index n."""


@dataclass(frozen=True)
class TaskPointer:
    """Where one task of the stream is found."""

    source: str
    pass_number: int
    """How often the source's whole task set came before."""
    index: int


class TaskSource:
    """Owns the order of tasks: which source comes next, and which of its tasks.

    After n tasks every source has supplied its share of n, give or take two. Each pass over a task
    set has its own order, which depends only on seed, source name and pass number.

        >>> tasks = TaskSource([SourceShare("words", ratio=1.0, num_tasks=2)], seed=0)
        >>> sorted(tasks.next_task().index for _ in range(2))
        [0, 1]
    """

    def __init__(self, shares: Sequence[SourceShare], *, seed: int) -> None:
        for share in shares:
            if share.num_tasks == 0:
                raise ConfigError(
                    f"source {share.name!r} has no tasks; check its taskset settings and data"
                )
        self._shares = {share.name: share for share in shares}
        self._total_ratio = sum(share.ratio for share in shares)
        self._seed = seed
        self._counts = dict.fromkeys(self._shares, 0)
        self._orders: dict[str, tuple[int, list[int]]] = {}

    def next_task(self) -> TaskPointer:
        """The next task of the stream."""
        share = self._most_behind()
        count = self._counts[share.name]
        self._counts[share.name] = count + 1
        if share.num_tasks is None:
            return TaskPointer(share.name, pass_number=0, index=count)
        pass_number, position = divmod(count, share.num_tasks)
        return TaskPointer(share.name, pass_number, self._order(share, pass_number)[position])

    def state(self) -> dict[str, int]:
        """Tasks drawn so far, per source: all that a resume needs."""
        return dict(self._counts)

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go on after the tasks counted in `state`; refuses the state of other sources."""
        if set(state) != set(self._counts):
            raise CorruptStateError(
                f"task order is of sources {sorted(state)}, this run has {sorted(self._counts)}; "
                "resume with the same sources"
            )
        self._counts = dict(state)

    def _most_behind(self) -> SourceShare:
        """The source that misses most of its share; the first of the list when several do."""
        total = sum(self._counts.values()) + 1
        return max(
            self._shares.values(),
            key=lambda share: share.ratio / self._total_ratio * total - self._counts[share.name],
        )

    def _order(self, share: SourceShare, pass_number: int) -> list[int]:
        kept = self._orders.get(share.name)
        if kept is None or kept[0] != pass_number:
            order = list(range(share.num_tasks or 0))
            # Seeding by text goes through SHA-512: the same on every machine and in every process.
            random.Random(f"{self._seed}/{share.name}/{pass_number}").shuffle(order)
            kept = self._orders[share.name] = (pass_number, order)
        return kept[1]
