"""Tokens train at the temperature at which they were sampled, so a source has one that divides."""

from __future__ import annotations

from collections.abc import Iterator

from gradus.config.environment import TrainEnvironmentConfig
from gradus.config.problems import Problem
from gradus.config.run import RunConfig
from gradus.config.schema import KeyPath
from gradus.config.sources import source_sampling, untrained_agents


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
