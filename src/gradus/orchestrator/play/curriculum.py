"""Which task of a source is played next: each once per pass, or by how often it is solved."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from gradus.config import CurriculumConfig, DifficultyConfig
from gradus.errors import ConfigError
from gradus.orchestrator.algorithms.credit import is_at_least
from gradus.orchestrator.types import Group
from gradus.plugins import building, find_plugin, refuse_async

LARGEST_GROUP = 8192
"""Episodes of one task. They are scored at once, and their group holds one slot until they end."""


@dataclass(frozen=True)
class TaskDraw:
    """One task of a source."""

    index: int
    pass_number: int
    """How often this task was drawn before."""
    group_size: int | None = None
    """Episodes to play of it, at most LARGEST_GROUP. None means the `group_size` of the source."""


class Ending(StrEnum):
    """How a drawn task ended."""

    PLAYED = "played"
    """Every episode of its group ended; none was given up."""
    TOO_OLD = "too_old"
    """Its group was abandoned, or its samples became too old in the queue. The task comes back to
    the source, at most `MAX_RETURNS` times."""
    SET_ASIDE = "set_aside"
    """It cannot be loaded, or ends its environment; the source skips it from now on."""


@dataclass(frozen=True)
class TaskResult:
    """What became of a drawn task.

    >>> TaskResult(rewards=(0.0, 1.0), failures=("TimeoutError",)).ending
    <Ending.PLAYED: 'played'>
    """

    ending: Ending = Ending.PLAYED
    rewards: tuple[float, ...] = ()
    """Of each finished episode, the mean over its trainable traces."""
    lengths_tokens: tuple[int, ...] = ()
    """Sampled tokens of each finished episode."""
    num_truncated: int = 0
    """Finished episodes with a trace that a limit cut short."""
    failures: tuple[str, ...] = ()
    """Of each failed episode, the type of its error."""

    @classmethod
    def of(cls, group: Group, ending: Ending) -> TaskResult:
        """What became of the episodes of `group`."""
        # None trains in a group that was refused for an algorithm that took its traces out.
        finished = [p.numbers for p in group.played if p.numbers is not None and p.numbers.rewards]
        return cls(
            ending,
            rewards=tuple(sum(numbers.rewards) / len(numbers.rewards) for numbers in finished),
            lengths_tokens=tuple(numbers.length_tokens for numbers in finished),
            num_truncated=sum(numbers.is_truncated for numbers in finished),
            failures=tuple(p.failure.kind for p in group.played if p.failure is not None),
        )


class Curriculum(Protocol):
    """The order of one source's tasks, and how many episodes are played of each.

    Built as `Class(num_tasks, seed=..., **options)`: `num_tasks` is None for an endless source,
    `seed` a text that is the same in every run with the same seed and source name. The order must
    depend on nothing but these, and on the calls made so far.
    """

    def next_task(self) -> TaskDraw:
        """The task to play next; there is always one."""

    def record(self, index: int, result: TaskResult) -> None:
        """Learn what became of a draw of task `index`.

        A group that was played and then waited too long is reported twice: as played, then as too
        old.
        """

    def state(self) -> dict[str, Any]:
        """Everything a restart would lose, as JSON values.

        Copied at once. Numbers and arrays of numpy are converted; what JSON cannot give back (keys
        that are not text, sets, numbers that are not finite) ends the run with an error.
        """

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()` of a curriculum that was built with the same arguments."""


class Uniform:
    """`uniform`: every task once per pass, each pass in its own seeded order.

    Owns the count of draws; everything else follows from the seed.

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
        """Results do not change the order."""

    def state(self) -> dict[str, Any]:
        return {"count": self._count}

    def load_state(self, state: dict[str, Any]) -> None:
        self._count = int(state["count"])

    def _order_of(self, pass_number: int) -> list[int]:
        if self._order is None or self._order[0] != pass_number:
            self._order = (
                pass_number,
                shuffled(self._num_tasks or 0, seed=f"{self._seed}/{pass_number}"),
            )
        return self._order[1]


def shuffled(number: int, *, seed: str) -> list[int]:
    """The numbers below `number`, in the order that `seed` gives."""
    order = list(range(number))
    # Seeding by text goes through SHA-512: the same on every machine and in every process.
    random.Random(seed).shuffle(order)
    return order


EASY = "easy"
NORMAL = "normal"
HARD = "hard"


class Difficulty:
    """`difficulty`: most draws are of tasks that the policy solves now and then.

    Owns three pools of tasks, and the solve rate of every task that was played.

    The solve rate of a task is the mean reward of its last group, averaged with its solve rate
    before (each counts half), scaled from `reward_range` to 0 … 1. `easy`: at least
    `easy_above`; `hard`: at most `hard_below`; `normal`: the rest, and every task that was never
    played. The share of an empty pool goes to the others. Each pool is a queue: a drawn task goes
    to its end, so no task of a pool waits for another one twice. With `drop_easy` or `drop_hard` a
    task that gets there is in no pool any more: it is never drawn again, also after a resume.

    >>> tasks = Difficulty(3, seed="0/words", config=DifficultyConfig(hard_share=0.0))
    >>> tasks.record(tasks.next_task().index, TaskResult(rewards=(0.0, 0.0)))
    >>> tasks.pool_sizes()
    {'easy': 0, 'normal': 2, 'hard': 1}
    """

    def __init__(self, num_tasks: int | None, *, seed: str, config: DifficultyConfig) -> None:
        """ConfigError for an endless source."""
        if num_tasks is None:
            raise ConfigError(
                "curriculum 'difficulty' needs a task set with an end: an endless source never "
                "shows a task again; use 'uniform'"
            )
        self._config = config
        self._dropped = {EASY} if config.drop_easy else set()
        self._dropped |= {HARD} if config.drop_hard else set()
        self._reward_min, self._reward_max = config.reward_range
        easy, hard = config.easy_share, config.hard_share
        self._shares = {EASY: easy, NORMAL: 1 - easy - hard, HARD: hard}
        self._pools: dict[str, OrderedDict[int, None]] = {n: OrderedDict() for n in self._shares}
        self._pools[NORMAL] = OrderedDict.fromkeys(shuffled(num_tasks, seed=f"{seed}/0"))
        self._credit = dict.fromkeys(self._shares, 0.0)
        self._visits: dict[int, int] = {}
        self._solve_rates: dict[int, float] = {}

    def pool_sizes(self) -> dict[str, int]:
        return {name: len(pool) for name, pool in self._pools.items()}

    def next_task(self) -> TaskDraw:
        """The first task of the pool that is furthest behind its share."""
        pool = self._pools[self._next_pool()]
        index = next(iter(pool))
        pool.move_to_end(index)
        visits = self._visits.get(index, 0)
        self._visits[index] = visits + 1
        return TaskDraw(index, pass_number=visits)

    def record(self, index: int, result: TaskResult) -> None:
        """Move a task that was played to the end of the pool of its new solve rate.

        One that was set aside leaves its pool, or it would take the share of the others there.
        ValueError, which fails the group, for a reward out of range: it is not a solve rate.
        """
        if result.ending is Ending.SET_ASIDE:
            self._leave_out(index)
        if result.ending is not Ending.PLAYED or not result.rewards:
            return
        for reward in result.rewards:
            self._refuse_beyond(index, reward)
        mean = sum(result.rewards) / len(result.rewards)
        latest = (mean - self._reward_min) / (self._reward_max - self._reward_min)
        rate = (self._solve_rates.get(index, latest) + latest) / 2
        self._solve_rates[index] = rate
        name = self._pool_of(rate)
        if not any(index in pool for pool in self._pools.values()) or index in self._pools[name]:
            return
        for pool in self._pools.values():
            pool.pop(index, None)
        # The last task of all stays: there is always one to draw.
        if name not in self._dropped or not any(self._pools.values()):
            self._pools[name][index] = None

    def state(self) -> dict[str, Any]:
        """Pools in their order, their credit, and what is known of each task."""
        return {
            "pools": {name: list(pool) for name, pool in self._pools.items()},
            "credit": dict(self._credit),
            "visits": sorted(self._visits.items()),
            "solve_rates": sorted(self._solve_rates.items()),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._pools = {name: OrderedDict.fromkeys(state["pools"][name]) for name in self._shares}
        self._credit = {name: float(state["credit"][name]) for name in self._shares}
        self._visits = {int(index): int(visits) for index, visits in state["visits"]}
        self._solve_rates = {int(index): float(rate) for index, rate in state["solve_rates"]}

    def _next_pool(self) -> str:
        """Each draw gives every pool its share of credit and costs the chosen pool one.

        An empty pool gathers no credit, so its first task is not played again and again to make up
        for the time without it.
        """
        filled = [name for name, pool in self._pools.items() if pool]
        # With a share of 0 a pool is drawn only when no other pool holds a task.
        wanted = [name for name in filled if self._shares[name] > 0] or filled
        total = sum(self._shares[name] for name in wanted) or 1.0
        for name in self._credit:
            gain = self._shares[name] / total
            self._credit[name] = self._credit[name] + gain if name in wanted else 0.0
        chosen = max(wanted, key=lambda name: self._credit[name])
        self._credit[chosen] -= 1.0
        return chosen

    def _leave_out(self, index: int) -> None:
        """The last task of all stays: there is always one to draw."""
        if sum(self.pool_sizes().values()) > 1:
            for pool in self._pools.values():
                pool.pop(index, None)

    def _refuse_beyond(self, index: int, reward: float) -> None:
        if is_at_least(reward, self._reward_min) and is_at_least(self._reward_max, reward):
            return
        raise ValueError(
            f"task {index} got the reward {reward:g}, and solve rates are rewards between "
            f"{self._reward_min:g} and {self._reward_max:g}; set the option reward_range to the "
            "range of the source"
        )

    def _pool_of(self, rate: float) -> str:
        if is_at_least(rate, self._config.easy_above):
            return EASY
        return HARD if is_at_least(self._config.hard_below, rate) else NORMAL


def build_curriculum(
    config: CurriculumConfig, *, source: str, num_tasks: int | None, seed: int
) -> Curriculum:
    """The curriculum of one source; refuses options that its class does not take."""
    kind = find_plugin("curriculum", config.target)
    name = f"source {source!r}: curriculum {config.type!r}"
    refuse_async(name, kind, "next_task", "record", "state", "load_state")
    try:
        with building(f"curriculum {config.type!r}", config.arguments()):
            options = config.arguments_for(kind)
            curriculum: Curriculum = kind(num_tasks, seed=f"{seed}/{source}", **options)
    except ConfigError as error:
        raise ConfigError(f"source {source!r}: {error}") from error
    return curriculum
