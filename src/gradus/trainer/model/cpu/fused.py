"""The operations between the matrix products of a layer, in few passes over memory; for CPUs.

transformers writes norms, rotations and gated products as five to ten operations each, every one of
which reads and writes whole tensors and keeps some for backward. The forms here compute the same
numbers up to rounding, with gradients written out. They replace a module's `forward` only, and only
where a probe shows that it computes the known formula. Shapes: T tokens, H heads, D head size.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 18
"""Elements of a gated product computed at once, so that what lies between stays in the cache."""
_ROTATION = "apply_rotary_pos_emb"
"""The function in transformers' model files that rotates queries and keys."""
_TOLERANCE = 1e-5
"""Largest difference of a probe over its largest value; rounding in float32 is 1e-7."""

Forward = Callable[..., Any]


def fuse_layers(model: torch.nn.Module) -> None:
    """Replace the forward of every norm, gated product and rotation whose formula is known.

    Parameters and names stay. Not for models to be compiled: a compiler fuses more than this.
    """
    chosen: dict[type, Forward | None] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in chosen:
            # The layers of a model are alike; one of each kind is probed.
            chosen[kind] = _fused_form(module)
        form = chosen[kind]
        if form is not None:
            module.forward = partial(form, module)


def _fused_form(module: torch.nn.Module) -> Forward | None:
    """A faster forward, called with the module first; None if no known formula fits."""
    if _is_norm(module):
        return _norm
    if _is_gated_product(module):
        return _gated_product
    return _with_fused_rotation(module)


@torch.no_grad()
def _agree(found: Tensor, expected: Tensor) -> bool:
    """Tell whether a probe came out the same; a probe that came out as zeros shows nothing."""
    largest = expected.abs().max().item()
    if found.shape != expected.shape or largest == 0:
        return False
    return (found - expected).abs().max().item() <= _TOLERANCE * largest


def _probe(*shape: int) -> Tensor:
    """Numbers between -8 and 8, the same in each call, without touching the random state."""
    count = torch.Size(shape).numel()
    return 8 * torch.sin(torch.arange(1.0, count + 1).square()).view(shape)


# Norms: x / sqrt(mean(x²) + ε), times a weight per channel.


def _is_norm(module: torch.nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not hasattr(module, "variance_epsilon"):
        return False
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not _takes_one(module):
        return False
    if len(list(module.parameters())) > 1:
        return False
    probe = _probe(1, 3, len(weight))
    # The model's own weight may have no values yet.
    filled = {"weight": _probe(len(weight)).to(weight.dtype)}
    expected = torch.func.functional_call(module, filled, probe)
    with_weight = types.SimpleNamespace(**vars(module), **filled)
    return _agree(_norm(with_weight, probe), expected)


def _takes_one(module: torch.nn.Module) -> bool:
    return len(inspect.signature(module.forward).parameters) == 1


def _norm(module: Any, hidden: Tensor) -> Tensor:
    normed: Tensor = _Norm.apply(  # type: ignore[no-untyped-call]
        hidden, module.weight, module.variance_epsilon
    )
    return normed


class _Norm(torch.autograd.Function):
    """Computes in float32 and rounds before the weight, as transformers does; keeps the input."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = hidden.float()
        # vector_norm reads once where squaring and averaging read and write.
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = length.square_().div_(hidden.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(hidden, weight, inverse)
        normed: Tensor = (wide * inverse).to(hidden.dtype) * weight
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, inverse = ctx.saved_tensors
        size = hidden.shape[-1]
        gradient = gradients[0].reshape(-1, size).float()
        inverse = inverse.view(-1, 1)
        normed = hidden.reshape(-1, size).float() * inverse
        by_channel = gradient * normed
        by_weight = by_channel.sum(dim=0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        wide = weight.float()
        # d/dx of x·inverse(x): the part of the gradient along x is taken out.
        along = (by_channel @ wide).div_(-size)[:, None]
        by_hidden = (gradient * wide).addcmul_(normed, along).mul_(inverse)
        return by_hidden.to(hidden.dtype).view(hidden.shape), by_weight, None


# Gated products: down(silu(gate(x)) · up(x)).


def _is_gated_product(module: torch.nn.Module) -> bool:
    """Runs the module's code on stand-ins for its layers, which may be large or adapted."""
    activation = getattr(module, "act_fn", None)
    layers = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if None in layers or not callable(activation) or not _takes_one(module):
        return False
    parts = {
        "gate_proj": torch.nn.Identity(),
        "up_proj": partial(torch.flip, dims=(-1,)),
        "down_proj": torch.cos,
        "act_fn": activation,
    }
    stand_in, probe = types.SimpleNamespace(**(vars(module) | parts)), _probe(1, 3, 8)
    try:
        expected = type(module).forward(stand_in, probe)
    except AttributeError:
        # It reads something that the known formula has no place for.
        return False
    return _agree(_gated_product(stand_in, probe), expected)


def _gated_product(module: Any, hidden: Tensor) -> Any:
    gate, up = module.gate_proj(hidden).contiguous(), module.up_proj(hidden).contiguous()
    return module.down_proj(_Gate.apply(gate, up))  # type: ignore[no-untyped-call]


class _Gate(torch.autograd.Function):
    """silu(gate) · up in blocks of rows; keeps its two inputs and nothing between."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        product = torch.empty_like(gate)
        for rows, gate_rows, up_rows in _row_blocks(product, gate, up):
            torch.ops.aten.silu.out(gate_rows, out=rows)
            rows.mul_(up_rows)
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        by_gate, by_up = torch.empty_like(gate), torch.empty_like(up)
        parts = (gradients[0].contiguous(), gate, up, by_gate, by_up)
        for gradient, gate_rows, up_rows, for_gate, for_up in _row_blocks(*parts):
            torch.ops.aten.silu.out(gate_rows, out=for_up)
            for_up.mul_(gradient)
            torch.mul(gradient, up_rows, out=for_gate)
            torch.ops.aten.silu_backward.grad_input(for_gate, gate_rows, grad_input=for_gate)
        return by_gate, by_up


def _row_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each tensor, some at a time."""
    size = tensors[0].shape[-1]
    rows = max(1, _BLOCK_ELEMENTS // size)
    blocks: list[tuple[Tensor, ...]] = [torch.split(t.view(-1, size), rows) for t in tensors]
    return zip(*blocks, strict=True)


# Rotations: with halves x1 and x2, (x1·cos - x2·sin, x2·cos + x1·sin).


def _with_fused_rotation(module: torch.nn.Module) -> Forward | None:
    """The module's own forward, which finds `_rotate` where it looks for transformers' function.

    The function is looked up in the model file, which all models of a kind share; a forward with
    its own globals leaves the other models of this process alone.
    """
    forward = type(module).forward
    if not isinstance(forward, types.FunctionType) or _ROTATION not in forward.__code__.co_names:
        return None
    original = forward.__globals__.get(_ROTATION)
    if original is None or not _is_rotation(original):
        return None
    fused = types.FunctionType(
        forward.__code__,
        forward.__globals__ | {_ROTATION: partial(_rotate, original)},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    fused.__kwdefaults__ = forward.__kwdefaults__
    return fused


def _is_rotation(original: Forward) -> bool:
    query, key = _probe(1, 2, 3, 8), _probe(1, 1, 3, 8)
    cos, sin = _probe(1, 3, 8).cos(), _probe(1, 3, 8).sin()
    try:
        expected = original(query, key, cos, sin)
    except (RuntimeError, TypeError):  # Some take the angles of half a head, or queries alone.
        return False
    found = _rotate(original, query, key, cos, sin)
    return all(_agree(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def _rotate(
    original: Forward, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Queries [1, H, T, D] and keys, turned by the angles [1, T, D] of their positions."""
    # With float32 angles the model also rotates in float32, and rounds afterwards.
    if options or cos.shape[-1] != query.shape[-1] or cos.dtype != query.dtype:
        rotated: tuple[Tensor, Tensor] = original(query, key, cos, sin, **options)
        return rotated
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned: list[Tensor] = [
        _Rotation.apply(states, cos, sin)  # type: ignore[no-untyped-call]
        for states in (query, key)
    ]
    return turned[0], turned[1]


class _Rotation(torch.autograd.Function):
    """Keeps the angles only; the way back turns the other way."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        turned = states * cos
        (turned_1, turned_2), (states_1, states_2), (sin_1, sin_2) = _halves(turned, states, sin)
        turned_1.addcmul_(states_2, sin_1, value=-1)
        turned_2.addcmul_(states_1, sin_2)
        return turned

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        back = gradients[0] * cos
        (back_1, back_2), (after_1, after_2), (sin_1, sin_2) = _halves(back, gradients[0], sin)
        back_1.addcmul_(after_2, sin_2)
        back_2.addcmul_(after_1, sin_1, value=-1)
        return back, None, None


def _halves(*tensors: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for tensor in tensors:
        first, second = tensor.chunk(2, dim=-1)
        yield first, second
