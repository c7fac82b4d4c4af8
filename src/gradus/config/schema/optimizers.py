"""How gradients change the weights: the update rule, its learning rate and its decay."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag

from gradus.config.schema.base import StrictConfig, by_type


class UpdateRuleConfig(StrictConfig):
    """What every update rule has: a rate with a warm-up and a schedule, decay, clipping."""

    lr: float = Field(1e-5, gt=0)
    """Peak learning rate."""
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
    """Share of the peak learning rate at which linear and cosine end."""


class AdamWConfig(UpdateRuleConfig):
    """AdamW, with decoupled weight decay."""

    type: Literal["adamw"] = "adamw"
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False)
    """Decay rates of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator."""


class MuonConfig(UpdateRuleConfig):
    """Muon for the matrices of hidden layers, AdamW for everything else, at one learning rate."""

    type: Literal["muon"] = "muon"
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay rate of the momentum (Nesterov) of a matrix."""
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False)
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
