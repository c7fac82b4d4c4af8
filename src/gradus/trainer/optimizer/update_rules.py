"""Update rules with all their state in place before the first step: AdamW, SGD, Muon.

Muon is momentum whose singular values are all set to about one, for matrices of hidden layers.
Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024); the step's scale
0.2 √max(M, N) is that of Liu et al., "Muon is scalable for LLM training" (arXiv:2502.16982): the
update then has the size of AdamW's, so both rules share one learning rate.
Shapes: a parameter is [M, N], or [E, M, N] for E experts, each a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from gradus.config import learning
from gradus.trainer.optimizer.parameter_kinds import ParameterKind, TrainedParameter, by_mesh

Groups = list[dict[str, Any]]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: steep at zero, and settling between 0.7 and 1.2."""
NUM_ITERATIONS = 5
RMS_OF_ADAMW = 0.2
"""Root mean square of a typical AdamW update, in units of the learning rate."""
_TINY = 1e-7


def build_update_rules(
    config: learning.OptimizerConfig, parameters: Sequence[TrainedParameter]
) -> tuple[Optimizer, ...]:
    """The optimizers that together own every parameter once; Muon leaves some to AdamW.

    Their state exists from the start, all zero, so that a checkpoint has the same entries before
    the first step and after it, and can be read into them in place.
    """
    if isinstance(config, learning.SgdConfig):
        return (_sgd(config, parameters),)
    if isinstance(config, learning.AdamWConfig):
        return (_adamw(config, parameters),)
    matrices = [p for p in parameters if p.kind is ParameterKind.MATRIX]
    others = [p for p in parameters if p.kind is not ParameterKind.MATRIX]
    rules: list[Optimizer] = []
    if matrices:
        rules.append(_muon(config, matrices))
    if others:
        rules.append(_adamw(config, others))
    return tuple(rules)


def _adamw(
    config: learning.AdamWConfig | learning.MuonConfig, parameters: Sequence[TrainedParameter]
) -> Optimizer:
    rule = torch.optim.AdamW(
        _by_decay(parameters, config.weight_decay),
        lr=config.peak_lr,
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


def _muon(config: learning.MuonConfig, parameters: Sequence[TrainedParameter]) -> Optimizer:
    groups = _by_decay(parameters, config.weight_decay)
    return _filled(Muon(groups, momentum=config.momentum), parameters, _momentum)


def _sgd(config: learning.SgdConfig, parameters: Sequence[TrainedParameter]) -> Optimizer:
    rule = DecoupledSgd(
        _by_decay(parameters, config.weight_decay), lr=config.peak_lr, momentum=config.momentum
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
    """Parameter groups with and without decay, of each mesh; none that is empty."""
    decayed = [p.parameter for p in parameters if p.kind.is_decayed]
    others = [p.parameter for p in parameters if not p.kind.is_decayed]
    return [
        {"params": part, "weight_decay": decay}
        for found, decay in ((decayed, weight_decay), (others, 0.0))
        for part in by_mesh(found)
    ]


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


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; decoupled weight decay.

    A matrix that FSDP split is gathered whole on every rank, orthogonalised there by each, and cut
    again without communication: the same update on any number of ranks, for one all-gather of the
    gradient's size and the repeated arithmetic. Experts are split between matrices: each rank
    orthogonalises those that it has.

        >>> Muon([torch.nn.Parameter(torch.zeros(4, 2))], momentum=0.95)  # doctest: +ELLIPSIS
        Muon (...
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "Muon evaluates no closure"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        momentum, lr = group["momentum"], group["lr"]
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"].mul_(momentum).add_(gradient, alpha=1 - momentum)
        direction = gradient * (1 - momentum) + buffer * momentum
        scale = RMS_OF_ADAMW * math.sqrt(max(parameter.shape[-2:]))
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(_orthogonalise_whole(direction), alpha=-lr * scale)


def _orthogonalise_whole(direction: Tensor) -> Tensor:
    """`orthogonalise` of whole matrices; split like `direction`."""
    if not isinstance(direction, DTensor):
        return orthogonalise(direction)
    mesh, placements = direction.device_mesh, direction.placements
    if direction.ndim == 3:
        # Experts are split between matrices.
        own = orthogonalise(direction.to_local())
        size, stride = direction.shape, direction.stride()
        return DTensor.from_local(own, mesh, placements, run_check=False, shape=size, stride=stride)
    whole = orthogonalise(direction.full_tensor())
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    cut: Tensor = everywhere.redistribute(mesh, placements)
    return cut


def orthogonalise(matrix: Tensor) -> Tensor:
    """About U Vᵀ of each matrix U S Vᵀ in [..., M, N], by Newton-Schulz iterations.

    Computed in bfloat16 on a GPU and in float32 on CPU, where bfloat16 would be slower.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    x = x.mT if is_tall else x  # [..., m, n] with m <= n, so that the products are small
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_TINY)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT  # [..., m, m]
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: Tensor = (x.mT if is_tall else x).to(matrix.dtype)
    return result
