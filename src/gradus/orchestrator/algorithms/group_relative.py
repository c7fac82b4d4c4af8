"""`grpo`, `max_rl`, `hierarchical_grpo`: a trace is credited by its reward against others.

Next page: `../groups/samples.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from verifiers.v1.episode import WireEpisode
from verifiers.v1.trace import WireTrace

from gradus.errors import ConfigError
from gradus.orchestrator.algorithms.base import Algorithm, CreditContext, assign_advantage
from gradus.orchestrator.algorithms.credit import (
    LENGTH_WEIGHTS,
    Floats,
    centre,
    centre_leave_one_out,
    divide_by_mean,
    divide_by_std,
    penalise_length,
    penalise_overlong,
)
from gradus.orchestrator.traces import num_sampled_tokens, trainable_traces


class GroupRelative(Algorithm):
    """`grpo`: A_i = r_i - mean(r) over the trainable traces of a group; alone in a group, 0.

    >>> algorithm = GroupRelative(leave_one_out=True)
    """

    compares_all_traces = True

    def __init__(
        self,
        *,
        scale_by_std: bool = False,
        leave_one_out: bool = False,
        length_penalty: bool = False,
        length_weights: Mapping[str, float] = LENGTH_WEIGHTS,
        overlong_limit_tokens: int | None = None,
        overlong_cache_tokens: int | None = None,
    ) -> None:
        """`scale_by_std` divides by the group's standard deviation; `leave_one_out` compares with
        the others only; `length_penalty` lowers the rewards of long traces, `length_weights` says
        how much for `output`, `input` and `turns` (a name that is left out weighs 0). With
        `overlong_limit_tokens` a trace loses up to 1 as its sampled tokens come within
        `overlong_cache_tokens` (a fifth of the limit) of it."""
        self._scale_by_std = scale_by_std
        self._leave_one_out = leave_one_out
        self._length_penalty = length_penalty
        self._length_weights = _checked_weights(length_weights)
        self._limit_tokens = overlong_limit_tokens
        self._cache_tokens = _checked_cache(overlong_limit_tokens, overlong_cache_tokens)

    def score_group(self, episodes: Sequence[WireEpisode], context: CreditContext) -> None:  # noqa: ARG002
        """Write the same advantage on all sampled tokens of a trace."""
        traces = trainable_traces(episodes)
        assign_advantages(traces, self._advantages(traces))

    def _advantages(self, traces: Sequence[WireTrace]) -> Floats:
        rewards = rewards_of(traces)
        if self._length_penalty:
            rewards = penalise_length(
                rewards,
                output_tokens=[num_sampled_tokens(trace) for trace in traces],
                input_tokens=[trace.num_input_tokens for trace in traces],
                turns=[trace.num_turns for trace in traces],
                weights=self._length_weights,
            )
        if self._limit_tokens is not None:
            rewards = penalise_overlong(
                rewards,
                output_tokens=[num_sampled_tokens(trace) for trace in traces],
                limit_tokens=self._limit_tokens,
                cache_tokens=self._cache_tokens,
            )
        advantages = centre_leave_one_out(rewards) if self._leave_one_out else centre(rewards)
        return divide_by_std(advantages, rewards) if self._scale_by_std else advantages


class MaxRl(Algorithm):
    """`max_rl`: A_i = (r_i - mean(r)) / mean(r); 0 when mean(r) <= 0 (arXiv 2602.02710).

    The rarer success is in a group, the more a success counts.

    >>> algorithm = MaxRl()
    """

    compares_all_traces = True

    def score_group(self, episodes: Sequence[WireEpisode], context: CreditContext) -> None:  # noqa: ARG002
        """Write the same advantage on all sampled tokens of a trace."""
        traces = trainable_traces(episodes)
        rewards = rewards_of(traces)
        assign_advantages(traces, divide_by_mean(centre(rewards), rewards))


class HierarchicalGroupRelative(Algorithm):
    """A_i = r_i - mean(r) over the peers of trace i; without a second peer, 0.

    Peers are the traces of one agent in all episodes of the group. An agent that plays several
    times in one episode on different questions, e.g. a solver of proposed problems, belongs in
    `episode_agents`: then only its traces of the same episode are peers.

    >>> algorithm = HierarchicalGroupRelative(episode_agents=["solver"])
    """

    def __init__(self, *, episode_agents: Sequence[str] = ()) -> None:
        """`episode_agents` names the agents that are compared within their own episode."""
        if isinstance(episode_agents, str):
            raise ConfigError(
                f"hierarchical_grpo: episode_agents = {episode_agents!r} must be a list of agents, "
                f"e.g. [{episode_agents!r}]"
            )
        self.episode_agents = frozenset(episode_agents)

    def score_group(self, episodes: Sequence[WireEpisode], context: CreditContext) -> None:  # noqa: ARG002
        """Write the same advantage on all sampled tokens of a trace."""
        peers: defaultdict[tuple[str, int | None], list[WireTrace]] = defaultdict(list)
        for number, episode in enumerate(episodes):
            for trace in trainable_traces([episode]):
                agent = trace.agent.name
                peers[agent, number if agent in self.episode_agents else None].append(trace)
        for traces in peers.values():
            assign_advantages(traces, centre(rewards_of(traces)))


def rewards_of(traces: Sequence[WireTrace]) -> Floats:
    """Reward of each trace, [N]."""
    return np.array([trace.reward for trace in traces], dtype=np.float64)


def assign_advantages(traces: Sequence[WireTrace], advantages: Floats) -> None:
    """Each trace gets its advantage on all its sampled tokens."""
    for trace, advantage in zip(traces, advantages.tolist(), strict=True):
        assign_advantage(trace, advantage)


def _checked_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """One weight per part; ConfigError for other names and for what is no weight."""
    for name, weight in weights.items():
        if name not in LENGTH_WEIGHTS:
            raise ConfigError(
                f"grpo: length_weights names {name!r}; use {', '.join(LENGTH_WEIGHTS)}"
            )
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"grpo: length_weights.{name} = {weight} must be 0 or more")
    return {name: float(weights.get(name, 0.0)) for name in LENGTH_WEIGHTS}


def _checked_cache(limit_tokens: int | None, cache_tokens: int | None) -> int:
    """Tokens before the limit from which on a trace pays; a fifth of the limit when not given."""
    if limit_tokens is None:
        if cache_tokens is not None:
            raise ConfigError(
                f"grpo: overlong_cache_tokens = {cache_tokens} needs overlong_limit_tokens"
            )
        return 0
    chosen = max(limit_tokens // 5, 1) if cache_tokens is None else cache_tokens
    if not 0 < chosen <= limit_tokens:
        raise ConfigError(
            f"grpo: overlong_cache_tokens = {chosen} must lie between 1 and "
            f"overlong_limit_tokens = {limit_tokens}"
        )
    return chosen
