"""Which agents of an environment train: decided per source, and per task by its data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from verifiers.v1.episode import WireEpisode

from gradus.config.process import SourceConfig
from gradus.errors import ConfigError
from gradus.orchestrator.episode_check import Failure

LEARNER_SEAT = "learner_seat"
"""Field of a task's data that names the one agent whose trace trains; absent, every agent does."""

COMPARES_ALL_TRACES = frozenset({"grpo", "max_rl", "echo"})
"""Algorithms with one baseline for all traces of a group."""


def settle_standing(episode: WireEpisode, untrained_agents: Collection[str]) -> Failure | None:
    """Mark the traces of agents that do not train; a Failure when the task's learner is no agent.

    An environment may have marked some already; they stay so.
    """
    extra = episode.task.data.model_extra or {}
    learner = extra.get(LEARNER_SEAT)
    if LEARNER_SEAT in extra:
        names = sorted({trace.agent.name for trace in episode.traces})
        if learner not in names:
            return Failure(
                f"invalid_{LEARNER_SEAT}",
                f"the task's {LEARNER_SEAT} is {learner!r}; it must name one of the agents "
                f"{', '.join(names)}",
            )
    for trace in episode.traces:
        agent = trace.agent
        is_other = learner is not None and agent.name != learner
        agent.trainable = agent.trainable and agent.name not in untrained_agents and not is_other
    return None


def trained_agents(agents: Mapping[str, bool], untrained_agents: Collection[str]) -> list[str]:
    """The agents that train; `agents` says what the environment allows."""
    return [
        name for name, may_train in agents.items() if may_train and name not in untrained_agents
    ]


def check_seats(
    source: SourceConfig, agents: Mapping[str, bool], first_task: Mapping[str, Any]
) -> None:
    """ConfigError when the algorithm cannot learn from these agents; says what to change.

    `agents` maps the environment's agents to whether it lets them train; empty when it did not say.
    """
    if not agents:
        return
    kind = source.algo.type
    trained = trained_agents(agents, source.untrained_agents)
    where = f"source {source.name!r}"
    if not trained:
        raise ConfigError(
            f"{where}: no agent trains ({', '.join(agents)}); set agents.<role>.train = true for "
            "one that the trained policy plays"
        )
    if kind in COMPARES_ALL_TRACES and len(trained) > 1 and LEARNER_SEAT not in first_task:
        raise ConfigError(
            f"{where}: {kind} compares all traces of a group, but agents {', '.join(trained)} all "
            "train, and a reward of one says nothing about another. Use rae or hierarchical_grpo, "
            "or train one of them: agents.<role>.train = false for the others, or a "
            f"{LEARNER_SEAT} in the tasks"
        )
    if kind == "rae" and len(agents) < 2:
        raise ConfigError(
            f"{where}: rae compares agents with their own past, but the environment has only the "
            f"agent {trained[0]!r}; use grpo, or an environment with several agents"
        )
    unknown = set(source.algo.options.get("episode_agents", ())) - set(agents)
    if kind == "hierarchical_grpo" and unknown:
        raise ConfigError(
            f"{where}: episode_agents names {', '.join(sorted(unknown))}, but the environment has "
            f"{', '.join(agents)}"
        )
