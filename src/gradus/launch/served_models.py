"""Whether the models that others serve for a run are there, before the run starts anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gradus.config import EnvironmentConfig, RunConfig, resolve_sources
from gradus.errors import ConfigError, ProcessError
from gradus.launch.endpoint_check import check_endpoint


@dataclass(frozen=True)
class ServedModel:
    """A model behind an endpoint that gradus does not start."""

    where: str
    """The source and the key that name it."""
    base_url: str
    model: str
    api_key_var: str | None
    variables: Mapping[str, str]
    """Variables that the config sets for the process that asks it."""


def served_models(config: RunConfig) -> Iterator[ServedModel]:
    """The teachers of the train sources, and who else plays in train and evaluated sources."""
    sources = resolve_sources(config)
    for source in sources.train:
        reference = source.complete.algo.reference
        if reference is not None:
            yield ServedModel(
                f"source {source.complete.name!r}, algo.reference",
                reference.base_url,
                reference.model,
                reference.api_key_var,
                config.orchestrator.env_vars,
            )
    for played in sources.all:
        yield from _players(played.given)


def _players(source: EnvironmentConfig) -> Iterator[ServedModel]:
    for role, agent in source.agents.items():
        if agent.base_url is not None and agent.model is not None:
            yield ServedModel(
                f"source {source.unique_name!r}, agents.{role}",
                agent.base_url,
                agent.model,
                agent.api_key_var,
                source.env_vars,
            )


def check_served_models(config: RunConfig, environment: Mapping[str, str]) -> None:
    """Ask each endpoint for its models.

    ConfigError for a refused key or an unknown model, ProcessError when nobody answers; both say
    which source needs it.
    """
    for served in served_models(config):
        try:
            check_endpoint(
                served.base_url,
                served.model,
                api_key_var=served.api_key_var,
                environment={**environment, **served.variables},
            )
        except (ConfigError, ProcessError) as error:
            raise type(error)(f"{served.where}: {error}") from None
