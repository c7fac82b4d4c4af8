"""From the config to torch optimizers, with all their state in place before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradus.config import AdamWConfig, MuonConfig, OptimizerConfig, SgdConfig
from gradus.trainer.optimizer.muon import Muon
from gradus.trainer.optimizer.parameter_kinds import ParameterKind, TrainedParameter

Groups = list[dict[str, Any]]


def build_update_rules(
    config: OptimizerConfig, parameters: Sequence[TrainedParameter]
) -> tuple[Optimizer, ...]:
    """The optimizers that together own every parameter once; Muon needs AdamW beside it.

    Their state exists from the start, all zero, so that a checkpoint has the same entries before
    the first step and after it, and can be read into them in place.
    """
    if isinstance(config, SgdConfig):
        return (_sgd(config, parameters),)
    if isinstance(config, AdamWConfig):
        return (_adamw(config, parameters),)
    matrices = [p for p in parameters if p.kind is ParameterKind.MATRIX]
    others = [p for p in parameters if p.kind is not ParameterKind.MATRIX]
    rules: list[Optimizer] = []
    if matrices:
        rules.append(_muon(config, matrices))
    if others:
        rules.append(_adamw(config, others))
    return tuple(rules)


def _adamw(config: AdamWConfig | MuonConfig, parameters: Sequence[TrainedParameter]) -> Optimizer:
    rule = torch.optim.AdamW(
        _by_decay(parameters, config.weight_decay),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )

    def fill(parameter: Tensor) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    return _filled(rule, parameters, fill)


def _muon(config: MuonConfig, parameters: Sequence[TrainedParameter]) -> Optimizer:
    groups = _by_decay(parameters, config.weight_decay)
    return _filled(Muon(groups, momentum=config.momentum), parameters, _momentum)


def _sgd(config: SgdConfig, parameters: Sequence[TrainedParameter]) -> Optimizer:
    rule = DecoupledSgd(
        _by_decay(parameters, config.weight_decay), lr=config.lr, momentum=config.momentum
    )
    return _filled(rule, parameters, _momentum) if config.momentum else rule


class DecoupledSgd(torch.optim.SGD):
    """SGD whose decay shrinks weights directly, as AdamW's does; torch's adds it to gradients."""

    def __init__(self, groups: Groups, *, lr: float, momentum: float) -> None:
        for group in groups:
            group["decay"] = group.pop("weight_decay")
        # torch has no fused SGD for parameters that FSDP split.
        super().__init__(groups, lr=lr, momentum=momentum, foreach=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Shrink, then update every parameter that has a gradient."""
        assert closure is None, "DecoupledSgd evaluates no closure"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and group["decay"]:
                    parameter.mul_(1 - group["lr"] * group["decay"])
        super().step()


def _by_decay(parameters: Sequence[TrainedParameter], weight_decay: float) -> Groups:
    """Parameter groups with and without decay; none that is empty."""
    decayed = [p.parameter for p in parameters if p.kind.is_decayed]
    others = [p.parameter for p in parameters if not p.kind.is_decayed]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _momentum(parameter: Tensor) -> dict[str, Tensor]:
    return {"momentum_buffer": torch.zeros_like(parameter)}


def _filled(
    rule: Optimizer,
    parameters: Iterable[TrainedParameter],
    fill: Callable[[Tensor], dict[str, Tensor]],
) -> Optimizer:
    for trained in parameters:
        rule.state[trained.parameter] = fill(trained.parameter)
    return rule
