"""`grpo`: the advantage of a trace is its reward against those of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from verifiers.v1.episode import WireEpisode

from gradus.orchestrator.algorithms.base import assign_advantage, trainable_traces
from gradus.orchestrator.algorithms.credit import (
    centre,
    centre_leave_one_out,
    divide_by_std,
    penalise_length,
)


class GroupRelative:
    """A_i = r_i - mean(r) over the trainable traces of a group; alone in a group, 0.

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

    async def score_episode(self, episode: WireEpisode) -> None:
        """One episode alone has no baseline."""

    def score_group(self, episodes: Sequence[WireEpisode]) -> None:
        """Write the same advantage on all sampled tokens of a trace."""
        traces = trainable_traces(episodes)
        rewards = np.array([trace.reward for trace in traces], dtype=np.float64)
        if self._length_penalty:
            rewards = penalise_length(
                rewards,
                output_tokens=[trace.num_output_tokens for trace in traces],
                input_tokens=[trace.num_input_tokens for trace in traces],
                turns=[trace.num_turns for trace in traces],
            )
        advantages = centre_leave_one_out(rewards) if self._leave_one_out else centre(rewards)
        if self._scale_by_std:
            advantages = divide_by_std(advantages, rewards)
        for trace, advantage in zip(traces, advantages.tolist(), strict=True):
            assign_advantage(trace, advantage)

    def state(self) -> dict[str, Any]:
        """Nothing outlives a group."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""
