"""Whether published weights or adapters are whole, ours, and fit the model that is served."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import safe_open

from gradus.errors import CorruptStateError
from gradus.run.model_files import model_digest
from gradus.weights.published import BASE_FILE, verify_version
from gradus.weights.stream import is_stream, read_stream

Shapes = dict[str, tuple[int, ...]]

ADAPTER_CONFIG = "adapter_config.json"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_OPTIONAL = re.compile(r"^lm_head\.weight$|(?:^|\.)mtp\.|\.inv_freq$|\.attn\.(?:masked_)?bias$")
"""Tensors that only one side may hold: of tied embeddings, of prediction heads, old buffers."""
_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True)
class WeightsCheck:
    """Verifies a version's digests and that its tensors are those of the initial model."""

    expected: Shapes | None
    """Name and shape of every tensor; None when the initial model has no safetensors on disk."""
    num_layers: int | None = None
    """Decoder layers of the model: its files may hold more, which predict further tokens."""

    @classmethod
    def of(cls, initial: Path | None) -> WeightsCheck:
        shapes = None if initial is None else tensor_shapes(initial) or None
        if initial is None or shapes is None:
            return cls(expected=None)
        file = initial / "config.json"
        config = json.loads(file.read_text()) if file.is_file() else {}
        text = config.get("text_config") or config
        return cls(shapes, text.get("num_hidden_layers"))

    def __call__(self, directory: Path, digest: str) -> None:
        """CorruptStateError unless `directory` can be served."""
        verify_version(directory, digest)
        if self.expected is not None:
            check_shapes(directory, self.expected, self.num_layers)
        check_finite(directory)


def find_initial_weights(model: str) -> Path | None:
    """The directory of the weights that the server started with, if they are on disk."""
    if Path(model).is_dir():
        return Path(model).resolve()
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError):
        return None


def iterate_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of every safetensors file in `directory`, with its Hugging Face name."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)


def tensor_shapes(directory: Path) -> Shapes:
    """Shape of every tensor in `directory`, from the headers only."""
    if is_stream(directory):
        return {entry.name: tuple(entry.shape) for entry in read_stream(directory).tensors}
    shapes: Shapes = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in shapes:
                    raise CorruptStateError(f"{directory}: tensor {name!r} is there twice")
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


def check_shapes(directory: Path, expected: Shapes, num_layers: int | None = None) -> None:
    """CorruptStateError unless `directory` holds the `expected` tensors.

    The files of the model may also hold buffers of earlier versions and layers beyond those of the
    config, both ends of tied embeddings or one, and names without the prefix of the model.
    """
    found = _bare(tensor_shapes(directory))
    if not found:
        raise CorruptStateError(f"{directory} holds no tensor")
    expected = _bare(expected)
    odd = sorted(it for it in found.keys() ^ expected.keys() if not _may_lack(it, num_layers))
    if odd:
        raise CorruptStateError(
            f"{directory}: tensors {odd[:4]} ({len(odd)} in all) are missing or unexpected"
        )
    for name in found.keys() & expected.keys():
        if found[name] != expected[name]:
            raise CorruptStateError(
                f"{directory}: {name} has shape {found[name]}, the model needs {expected[name]}"
            )


def _bare(shapes: Shapes) -> Shapes:
    """The same without the first part of the names, where all but the head share one."""
    first = {name.partition(".")[0] for name in shapes} - {"lm_head"}
    if len(first) != 1:
        return shapes
    return {name.removeprefix(f"{next(iter(first))}."): shape for name, shape in shapes.items()}


def _may_lack(name: str, num_layers: int | None) -> bool:
    layer = _LAYER.search(name)
    is_beyond = layer is not None and num_layers is not None and int(layer[1]) >= num_layers
    return is_beyond or _OPTIONAL.search(name) is not None


def check_finite(directory: Path) -> None:
    """CorruptStateError when a tensor holds NaN or infinity; a stream's sender saw to that."""
    for name, tensor in iterate_tensors(directory):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CorruptStateError(f"{directory}: {name} holds a value that is not finite")


def build_check(initial: Path | None, lora_rank: int | None) -> Callable[[Path, str], None]:
    """The check for versions of the model in `initial`: adapters of a rank, or whole weights."""
    if lora_rank is None:
        return WeightsCheck.of(initial)
    if initial is None:
        return AdapterCheck(base=None, rank=lora_rank)
    return AdapterCheck(base=tensor_shapes(initial) or None, rank=lora_rank, base_folder=initial)


@dataclass(frozen=True)
class AdapterCheck:
    """Verifies a version's digests and that its factors fit the linear layers of the base."""

    base: Shapes | None
    """Name and shape of the base model's tensors; None when it has no safetensors on disk."""
    rank: int
    """The rank that every factor must have."""
    base_folder: Path | None = None
    """Where the base model lies, to compare its digest. None means not to compare."""

    def __call__(self, directory: Path, digest: str) -> None:
        """CorruptStateError unless `directory` can be served."""
        verify_version(directory, digest)
        self._check_config(directory)
        self._check_base(directory)
        factors = _factors(directory)
        for layer, shapes in factors.items():
            self._check_layer(directory, layer, shapes)
        check_finite(directory)

    def _check_config(self, directory: Path) -> None:
        path = directory / ADAPTER_CONFIG
        try:
            rank = json.loads(path.read_bytes())["r"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptStateError(f"{path} is not an adapter config: {error!r}") from error
        if rank != self.rank:
            raise CorruptStateError(f"{path}: rank {rank}, but the engine serves {self.rank}")

    def _check_base(self, directory: Path) -> None:
        path = directory / BASE_FILE
        try:
            trained_beside = json.loads(path.read_bytes())["sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptStateError(f"{path} names no base model: {error!r}") from error
        if self._base_sha256 not in (None, trained_beside):
            raise CorruptStateError(
                f"{directory}: the adapter was trained beside another model than the one in "
                f"{self.base_folder}; put that model back as the trainer loaded it"
            )

    @cached_property
    def _base_sha256(self) -> str | None:
        """Read once, at the first version: all files of the base."""
        return None if self.base_folder is None else model_digest(self.base_folder)

    def _check_layer(self, directory: Path, layer: str, shapes: Shapes) -> None:
        if shapes.keys() != {"A", "B"}:
            raise CorruptStateError(f"{directory}: {layer} has only the factor {[*shapes]}")
        found = (shapes["B"], shapes["A"])
        if self.base is None:
            return
        weight = self.base.get(f"{layer}.weight")
        if weight is None:
            raise CorruptStateError(f"{directory}: the base model has no layer {layer!r}")
        expected = ((weight[0], self.rank), (self.rank, weight[-1]))
        if found != expected:
            raise CorruptStateError(
                f"{directory}: the factors of {layer} have shapes {found}, {expected} are needed"
            )


def _factors(directory: Path) -> dict[str, Shapes]:
    """Layer → shapes of its factors `A` and `B`."""
    factors: dict[str, Shapes] = {}
    for name, shape in tensor_shapes(directory).items():
        match = _FACTOR.fullmatch(name)
        if match is None:
            raise CorruptStateError(f"{directory}: {name!r} is not a factor of an adapter")
        factors.setdefault(match[1], {})[match[2]] = shape
    if not factors:
        raise CorruptStateError(f"{directory} holds no tensor")
    return factors
