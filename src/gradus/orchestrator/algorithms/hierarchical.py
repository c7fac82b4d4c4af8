"""`hierarchical_grpo`: a trace is compared with its peers, the traces of the same agent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from verifiers.v1.episode import WireEpisode
from verifiers.v1.trace import WireTrace

from gradus.errors import ConfigError
from gradus.orchestrator.algorithms.base import Algorithm, CreditContext
from gradus.orchestrator.algorithms.credit import centre
from gradus.orchestrator.algorithms.group_relative import assign_advantages, rewards_of
from gradus.orchestrator.traces import trainable_traces


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
