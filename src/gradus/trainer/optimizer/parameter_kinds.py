"""The kind of each trained parameter, which decides its decay and its update rule."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


class ParameterKind(enum.Enum):
    """Kinds of parameters, by what they multiply.

    Decay shrinks a weight whose scale the next norm undoes. The scale of a norm or a bias has no
    such redundancy, and the row of a rare token would shrink at every step that does not see it.
    """

    MATRIX = enum.auto()
    """A hidden linear layer [out, in], an adapter's factor, or experts [E, out, in]."""
    OUTER = enum.auto()
    """The output head, or a convolution: decayed, but not orthogonalised."""
    EMBEDDING = enum.auto()
    """One row per token; also when the output head shares it."""
    VECTOR = enum.auto()
    """Norms and biases."""

    @property
    def is_decayed(self) -> bool:
        return self in (ParameterKind.MATRIX, ParameterKind.OUTER)


@dataclass(frozen=True)
class TrainedParameter:
    """One parameter that an optimizer changes."""

    name: str
    """As the model names it, and the checkpoint."""
    parameter: torch.nn.Parameter
    kind: ParameterKind


def trained_parameters(model: torch.nn.Module) -> list[TrainedParameter]:
    """Every parameter of `model` that is trained, in the model's order, shared ones once."""
    kinds = dict(_special_kinds(model))
    return [
        TrainedParameter(name, p, kinds.get(id(p)) or _kind_by_shape(p))
        for name, p in model.named_parameters()
        if p.requires_grad
    ]


def by_mesh(tensors: Iterable[AnyTensor]) -> list[list[AnyTensor]]:
    """Tensors that one fused operation takes together: experts may be split in another way."""
    parts: dict[object, list[AnyTensor]] = {}
    for tensor in tensors:
        parts.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(parts.values())


def _special_kinds(model: torch.nn.Module) -> Iterator[tuple[int, ParameterKind]]:
    """Parameters whose shape does not tell their kind; embeddings last, to win when tied."""
    modules = list(model.modules())
    for module in modules:
        heads = getattr(module, "get_output_embeddings", None)
        outer = [heads()] if heads is not None else []
        outer += [module] if isinstance(module, _ConvNd) else []
        for owner in outer:
            weight = getattr(owner, "weight", None)
            if weight is not None:
                yield id(weight), ParameterKind.OUTER
    for module in modules:
        if isinstance(module, torch.nn.Embedding):
            yield id(module.weight), ParameterKind.EMBEDDING


def _kind_by_shape(parameter: torch.nn.Parameter) -> ParameterKind:
    return ParameterKind.MATRIX if parameter.ndim in (2, 3) else ParameterKind.VECTOR
