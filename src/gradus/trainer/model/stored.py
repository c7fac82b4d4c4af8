"""The tensors of a model's safetensors files, read into a model that exists in outline only.

transformers' own tables say which stored tensors make up each tensor of a model: names differ, and
experts are stored one by one but computed as one tensor. The files are mapped into memory, so all
processes of a machine share what is read, and each copies only the rows that it owns.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from gradus.errors import ConfigError, CorruptStateError
from gradus.log import get_logger
from gradus.trainer.checkpoint.shards import Box, box_of
from gradus.trainer.images.tower import tower_parameters

logger = get_logger(__name__)

_NUMBER = re.compile(r"\.(\d+)\.")
_FORMER_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.masked_bias$")
"""Old files hold buffers that models now compute."""

_WEIGHT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""As safetensors calls them."""

Slices = Mapping[str, Any]
"""Stored tensors by name, as safetensors' slices: they have a shape, and indexing reads."""


@dataclass(frozen=True)
class _Part:
    """Stored tensors that become one tensor of the model, or several."""

    target: str
    """The first that they become."""
    stored: tuple[tuple[str, str], ...]
    """Name of each, and the pattern of the table that it fits."""
    convert: WeightConverter | None
    """What fuses or splits them; None where only the name differs."""

    def values(self, read: Callable[[str], Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """The model's tensors by name, from what `read` says of each stored one."""
        if self.convert is None:
            return {self.target: read(self.stored[0][0])}
        convert: Any = copy.deepcopy(self.convert)
        for name, pattern in self.stored:
            convert.add_tensor(self.target, name, pattern, read(name))
        found = convert.convert(self.target, model=model, config=model.config)
        return {name: it[0] if isinstance(it, list) else it for name, it in found.items()}

    def of_experts(self, first: int, count: int) -> _Part | None:
        """Only what becomes these rows, where each stored tensor is one row; else None."""
        if self.convert is None:
            return None
        stack, *rest = self.convert.operations
        is_rows = isinstance(stack, MergeModulelist) and stack.dim == 0
        if not is_rows or not all(isinstance(it, Concatenate) and it.dim > 0 for it in rest):
            return None
        by_pattern: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for name, pattern in self.stored:
            by_pattern[pattern].append((name, pattern))
        rows = [it for names in by_pattern.values() for it in names[first : first + count]]
        return _Part(self.target, tuple(rows), self.convert)


class StoredWeights:
    """What a model's files hold, matched with the model; nothing is read before `fill`."""

    def __init__(self, slices: Slices, parts: Sequence[_Part], name: str) -> None:
        self._slices = slices
        self._parts = parts
        self._name = name

    @classmethod
    def open(cls, model: PreTrainedModel, files: Sequence[str]) -> StoredWeights:
        """Matches names and shapes with those of `model`, which may be on the meta device.

        CorruptStateError when a tensor is missing or has another shape, or a file is damaged. Says
        which tensors the model has no place for.
        """
        name = str(model.config.name_or_path)
        slices: dict[str, Any] = {}
        try:
            for path in files:
                file: Any = safe_open(path, framework="pt")
                slices |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CorruptStateError(
                f"model {name!r}: its weights are damaged ({error}); fetch it again"
            ) from error
        conversions: list[Any] = get_model_conversion_mapping(model)
        parts, unused = _match(model, slices, conversions)
        # As `from_pretrained` does: what was used is undone when the model is saved.
        used: Any = [_turning_back(it) for it in conversions if it.was_used()]
        model._weight_conversions = used
        _refuse_quantised(name, model, slices, parts)
        _refuse_misfits(name, model, slices, parts, unused)
        _refuse_other_names(name, model)
        if unused:
            logger.warning(
                "model %r: its files hold %d tensors that the model has no place for, "
                "the first is %r",
                name,
                len(unused),
                unused[0],
            )
        return cls(slices, parts, name)

    def holds_untied(self, model: PreTrainedModel) -> bool:
        """Tell whether the files hold two different values for tensors that the config ties."""
        names = _names_by_tensor(model)
        stored = {part.target: part.stored[0][0] for part in self._parts if part.convert is None}
        for group in names.values():
            first, *others = [stored[name] for name in group if name in stored] or [""]
            for other in others:
                if not torch.equal(self._slices[first][...], self._slices[other][...]):
                    return True
        return False

    @torch.no_grad()
    def fill(self, model: PreTrainedModel, *, frozen_only: bool = False) -> None:
        """Copy what this rank owns into the model's tensors, in their own dtype.

        `frozen_only` leaves out what is trained, for weights that come from a checkpoint.
        """
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        for part in self._parts:
            if not (frozen_only and state[part.target].requires_grad):
                self._fill_part(part, state, model)

    def _fill_part(self, part: _Part, state: Mapping[str, Tensor], model: PreTrainedModel) -> None:
        box = box_of(state[part.target])
        if part.convert is None:
            _copy(state[part.target], partial(self._read, part.stored[0][0], box))
            return
        rows = part.of_experts(box.offset[0], box.size[0])
        if rows is not None:
            values = rows.values(self._read, model) if box.size[0] else {}
            for name, own in values.items():
                _copy(state[name], partial(own.__getitem__, ...))
            return
        for name, whole in part.values(self._read, model).items():
            _copy(state[name], partial(whole.__getitem__, _slices(box_of(state[name]))))

    def _read(self, name: str, box: Box | None = None) -> Tensor:
        try:
            values: Tensor = self._slices[name][... if box is None else _slices(box)]
        except SafetensorError as error:
            raise CorruptStateError(
                f"model {self._name!r}: {name!r} cannot be read ({error}); fetch it again"
            ) from error
        return values


def _copy(target: Tensor, read: Callable[[], Tensor]) -> None:
    """Into this rank's part of a tensor, unless it has none."""
    local = getattr(target, "_local_tensor", target)
    if local.numel():
        local.copy_(read())


def _slices(box: Box) -> Any:
    if not box.size:
        return ...
    return tuple(slice(a, a + n) for a, n in zip(box.offset, box.size, strict=True))


def _match(
    model: PreTrainedModel, slices: Slices, conversions: Sequence[Any]
) -> tuple[list[_Part], list[str]]:
    """Which stored tensors become which of the model's, as transformers matches them; and the
    stored ones that become nothing."""
    state = model.state_dict()
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [it for it in conversions if isinstance(it, WeightConverter)]
    by_pattern = {pattern: it for it in converters for pattern in it.source_patterns}
    prefix = model.base_model_prefix
    stored: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    used: dict[str, WeightConverter | None] = {}
    unused = []
    for name in sorted(slices, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            unused.append(name)
            continue
        stored[target].append((name, pattern or name))
        used.setdefault(target, None if pattern is None else by_pattern[pattern])
    parts = [_Part(target, tuple(names), used[target]) for target, names in stored.items()]
    ignored = [*_FORMER_BUFFERS, *(model._keys_to_ignore_on_load_unexpected or ())]
    unused = [name for name in unused if not any(re.search(it, name) for it in ignored)]
    return parts, unused


def _refuse_quantised(
    name: str, model: PreTrainedModel, slices: Slices, parts: Sequence[_Part]
) -> None:
    """Files whose config.json does not say that their numbers need factors to mean anything."""
    state = model.state_dict(keep_vars=True)
    for part in parts:
        if part.target not in state or not state[part.target].is_floating_point():
            continue
        for key, _ in part.stored:
            if (dtype := slices[key].get_dtype()) not in _WEIGHT_DTYPES:
                raise ConfigError(
                    f"model {name!r}: its files hold {key!r} as {dtype}, which is no weight by "
                    "itself; save the model dequantised, in bfloat16"
                )


def _refuse_misfits(
    name: str,
    model: PreTrainedModel,
    slices: Slices,
    parts: Sequence[_Part],
    unused: Sequence[str] = (),
) -> None:
    """A dry run on the meta device shows shapes, and every tensor that would stay empty."""
    found: dict[str, Tensor] = {}
    for part in parts:
        try:
            found |= part.values(
                lambda it: torch.empty(slices[it].get_shape(), device="meta"), model
            )
        except (RuntimeError, ValueError, IndexError) as error:
            raise CorruptStateError(
                f"model {name!r}: the stored tensors of {part.target!r} do not fit together "
                f"({error}); fetch it again"
            ) from error
    state = model.state_dict(keep_vars=True)
    for target, values in found.items():
        if target in state and values.shape != state[target].shape:
            raise CorruptStateError(
                f"model {name!r}: {target!r} has shape {list(values.shape)} in its files and "
                f"{list(state[target].shape)} by its config.json; fetch it again"
            )
    missing = sorted(set(_missing(model, found)))
    tower = {id(parameter) for parameter in tower_parameters(model)}
    if tower and tower <= {id(state[it]) for it in missing}:
        raise CorruptStateError(
            f"model {name!r} reads images, and its files hold none of its tower for images: they "
            "are a copy of the part that reads text; fetch all of it again, or train that part by "
            "its own config.json"
        )
    if missing:
        advice = "fetch it again"
        if unused:
            advice = (
                f"its files hold {len(unused)} that it has no place for, the first is "
                f"{unused[0]!r}: those of another variant; take the config.json that belongs to "
                "them, or fetch it again"
            )
        raise CorruptStateError(
            f"model {name!r} lacks {len(missing)} tensors, the first is {missing[0]!r}, "
            f"which would start at random; {advice}"
        )


def _refuse_other_names(name: str, model: PreTrainedModel) -> None:
    """The names that weights are published under must mean the same tensors when they are read."""
    state = {key: tensor.to("meta") for key, tensor in model.state_dict().items()}
    published: dict[str, _Shape] = {}
    saved = in_order(key for key in state if key not in model.all_tied_weights_keys)
    for _, names in groupby(saved, key=layer_of):
        stored = as_stored(model, {key: state[key] for key in names})
        published |= {key: _Shape(shape) for key, shape in stored.items()}
    parts, _ = _match(model, published, get_model_conversion_mapping(model))
    try:
        _refuse_misfits(name, model, published, parts)
    except CorruptStateError as error:
        raise ConfigError(
            f"model {name!r} ({type(model).__name__}) cannot be published: under the names that "
            f"its weights are saved by it would not be read again ({error}); use another model"
        ) from error


def in_order(names: Iterable[str]) -> list[str]:
    """Each layer's together."""
    return sorted(names, key=dot_natural_key)


def layer_of(name: str) -> str | None:
    """The number of the layer that a tensor belongs to; None outside of layers."""
    found = _NUMBER.search(name)
    return found and found[1]


def as_stored(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a layer under the names that its files have, taken apart where they are
    fused; views where possible. Layers are converted one by one, for which no file mixes them.
    """
    if not getattr(model, "_weight_conversions", None):
        return tensors
    with _Views():
        stored: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return stored


def _turning_back(conversion: Any) -> Any:
    """What transformers turns on reading only where the shape asks for it (`check_dims`), it never
    turns back on saving. Published models hold it turned (experts of Qwen3-VL as [E, in, out]), and
    vLLM reads no other form."""
    own: Any = copy.deepcopy(conversion)
    for it in getattr(own, "operations", ()):
        if getattr(it, "check_dims", False):
            it.check_dims = False
    return own


class _Views(TorchFunctionMode):
    """While open, `contiguous` copies nothing."""

    def __torch_function__(
        self, func: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Shape:
    """A tensor that would be saved."""

    tensor: Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)


def _missing(model: PreTrainedModel, found: Mapping[str, Tensor]) -> Iterator[str]:
    for names in _names_by_tensor(model).values():
        if not any(name in found for name in names):
            yield names[0]


def _names_by_tensor(model: PreTrainedModel) -> dict[int, list[str]]:
    """Every name of each tensor that is saved; tied tensors have several."""
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, tensor in model.state_dict(keep_vars=True).items():
        names[id(tensor)].append(name)
    return names
