"""Which algorithms cannot learn from which agents."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gradus.config.schema.algorithms import AlgorithmConfig, HierarchicalGrpoConfig

LEARNER_SEAT = "learner_seat"
"""Field of a task's data that names the one agent whose trace trains; absent or null, every agent
does."""


def trained_agents(agents: Mapping[str, bool], untrained_agents: Collection[str]) -> list[str]:
    """The agents that train; `agents` says what the environment allows."""
    return [
        name for name, may_train in agents.items() if may_train and name not in untrained_agents
    ]


def seat_refusal(
    algo: AlgorithmConfig,
    agents: Mapping[str, bool],
    untrained_agents: Collection[str],
    *,
    has_learner_seat: bool,
    compares_all_traces: bool | None = None,
) -> str | None:
    """Why the algorithm cannot learn from these agents, and what to change; None when it can.

    `agents` maps the environment's agents to whether it lets them train; empty when it did not say.
    `has_learner_seat` says whether each task names the one agent that trains;
    `compares_all_traces` what the algorithm's class says, where it can be asked: by its name only
    registered ones are known.
    """
    if not agents:
        return None
    trained = trained_agents(agents, untrained_agents)
    if not trained:
        return (
            f"no agent trains ({', '.join(agents)}); set agents.<role>.train = true for "
            "one that the trained policy plays"
        )
    if compares_all_traces is None:
        compares_all_traces = algo.compares_all_traces
    if compares_all_traces and len(trained) > 1 and not has_learner_seat:
        return (
            f"{algo.type} compares all traces of a group, but agents {', '.join(trained)} all "
            "train, and a reward of one says nothing about another. Use rae or hierarchical_grpo, "
            "or train one of them: agents.<role>.train = false for the others, or a "
            f"{LEARNER_SEAT} in the tasks"
        )
    if algo.compares_agents and len(agents) < 2:
        return (
            f"{algo.type} compares agents with their own past, but the environment has only the "
            f"agent {trained[0]!r}; use grpo, or an environment with several agents"
        )
    if isinstance(algo, HierarchicalGrpoConfig) and (
        unknown := set(algo.episode_agents) - set(agents)
    ):
        return (
            f"episode_agents names {', '.join(sorted(unknown))}, but the environment has "
            f"{', '.join(agents)}"
        )
    return None
