"""`grpo` and `max_rl`: the advantage of a trace is its reward against those of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from verifiers.v1.episode import WireEpisode
from verifiers.v1.trace import WireTrace

from gradus.orchestrator.algorithms.base import (
    CreditContext,
    assign_advantage,
    num_sampled_tokens,
    trainable_traces,
)
from gradus.orchestrator.algorithms.credit import (
    Floats,
    centre,
    centre_leave_one_out,
    divide_by_mean,
    divide_by_std,
    penalise_length,
)


class GroupRelative:
    """`grpo`: A_i = r_i - mean(r) over the trainable traces of a group; alone in a group, 0.

    >>> algorithm = GroupRelative(leave_one_out=True)
    """

    def __init__(
        self,
        *,
        scale_by_std: bool = False,
        leave_one_out: bool = False,
        length_penalty: bool = False,
    ) -> None:
        """`scale_by_std` divides by the group's standard deviation; `leave_one_out` compares with
        the others only; `length_penalty` makes long traces of a good group pay."""
        self._scale_by_std = scale_by_std
        self._leave_one_out = leave_one_out
        self._length_penalty = length_penalty

    async def score_episode(self, episode: WireEpisode, context: CreditContext) -> None:
        """One episode alone has no baseline."""

    def score_group(self, episodes: Sequence[WireEpisode], context: CreditContext) -> None:  # noqa: ARG002
        """Write the same advantage on all sampled tokens of a trace."""
        traces = trainable_traces(episodes)
        assign_advantages(traces, self._advantages(traces))

    def state(self) -> dict[str, Any]:
        """Nothing outlives a group."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    def _advantages(self, traces: Sequence[WireTrace]) -> Floats:
        rewards = rewards_of(traces)
        if self._length_penalty:
            rewards = penalise_length(
                rewards,
                output_tokens=[num_sampled_tokens(trace) for trace in traces],
                input_tokens=[trace.num_input_tokens for trace in traces],
                turns=[trace.num_turns for trace in traces],
            )
        advantages = centre_leave_one_out(rewards) if self._leave_one_out else centre(rewards)
        return divide_by_std(advantages, rewards) if self._scale_by_std else advantages


class MaxRl:
    """`max_rl`: A_i = (r_i - mean(r)) / mean(r); 0 when mean(r) <= 0 (arXiv 2602.02710).

    The rarer success is in a group, the more a success counts.

    >>> algorithm = MaxRl()
    """

    async def score_episode(self, episode: WireEpisode, context: CreditContext) -> None:
        """One episode alone has no baseline."""

    def score_group(self, episodes: Sequence[WireEpisode], context: CreditContext) -> None:  # noqa: ARG002
        """Write the same advantage on all sampled tokens of a trace."""
        traces = trainable_traces(episodes)
        rewards = rewards_of(traces)
        assign_advantages(traces, divide_by_mean(centre(rewards), rewards))

    def state(self) -> dict[str, Any]:
        """Nothing outlives a group."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


def rewards_of(traces: Sequence[WireTrace]) -> Floats:
    """Reward of each trace, [N]."""
    return np.array([trace.reward for trace in traces], dtype=np.float64)


def assign_advantages(traces: Sequence[WireTrace], advantages: Floats) -> None:
    """Each trace gets its advantage on all its sampled tokens."""
    for trace, advantage in zip(traces, advantages.tolist(), strict=True):
        assign_advantage(trace, advantage)
