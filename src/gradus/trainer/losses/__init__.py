"""Losses of the rl component, by registered name or `module:Class`."""

from __future__ import annotations

from typing import cast

from gradus.config.trainer import LossConfig
from gradus.errors import ConfigError
from gradus.plugins import find_plugin
from gradus.trainer.losses.base import TokenLoss
from gradus.trainer.losses.trust_region import Dppo

LOSSES: dict[str, str | type] = {"dppo": Dppo}
"""Registered losses."""


def build_loss(config: LossConfig) -> TokenLoss:
    """The loss that the config names; refuses options that it does not take."""
    kind = find_plugin("loss", config.type, LOSSES)
    try:
        return cast("TokenLoss", kind(**config.options))
    except TypeError as error:
        raise ConfigError(f"loss {config.type!r}: {error}; check trainer.loss.options") from error
