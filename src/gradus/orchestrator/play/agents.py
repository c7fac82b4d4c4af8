"""Which agents of an environment train: decided per source, and per task by its data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from verifiers.v1.episode import WireEpisode

from gradus.config import SourceConfig, algorithms
from gradus.errors import ConfigError
from gradus.orchestrator.types import Failure

_LEARNER_SEAT = algorithms.LEARNER_SEAT


def mark_trainable(
    episode: WireEpisode, untrained_agents: Collection[str], *, has_one_baseline: bool = False
) -> Failure | None:
    """Mark the traces of agents that do not train; a Failure when the learner played nothing.

    An environment may have marked some already; they stay so. `has_one_baseline` says that all
    traces of a group are compared, so that a task of several agents must name the one that learns.
    An episode that failed already keeps its error.
    """
    extra = episode.task.data.model_extra or {}
    learner = extra.get(_LEARNER_SEAT)
    for trace in episode.traces:
        agent = trace.agent
        is_other = learner is not None and agent.name != learner
        agent.trainable = agent.trainable and agent.name not in untrained_agents and not is_other
    if not episode.ok:
        return None
    names = sorted({trace.agent.name for trace in episode.traces})
    if learner is not None and learner not in names:
        return Failure(
            f"invalid_{_LEARNER_SEAT}",
            f"the task's {_LEARNER_SEAT} is {learner!r}, who played no turn of this episode; "
            f"those who did: {', '.join(names) or 'none'}. Name an agent of the environment, and "
            "let the environment ask it in every episode",
        )
    trained = sorted({trace.agent.name for trace in episode.traces if trace.agent.trainable})
    if has_one_baseline and len(trained) > 1:
        return Failure(
            f"missing_{_LEARNER_SEAT}",
            f"the task has no {_LEARNER_SEAT}, but agents {', '.join(trained)} all train, and the "
            "algorithm compares them with each other",
        )
    return None


def check_agents(
    source: SourceConfig,
    agents: Mapping[str, bool],
    first_task: Mapping[str, Any],
    *,
    compares_all_traces: bool | None = None,
) -> None:
    """ConfigError when the algorithm cannot learn from these agents; says what to change.

    The run's own environment processes check the same when they start; this check also covers an
    environment that the user runs.
    """
    refusal = source.algo.seat_refusal(
        agents,
        source.untrained_agents,
        has_learner_seat=first_task.get(_LEARNER_SEAT) is not None,
        compares_all_traces=compares_all_traces,
    )
    if refusal is not None:
        raise ConfigError(f"source {source.name!r}: {refusal}")
