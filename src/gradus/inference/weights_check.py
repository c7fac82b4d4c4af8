"""Whether published weights are whole, ours, and fit the model that is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import safe_open

from gradus.errors import CorruptStateError
from gradus.weights.broadcast import is_stream, read_stream
from gradus.weights.published import verify_version

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class WeightsCheck:
    """Verifies a version's digests and that its tensors are those of the initial model."""

    expected: Shapes | None
    """Name and shape of every tensor; None when the initial model has no safetensors on disk."""
    is_tied: bool
    """Input and output embeddings are one tensor, so `lm_head.weight` may be there or not."""

    @classmethod
    def of(cls, initial: Path | None) -> WeightsCheck:
        """The check for versions of the model in `initial`."""
        if initial is None:
            return cls(expected=None, is_tied=False)
        config = json.loads((initial / "config.json").read_text())
        is_tied = bool(config.get("tie_word_embeddings", False))
        return cls(expected=tensor_shapes(initial), is_tied=is_tied)

    def __call__(self, directory: Path, digest: str) -> None:
        """CorruptStateError unless `directory` can be served."""
        verify_version(directory, digest)
        if self.expected is not None:
            check_shapes(directory, self.expected, is_tied=self.is_tied)
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


def check_shapes(directory: Path, expected: Shapes, *, is_tied: bool) -> None:
    """CorruptStateError unless `directory` holds exactly the `expected` tensors."""
    found = tensor_shapes(directory)
    if not found:
        raise CorruptStateError(f"{directory} holds no tensor")
    optional = {"lm_head.weight"} if is_tied else set()
    odd = sorted((found.keys() ^ expected.keys()) - optional)
    if odd:
        raise CorruptStateError(
            f"{directory}: tensors {odd[:4]} ({len(odd)} in all) are missing or unexpected"
        )
    for name in found.keys() & expected.keys():
        if found[name] != expected[name]:
            raise CorruptStateError(
                f"{directory}: {name} has shape {found[name]}, the model needs {expected[name]}"
            )


def check_finite(directory: Path) -> None:
    """CorruptStateError when a tensor holds NaN or infinity; a stream's sender saw to that."""
    for name, tensor in iterate_tensors(directory):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CorruptStateError(f"{directory}: {name} holds a value that is not finite")
