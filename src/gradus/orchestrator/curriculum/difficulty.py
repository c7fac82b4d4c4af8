"""Tasks in three pools by how often the policy solves them; most draws come from the middle.

A task of which every episode succeeds, or none, gives a group baseline nothing to compare. Such
tasks are not lost: they come back at a small share, because the policy changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from gradus.errors import ConfigError
from gradus.orchestrator.curriculum.base import Ending, TaskDraw, TaskResult
from gradus.orchestrator.curriculum.uniform import shuffled
from gradus.orchestrator.rounding import is_at_least

EASY = "easy"
NORMAL = "normal"
HARD = "hard"


class Difficulty:
    """Owns the pools and the solve rate of every task that was played.

    The solve rate of a task is the mean reward of its last group, averaged with its solve rate
    before (each counts half), scaled from `reward_range` to 0 … 1. `easy`: at least
    `easy_above`; `hard`: at most `hard_below`; `normal`: the rest, and every task that was never
    played. The share of an empty pool goes to the others. Each pool is a queue: a drawn task goes
    to its end, so no task of a pool waits for another one twice.

    >>> tasks = Difficulty(3, seed="0/words", hard_share=0.0)
    >>> tasks.record(tasks.next_task().index, TaskResult(rewards=(0.0, 0.0)))
    >>> tasks.pool_sizes()
    {'easy': 0, 'normal': 2, 'hard': 1}
    """

    def __init__(
        self,
        num_tasks: int | None,
        *,
        seed: str,
        easy_above: float = 0.9,
        hard_below: float = 0.1,
        easy_share: float = 0.05,
        hard_share: float = 0.1,
        reward_range: Sequence[float] = (0.0, 1.0),
    ) -> None:
        """`reward_range` holds the rewards of a solve rate of 0 and of 1.

        ConfigError for an endless source, and for thresholds, shares or a range that contradict.
        """
        if num_tasks is None:
            raise ConfigError(
                "curriculum 'difficulty' needs a task set with an end: an endless source never "
                "shows a task again; use 'uniform'"
            )
        _check(easy_above, hard_below, easy_share, hard_share)
        if len(reward_range) != 2 or not reward_range[0] < reward_range[1]:
            raise ConfigError(
                f"curriculum 'difficulty': reward_range = {list(reward_range)} must be two "
                "numbers, the smaller one first"
            )
        self._reward_min, self._reward_max = reward_range
        self._easy_above = easy_above
        self._hard_below = hard_below
        self._shares = {EASY: easy_share, NORMAL: 1 - easy_share - hard_share, HARD: hard_share}
        self._pools: dict[str, OrderedDict[int, None]] = {n: OrderedDict() for n in self._shares}
        self._pools[NORMAL] = OrderedDict.fromkeys(shuffled(num_tasks, seed=f"{seed}/0"))
        self._credit = dict.fromkeys(self._shares, 0.0)
        self._visits: dict[int, int] = {}
        self._solve_rates: dict[int, float] = {}

    def pool_sizes(self) -> dict[str, int]:
        """How many tasks each pool holds."""
        return {name: len(pool) for name, pool in self._pools.items()}

    def next_task(self) -> TaskDraw:
        """The first task of the pool that misses most of its share."""
        pool = self._pools[self._next_pool()]
        index = next(iter(pool))
        pool.move_to_end(index)
        visits = self._visits.get(index, 0)
        self._visits[index] = visits + 1
        return TaskDraw(index, pass_number=visits)

    def record(self, index: int, result: TaskResult) -> None:
        """Take a task that was played to the end of the pool that its new solve rate belongs to.

        One that was put aside leaves its pool, or it would take the share of the others there.
        ValueError, which fails the group, for a reward out of range: it is no solve rate.
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
        """Take over every pool as it was."""
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
        if is_at_least(rate, self._easy_above):
            return EASY
        return HARD if is_at_least(self._hard_below, rate) else NORMAL


def _check(easy_above: float, hard_below: float, easy_share: float, hard_share: float) -> None:
    if not hard_below < easy_above:
        raise ConfigError(
            f"curriculum 'difficulty': hard_below = {hard_below:g} must be less than "
            f"easy_above = {easy_above:g}"
        )
    if easy_share < 0 or hard_share < 0 or easy_share + hard_share > 1:
        raise ConfigError(
            f"curriculum 'difficulty': easy_share = {easy_share:g} and hard_share = "
            f"{hard_share:g} must not be negative, nor more than 1 together"
        )
