"""The config of a recorded run, and what of it a replay may change."""

from __future__ import annotations

from typing import Any

from gradus.config.run import RunConfig

SECRET_KEY = "env_vars"
"""Tables of this name may hold secrets, so they are never written down."""


def recorded_config(config: RunConfig) -> dict[str, Any]:
    """The config as JSON values, without the environment variables of any process.

    >>> recorded_config(config)["trainer"]["env_vars"]
    {}
    """
    values: dict[str, Any] = _without_secrets(config.model_dump(mode="json"))
    return values


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: {} if key == SECRET_KEY else _without_secrets(member)
            for key, member in value.items()
        }
    if isinstance(value, list):
        return [_without_secrets(member) for member in value]
    return value
