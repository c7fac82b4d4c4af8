"""How a batch changes the weights: the losses of the rl component, and the update rule with its
learning rate and its decay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, Tag

from gradus.config.schema.base import (
    OWN_PLUGIN,
    OwnPlugin,
    PluginConfig,
    StrictConfig,
    by_type,
    number_or,
)
from gradus.errors import ConfigError


class LossConfig(PluginConfig):
    """The loss of the rl component; ce and ref_kl have no options."""

    aggregation: Literal["token_mean", "sequence_mean", "trace_mean"] = "token_mean"
    """What of the rl component counts alike: every token, every sample with tokens that train,
    whatever its length, or every trace, into however many samples its branches split it."""

    @property
    def pulls_to_reference(self) -> bool:
        """Whether it needs reference logprobs, as far as the config shows."""
        return False


class PolicyGradientConfig(LossConfig):
    """The options of every registered loss."""

    kl_coefficient: float = Field(0.0, ge=0)
    """Pull towards the policy that sampled: weight of the squared log-ratio."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Entropy bonus per token; the entropy carries gradient."""
    reference_kl_coefficient: float = Field(0.0, ge=0)
    """Pull towards the reference model: that of `algo.reference`, or the initial weights, of which
    the trainer keeps a copy (with adapters they are there already)."""
    reference_kl_estimator: Literal["k2", "k3"] = "k2"
    """What is pulled: k2 is half the squared log ratio, k3 is e^d - d - 1 with d = reference -
    policy logprob, as in GRPO."""
    importance_sampling: Literal["off", "truncated", "masked"] = "off"
    """Correction of the mismatch between trainer and engine: `truncated` caps the ratio r at
    importance_cap, `masked` drops tokens with r outside [1/cap, cap]."""
    importance_level: Literal["token", "sequence", "sequence_mean"] = "token"
    """What r is: the token's ratio, the product over its sequence, or the geometric mean of the
    sequence."""
    importance_cap: float = Field(2.0, gt=1)
    """The cap of importance_sampling, a ratio of probabilities."""

    @property
    def pulls_to_reference(self) -> bool:
        return self.reference_kl_coefficient > 0

    def contradictions(self) -> Iterator[tuple[str, str]]:
        for key in ("importance_level", "importance_cap"):
            is_default = getattr(self, key) == type(self).model_fields[key].default
            if self.importance_sampling == "off" and not is_default:
                yield key, "has no effect with importance_sampling = 'off'"


class ThresholdConfig(PolicyGradientConfig):
    """The options of every loss that drops a token whose probability moved too far."""

    threshold: float = Field(0.2, gt=0, le=1)
    """Change of a token's probability beyond which the token is dropped."""
    kl_coefficient: float = Field(1e-3, ge=0)


class DppoConfig(ThresholdConfig):
    """Drops a token whose probability moved too far in the direction of its advantage."""

    type: Literal["dppo"] = "dppo"
    implementation = "gradus.trainer.losses:Dppo"


class IpoConfig(ThresholdConfig):
    """Drops a token whose probability moved too far in either direction."""

    type: Literal["ipo"] = "ipo"
    implementation = "gradus.trainer.losses:Ipo"
    threshold: float = Field(0.1, gt=0, le=1)


class ClipConfig(PolicyGradientConfig):
    """The options of every loss that clips a ratio."""

    clip_low: float = Field(0.2, gt=0, le=1)
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is clipped above 1 + clip_high."""


class PpoClipConfig(ClipConfig):
    """Clips the ratio of probabilities."""

    type: Literal["ppo_clip"] = "ppo_clip"
    implementation = "gradus.trainer.losses:PpoClip"


class DapoConfig(ClipConfig):
    """`ppo_clip` with more room upwards."""

    type: Literal["dapo"] = "dapo"
    implementation = "gradus.trainer.losses:Dapo"
    clip_high: float = Field(0.28, gt=0)


class CispoConfig(PolicyGradientConfig):
    """Caps the weight of a token and keeps its gradient."""

    type: Literal["cispo"] = "cispo"
    implementation = "gradus.trainer.losses:Cispo"
    ratio_cap: float = Field(5.0, ge=1)
    """Largest weight of a token: the probability under the policy over that at sampling."""


class GspoConfig(ClipConfig):
    """`ppo_clip` on the ratio of the whole sequence."""

    type: Literal["gspo"] = "gspo"
    implementation = "gradus.trainer.losses:Gspo"
    clip_low: float = Field(3e-4, gt=0, le=1)
    clip_high: float = Field(4e-4, gt=0)


class OwnLossConfig(OwnPlugin, LossConfig):
    """A loss of your own."""

    @property
    def pulls_to_reference(self) -> bool:
        return bool(self.options.get("reference_kl_coefficient"))


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


LearningRate = Annotated[float | Literal["auto"], number_or("auto")]


class UpdateRuleConfig(StrictConfig):
    """What every update rule has: a rate with a warm-up and a schedule, decay, clipping."""

    lr: LearningRate = "auto"
    """Peak learning rate. "auto" takes one by the size of the model, the kind of run and whether
    adapters train, and says which; docs/training.md has the table. The recorded config holds the
    number."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay on linear layers, experts and the output head; norms, biases and embeddings
    have none."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm over all parameters and ranks."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up; linear and cosine end at min_lr_ratio."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from zero."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Share of the peak learning rate that linear and cosine have in the last step; 0 is what they
    would have in the step after it."""

    @property
    def peak_lr(self) -> float:
        """The rate as a number, which a launch and a trainer put in the place of "auto"."""
        assert not isinstance(self.lr, str), "the rate is not chosen yet"
        return self.lr


Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = tuple[Beta, Beta]


class AdamWConfig(UpdateRuleConfig):
    """AdamW, with decoupled weight decay."""

    type: Literal["adamw"] = "adamw"
    betas: Betas = Field((0.9, 0.95), strict=False)
    """Decay rates of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator."""


class MuonConfig(UpdateRuleConfig):
    """Muon for the matrices of hidden layers, AdamW for everything else, at one learning rate."""

    type: Literal["muon"] = "muon"
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay rate of the momentum (Nesterov) of a matrix."""
    betas: Betas = Field((0.9, 0.95), strict=False)
    """AdamW's decay rates, for embeddings, the output head, norms and biases."""
    eps: float = Field(1e-8, gt=0)
    """Added to AdamW's denominator."""


class SgdConfig(UpdateRuleConfig):
    """Gradient descent; weight decay is decoupled here too."""

    type: Literal["sgd"] = "sgd"
    momentum: float = Field(0.0, ge=0, lt=1)
    """Decay rate of the momentum. 0 keeps no state at all."""


OptimizerConfig = Annotated[
    Annotated[AdamWConfig, Tag("adamw")]
    | Annotated[MuonConfig, Tag("muon")]
    | Annotated[SgdConfig, Tag("sgd")],
    by_type("adamw"),
]
"""Every update rule, by its `type`."""
