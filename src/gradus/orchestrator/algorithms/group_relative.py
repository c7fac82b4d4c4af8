"""`grpo`, `max_rl`, `hierarchical_grpo`: a trace is credited by its reward against others.

Next page: `../groups/samples.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from verifiers.v1.episode import WireEpisode
from verifiers.v1.trace import WireTrace

from gradus.config import algorithms
from gradus.orchestrator.algorithms.base import Algorithm, CreditContext, assign_advantage
from gradus.orchestrator.algorithms.credit import (
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

    >>> algorithm = GroupRelative(algorithms.GrpoConfig(leave_one_out=True))
    """

    compares_all_traces = True

    def __init__(self, config: algorithms.GroupRelativeConfig) -> None:
        self._config = config

    def score_group(self, episodes: Sequence[WireEpisode], context: CreditContext) -> None:  # noqa: ARG002
        """Write the same advantage on all sampled tokens of a trace."""
        traces = trainable_traces(episodes)
        assign_advantages(traces, self._advantages(traces))

    def _advantages(self, traces: Sequence[WireTrace]) -> Floats:
        rewards, config = rewards_of(traces), self._config
        if config.length_penalty:
            rewards = penalise_length(
                rewards,
                output_tokens=[num_sampled_tokens(trace) for trace in traces],
                input_tokens=[trace.num_input_tokens for trace in traces],
                turns=[trace.num_turns for trace in traces],
                weights=config.length_weights,
            )
        if (limit := config.overlong_limit_tokens) is not None:
            rewards = penalise_overlong(
                rewards,
                output_tokens=[num_sampled_tokens(trace) for trace in traces],
                limit_tokens=limit,
                cache_tokens=config.overlong_cache_tokens or max(limit // 5, 1),
            )
        advantages = centre_leave_one_out(rewards) if config.leave_one_out else centre(rewards)
        return divide_by_std(advantages, rewards) if config.scale_by_std else advantages


class MaxRl(Algorithm):
    """`max_rl`: A_i = (r_i - mean(r)) / mean(r); 0 when mean(r) <= 0 (arXiv 2602.02710).

    The rarer success is in a group, the more a success counts.

    >>> algorithm = MaxRl()
    """

    compares_all_traces = True

    def score_group(self, episodes: Sequence[WireEpisode], context: CreditContext) -> None:  # noqa: ARG002
        traces = trainable_traces(episodes)
        rewards = rewards_of(traces)
        assign_advantages(traces, divide_by_mean(centre(rewards), rewards))


class HierarchicalGroupRelative(Algorithm):
    """A_i = r_i - mean(r) over the peers of trace i; without a second peer, 0.

    Peers are the traces of one agent in all episodes of the group. An agent that plays several
    times in one episode on different questions, e.g. a solver of proposed problems, belongs in
    `episode_agents`: then only its traces of the same episode are peers.

    >>> config = algorithms.HierarchicalGrpoConfig(episode_agents=["solver"])
    >>> algorithm = HierarchicalGroupRelative(config)
    """

    def __init__(self, config: algorithms.HierarchicalGrpoConfig) -> None:
        self._episode_agents = frozenset(config.episode_agents)

    def score_group(self, episodes: Sequence[WireEpisode], context: CreditContext) -> None:  # noqa: ARG002
        peers: defaultdict[tuple[str, int | None], list[WireTrace]] = defaultdict(list)
        for number, episode in enumerate(episodes):
            for trace in trainable_traces([episode]):
                agent = trace.agent.name
                peers[agent, number if agent in self._episode_agents else None].append(trace)
        for traces in peers.values():
            assign_advantages(traces, centre(rewards_of(traces)))


def rewards_of(traces: Sequence[WireTrace]) -> Floats:
    """Reward of each trace, [N]."""
    return np.array([trace.reward for trace in traces], dtype=np.float64)


def assign_advantages(traces: Sequence[WireTrace], advantages: Floats) -> None:
    for trace, advantage in zip(traces, advantages.tolist(), strict=True):
        assign_advantage(trace, advantage)
