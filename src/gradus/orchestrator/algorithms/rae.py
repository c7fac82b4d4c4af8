"""`rae`: role-conditioned advantage estimation, each role against its own past.

SPIRAL, arXiv 2506.24119, algorithm 1, lines 20-21. In self-play the rewards of an episode's roles
depend on each other, so peers of one episode or group give no baseline; a running mean per role
does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from verifiers.v1.episode import WireEpisode
from verifiers.v1.trace import WireTrace

from gradus.config import algorithms
from gradus.errors import CorruptStateError, EnvironmentFailure
from gradus.orchestrator.algorithms.base import (
    LARGEST_REWARD,
    Algorithm,
    CreditContext,
    assign_advantage,
)

Baseline = tuple[str | int, ...]


class RoleAdvantageEstimation(Algorithm):
    """One running baseline b per key, cold at 0; b ← m·b + (1 - m)·R and A = R - b.

    Rewards enter the baselines in the order of their groups, not in that of their ends.

    >>> algorithm = RoleAdvantageEstimation(algorithms.RaeConfig(momentum=0.9))
    """

    def __init__(self, config: algorithms.RaeConfig) -> None:
        self._config = config
        self._baselines: dict[Baseline, float] = {}

    def score_group(self, episodes: Sequence[WireEpisode], context: CreditContext) -> None:
        """Trace by trace, in the order of their starts: move the baseline of its agent, and write
        the advantage.

        Traces that failed and were rewarded all the same, usually with 0, move the baseline too,
        unless that reward is not finite. EnvironmentFailure when a finished trace has no reward.
        """
        finished = {id(episode) for episode in episodes}
        for episode in context.played or [*episodes, *context.failed]:
            for trace in _trained(episode):
                if id(episode) in finished:
                    self._credit(trace, context)
                elif is_rewarded(trace):
                    self._compare(trace, context)

    def state(self) -> dict[str, Any]:
        return {"key": self._config.key, "baselines": [[*k, b] for k, b in self._baselines.items()]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over the baselines; refuses those of another `key`."""
        key, rows = state.get("key"), state.get("baselines")
        if key != self._config.key or not isinstance(rows, list):
            raise CorruptStateError(
                f"rae: the stored baselines are per {key!r}, this run keeps them per "
                f"{self._config.key!r}; resume with the same `key`"
            )
        baselines: dict[Baseline, float] = {tuple(row[:-1]): float(row[-1]) for row in rows}
        if wrong := [key for key, value in baselines.items() if not math.isfinite(value)]:
            raise CorruptStateError(f"rae: the stored baseline of {wrong[0]} is not finite")
        self._baselines = baselines

    def _credit(self, trace: WireTrace, context: CreditContext) -> None:
        if not is_rewarded(trace):
            raise EnvironmentFailure(
                f"environment {context.environment!r}, task {context.task_key!r}: agent "
                f"{trace.agent.name!r} has no reward; `rae` needs one for every trace"
            )
        assign_advantage(trace, self._compare(trace, context))

    def _compare(self, trace: WireTrace, context: CreditContext) -> float:
        """The trace's advantage; its reward enters the baseline."""
        agent = trace.agent.name
        key: Baseline = (context.environment, context.task_key, agent)
        if self._config.key == "environment/agent":
            key = (context.environment, agent)
        reward: float = trace.reward
        before = self._baselines.get(key, 0.0)
        momentum = self._config.momentum
        after = momentum * before + (1 - momentum) * reward
        self._baselines[key] = after
        context.record(f"rae_baseline/{agent}", after)
        return reward - (after if self._config.order == "update_first" else before)


def is_rewarded(trace: WireTrace) -> bool:
    """Tell whether scoring ran and gave every named reward, and a number that credit can hold."""
    is_scored = bool(trace.rewards) and all(r is not None for r in trace.rewards.values())
    return is_scored and abs(trace.reward) <= LARGEST_REWARD


def _trained(episode: WireEpisode) -> list[WireTrace]:
    return [trace for trace in episode.traces if trace.agent.trainable]
