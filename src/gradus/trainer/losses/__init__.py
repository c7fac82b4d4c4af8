"""Losses of the rl component, by registered name or `module:Class`."""

from __future__ import annotations

from typing import cast

from gradus.config.loss_options import option_problems
from gradus.config.problems import refuse
from gradus.config.trainer import LossConfig
from gradus.plugins import building, find_plugin
from gradus.trainer.losses.base import TokenLoss
from gradus.trainer.losses.clipping import Cispo, Dapo, Gspo, PpoClip
from gradus.trainer.losses.trust_region import Dppo, Ipo

LOSSES: dict[str, str | type] = {
    "dppo": Dppo,
    "ipo": Ipo,
    "ppo_clip": PpoClip,
    "dapo": Dapo,
    "cispo": Cispo,
    "gspo": Gspo,
}
"""Registered losses."""


def build_loss(config: LossConfig) -> TokenLoss:
    """The loss that the config names; ConfigError names options that it does not take, and values
    out of range."""
    kind = find_plugin("loss", config.type, LOSSES)
    refuse(option_problems(("trainer", "loss", "options"), config.type, config.options))
    with building(f"loss {config.type!r}", config.options):
        return cast("TokenLoss", kind(**config.options))
