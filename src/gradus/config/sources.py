"""What a source inherits: its name, its sampling and its algorithm, with nothing left open."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from gradus.config.algorithm import AlgorithmConfig
from gradus.config.environment import (
    NAME_PATTERN,
    AgentRoleConfig,
    EnvironmentConfig,
    TrainEnvironmentConfig,
)
from gradus.config.problems import Problem
from gradus.config.run import RunConfig
from gradus.config.sampling import SamplingConfig
from gradus.config.schema import KeyPath

DEFAULT_SAMPLING = SamplingConfig(temperature=1.0, top_p=1.0, max_completion_tokens=512)
"""What holds where neither the source nor the enclosing section says anything."""

_JUDGE = "judge"
"""A role of this name does not train unless its settings say so."""


def merged_sampling(inner: SamplingConfig, outer: SamplingConfig) -> SamplingConfig:
    """`inner`, with every unset value taken from `outer`; `extra_body` is joined key by key."""
    return SamplingConfig(
        temperature=outer.temperature if inner.temperature is None else inner.temperature,
        top_p=outer.top_p if inner.top_p is None else inner.top_p,
        max_completion_tokens=(
            outer.max_completion_tokens
            if inner.max_completion_tokens is None
            else inner.max_completion_tokens
        ),
        extra_body={**outer.extra_body, **inner.extra_body},
    )


def source_sampling(config: RunConfig, source: TrainEnvironmentConfig) -> SamplingConfig:
    """Complete sampling settings of a source."""
    section = merged_sampling(config.orchestrator.train.sampling, DEFAULT_SAMPLING)
    return merged_sampling(source.sampling, section)


def evaluation_sampling(config: RunConfig) -> SamplingConfig:
    """Sampling of an evaluated environment that says nothing itself."""
    section = merged_sampling(config.orchestrator.train.sampling, DEFAULT_SAMPLING)
    evaluation = config.orchestrator.eval
    return section if evaluation is None else merged_sampling(evaluation.sampling, section)


def source_algo(config: RunConfig, source: TrainEnvironmentConfig) -> AlgorithmConfig:
    """Complete algorithm settings of a source."""
    return config.orchestrator.train.algo if source.algo is None else source.algo


def check_names(sources: Sequence[EnvironmentConfig], path: KeyPath) -> Iterator[Problem]:
    """Names of sources become names of files and metrics: valid, and unique in any letter case."""
    first: dict[str, int] = {}
    for index, source in enumerate(sources):
        name = source.unique_name
        if not re.fullmatch(NAME_PATTERN, name):
            text = f"the id {source.id!r} is no name for files and metrics; give the source a name"
            yield Problem((*path, index, "name"), text)
            continue
        earlier = first.setdefault(name.lower(), index)
        if earlier != index:
            yield Problem(
                (*path, index, "name"),
                f"{name!r} is already the name of source {earlier}; give each source its own name",
            )


def is_frozen(source: EnvironmentConfig) -> bool:
    """Whether every seat is played by another model than the policy."""
    roles = source.agents.values()
    return bool(roles) and all(role.base_url is not None for role in roles)


def untrained_agents(source: EnvironmentConfig) -> list[str]:
    """Roles whose traces never train and are not measured, by their settings or by their name.

    Beside the policy another model does not train; where it plays alone, its traces are data.
    """
    roles = {_JUDGE: AgentRoleConfig(), **source.agents}
    is_mixed = not is_frozen(source)
    return sorted(
        name
        for name, role in roles.items()
        if role.train is False
        or (role.train is None and (name == _JUDGE or (is_mixed and role.base_url is not None)))
    )
