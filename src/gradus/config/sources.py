"""What a source inherits: its name, its sampling and its algorithm, with nothing left open."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from gradus.config.keys import KeyPath
from gradus.config.problems import Problem
from gradus.config.schema.algorithms import AlgorithmConfig
from gradus.config.schema.environment import (
    NAME_PATTERN,
    AgentRoleConfig,
    EnvironmentConfig,
    TrainEnvironmentConfig,
)
from gradus.config.schema.inference import SamplingConfig
from gradus.config.schema.run import RunConfig

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


_SCORED = frozenset({"opd", "opsd"})
_UNSCORED = frozenset({"grpo", "max_rl", "hierarchical_grpo", "rae", "echo", "opsd", "sft"})


def reference_problems(
    path: KeyPath, algo: AlgorithmConfig, *, temperature: float | None, is_frozen: bool
) -> Iterator[Problem]:
    """Distilling algorithms without their model, or with one that they cannot be compared to."""
    if algo.type == "opd" and algo.reference is None:
        yield Problem(
            (*path, "reference"),
            "is missing; opd needs the base_url and the model of a frozen teacher",
        )
    if algo.type in _SCORED and temperature not in (None, 1.0):
        yield Problem(
            (*path, "type"),
            f"{algo.type} compares with logprobs at temperature 1, but sampling.temperature is "
            f"{temperature}; set it to 1.0",
        )
    if algo.type == "sft" and not is_frozen:
        yield Problem(
            (*path, "type"),
            "sft learns what a frozen model plays, but the policy plays this source; "
            "give its seats a model and a base_url under agents.<role>",
        )
    if algo.reference is not None and algo.type in _UNSCORED:
        yield Problem((*path, "reference"), f"{algo.type} asks no frozen model; remove it")


def temperature_problems(
    config: RunConfig, source: TrainEnvironmentConfig, path: KeyPath
) -> Iterator[Problem]:
    """A source whose tokens would be trained at another temperature than they were sampled at."""
    temperature = source_sampling(config, source).temperature
    if temperature == 0:
        is_own = source.sampling.temperature is not None
        section = (*path, "sampling") if is_own else ("orchestrator", "train", "sampling")
        yield Problem(
            (*section, "temperature"),
            "0 leaves one possible reply and nothing to learn from; use a positive number here, "
            "and 0 under orchestrator.eval.sampling for greedy evaluation",
        )
    untrained = untrained_agents(source)
    for role, agent in source.agents.items():
        own = None if agent.sampling is None else agent.sampling.temperature
        if own is None or own == temperature or role in untrained:
            continue
        yield Problem(
            (*path, "agents", role, "sampling", "temperature"),
            f"{own:g} is not the source's {temperature:g}, at which all its tokens train; remove "
            "it, set the source's sampling.temperature, or set train = false for the role",
        )
