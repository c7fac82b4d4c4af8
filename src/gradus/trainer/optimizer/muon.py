"""Muon: momentum whose singular values are all set to about one, for matrices of hidden layers.

Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024); the step's scale
0.2 √max(M, N) is that of Liu et al., "Muon is scalable for LLM training" (arXiv:2502.16982): the
update then has the size of AdamW's, so both rules share one learning rate.
Shapes: a parameter is [M, N], or [E, M, N] for E experts, each a matrix of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: steep at zero, and settling between 0.7 and 1.2."""
NUM_ITERATIONS = 5
RMS_OF_ADAMW = 0.2
"""Root mean square of a typical AdamW update, in units of the learning rate."""
_TINY = 1e-7


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; decoupled weight decay.

    A matrix that FSDP split is gathered whole on every rank, orthogonalised there by each, and cut
    again without communication: the same update on any number of ranks, for one all-gather of the
    gradient's size and the repeated arithmetic.

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
        """Update every parameter that has a gradient."""
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
    """`orthogonalise` of the whole matrix; split like `direction`."""
    if not isinstance(direction, DTensor):
        return orthogonalise(direction)
    mesh, placements = direction.device_mesh, direction.placements
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
