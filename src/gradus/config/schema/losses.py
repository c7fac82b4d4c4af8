"""The losses of the rl component: one config for each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from gradus.config.schema.base import OWN_PATTERN, OWN_PLUGIN, PluginConfig, by_type
from gradus.errors import ConfigError


class LossConfig(PluginConfig):
    """The loss of the rl component; ce and ref_kl have no options."""

    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """What of the rl component counts alike: every token, or every sample with tokens that train,
    whatever its length."""


class _PolicyGradient(LossConfig):
    """The options of every registered loss."""

    kl_coefficient: float = Field(0.0, ge=0)
    """Pull towards the policy that sampled: weight of the squared log-ratio."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Entropy bonus per token; the entropy carries gradient."""
    reference_kl_coefficient: float = Field(0.0, ge=0)
    """Pull towards the reference model, on the tokens that it scored."""
    importance_sampling: Literal["off", "truncated", "masked"] = "off"
    """Correction of the mismatch between trainer and engine: `truncated` caps the ratio r at
    importance_cap, `masked` drops tokens with r outside [1/cap, cap]."""
    importance_level: Literal["token", "sequence", "sequence_mean"] = "token"
    """What r is: the token's ratio, the product over its sequence, or the geometric mean of the
    sequence."""
    importance_cap: float = Field(2.0, gt=1)
    """The cap of importance_sampling, a ratio of probabilities."""


class DppoConfig(_PolicyGradient):
    """Drops a token whose probability moved too far in the direction of its advantage."""

    type: Literal["dppo"] = "dppo"
    implementation = "gradus.trainer.losses:Dppo"
    threshold: float = Field(0.2, gt=0, le=1)
    """Change of a token's probability beyond which the token is dropped."""
    kl_coefficient: float = Field(1e-3, ge=0)
    """Pull towards the policy that sampled: weight of the squared log-ratio."""


class IpoConfig(_PolicyGradient):
    """Drops a token whose probability moved too far in either direction."""

    type: Literal["ipo"] = "ipo"
    implementation = "gradus.trainer.losses:Ipo"
    threshold: float = Field(0.1, gt=0, le=1)
    """Change of a token's probability beyond which the token is dropped."""
    kl_coefficient: float = Field(1e-3, ge=0)
    """Pull towards the policy that sampled: weight of the squared log-ratio."""


class PpoClipConfig(_PolicyGradient):
    """Clips the ratio of probabilities."""

    type: Literal["ppo_clip"] = "ppo_clip"
    implementation = "gradus.trainer.losses:PpoClip"
    clip_low: float = Field(0.2, gt=0, le=1)
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is clipped above 1 + clip_high."""


class DapoConfig(_PolicyGradient):
    """`ppo_clip` with more room upwards."""

    type: Literal["dapo"] = "dapo"
    implementation = "gradus.trainer.losses:Dapo"
    clip_low: float = Field(0.2, gt=0, le=1)
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(0.28, gt=0)
    """The ratio is clipped above 1 + clip_high."""


class CispoConfig(_PolicyGradient):
    """Caps the weight of a token and keeps its gradient."""

    type: Literal["cispo"] = "cispo"
    implementation = "gradus.trainer.losses:Cispo"
    ratio_cap: float = Field(5.0, ge=1)
    """Largest weight of a token, a ratio of probabilities."""


class GspoConfig(_PolicyGradient):
    """`ppo_clip` on the ratio of the whole sequence."""

    type: Literal["gspo"] = "gspo"
    implementation = "gradus.trainer.losses:Gspo"
    clip_low: float = Field(3e-4, gt=0, le=1)
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(4e-4, gt=0)
    """The ratio is clipped above 1 + clip_high."""


class OwnLossConfig(LossConfig):
    """A loss of your own."""

    type: str = Field(pattern=OWN_PATTERN)
    """Your class."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your class."""


LossChoice = Annotated[
    Annotated[DppoConfig, Tag("dppo")]
    | Annotated[IpoConfig, Tag("ipo")]
    | Annotated[PpoClipConfig, Tag("ppo_clip")]
    | Annotated[DapoConfig, Tag("dapo")]
    | Annotated[CispoConfig, Tag("cispo")]
    | Annotated[GspoConfig, Tag("gspo")]
    | Annotated[OwnLossConfig, Tag(OWN_PLUGIN)],
    by_type("dppo"),
]
"""Every loss, by its `type`."""


def loss_config(name: str) -> type[LossConfig]:
    """The config that `type = name` selects; ConfigError for a name that is not known."""
    known = LossConfig.registered()
    if ":" not in name and name not in known:
        raise ConfigError(
            f"loss {name!r} is not known; use one of: {', '.join(known)}, "
            f"or your own as {OWN_PLUGIN!r}"
        )
    return known.get(name, OwnLossConfig)
