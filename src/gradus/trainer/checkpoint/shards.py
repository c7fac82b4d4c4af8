"""Tensors that are split over ranks, as one safetensors file per rank, for any number of readers.

A file holds boxes of tensors; its header says how large each whole tensor is and where the box lies
in it. Every rank writes what it owns without waiting for the others. A reader fills the boxes that
it needs from those that were written, however many ranks there were. No pickle is involved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from gradus.errors import ConfigError, CorruptStateError
from gradus.files import DurableFiles

_FILE_PATTERN = "rank_*.safetensors"
_HEADER_KEY = "boxes"


class Box(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a piece lies in its tensor; three lists with one number per dimension."""

    whole: list[int]
    offset: list[int]
    size: list[int]

    def overlap(self, other: Box) -> Box | None:
        first = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        ends = zip(self._end(), other._end(), strict=True)
        size = [min(a, b) - start for start, (a, b) in zip(first, ends, strict=True)]
        if any(n <= 0 for n in size):
            return None
        return Box(self.whole, first, size)

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """The slices that cut this box out of the piece that `outer` describes."""
        starts = [a - b for a, b in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(s, s + n) for s, n in zip(starts, self.size, strict=True))

    def _end(self) -> list[int]:
        return [a + n for a, n in zip(self.offset, self.size, strict=True)]


@dataclass(frozen=True)
class Piece:
    """One box of one tensor, copied to the CPU."""

    box: Box
    values: Tensor


def own_pieces(
    shared: Mapping[str, Tensor], own: Mapping[str, Tensor], *, is_first: bool
) -> dict[str, Piece]:
    """Copies of what this rank has to write.

    `shared` tensors are the same objects on all ranks: of a split one each rank writes its part, a
    copy on other ranks is written once, and a whole one by the first rank. `own` tensors exist on
    this rank alone, under names that no other rank uses.
    """
    pieces = {name: Piece(box_of(tensor), _copied(tensor)) for name, tensor in own.items()}
    for name, tensor in shared.items():
        box = box_of(tensor)
        writes = _is_first_copy(tensor) if isinstance(tensor, DTensor) else is_first
        if writes and 0 not in box.size:
            pieces[name] = Piece(box, _copied(tensor))
    return pieces


def box_of(tensor: Tensor) -> Box:
    """Which part of a tensor this rank holds; all of it unless it is split."""
    whole = list(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box(whole, [0] * len(whole), whole)
    if any(placement.is_partial() for placement in tensor.placements):
        raise ConfigError("a tensor that waits to be summed over ranks cannot be saved")
    size, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Box(whole, list(offset), list(size))


def write_shard(folder: Path, rank: int, pieces: Mapping[str, Piece], files: DurableFiles) -> str:
    """Write this rank's file durably, and name it; StorageError when the disk fails."""
    header = {name: piece.box for name, piece in pieces.items()}
    metadata = {_HEADER_KEY: msgspec.json.encode(header, order="sorted").decode()}
    tensors = {name: piece.values for name, piece in pieces.items()}

    def save(path: Path) -> None:
        try:
            save_file(tensors, path, metadata=metadata)
        except SafetensorError as error:
            raise OSError(None, str(error)) from error

    path = folder / f"rank_{rank:05d}.safetensors"
    files.write_by(path, save, num_bytes=num_bytes(pieces))
    return path.name


def num_bytes(pieces: Mapping[str, Piece]) -> int:
    return sum(piece.values.nbytes for piece in pieces.values())


@dataclass(frozen=True)
class _Stored:
    """A box in an open file."""

    box: Box
    file: Any
    path: Path


class ShardReader:
    """The tensors of one saved state, from however many files."""

    def __init__(self, stored: Mapping[str, Sequence[_Stored]], folder: Path) -> None:
        self._stored = stored
        self._folder = folder

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    @torch.no_grad()
    def fill(self, name: str, target: Tensor) -> None:
        """Read this rank's part of a tensor into `target`, in place.

        Refuses with ConfigError another shape or dtype, and with CorruptStateError a tensor of
        which a part is missing or was written twice.
        """
        wanted = box_of(target)
        local = target.to_local() if isinstance(target, DTensor) else target
        found = 0
        for stored in self._of(name, wanted):
            common = stored.box.overlap(wanted)
            if common is None:
                continue
            values = self._read(name, stored, common)
            if values.dtype != local.dtype:
                raise ConfigError(
                    f"{stored.path}: {name} is {values.dtype}, the run now wants {local.dtype}; "
                    "resume with the settings of the checkpoint"
                )
            local[common.inside(wanted)].copy_(values)
            found += values.numel()
        if found != local.numel():
            raise CorruptStateError(
                f"{self._folder}: {found} of {local.numel()} values of {name} were found"
            )

    def whole(self, name: str) -> Tensor:
        """A complete tensor, on the CPU."""
        box = self._of(name, None)[0].box
        kind = self._read(name, self._of(name, None)[0], box).dtype
        target = torch.empty(box.whole, dtype=kind)
        self.fill(name, target)
        return target

    def _of(self, name: str, wanted: Box | None) -> Sequence[_Stored]:
        if name not in self._stored:
            raise ConfigError(
                f"{self._folder} holds no {name!r}; resume with the model, the optimizer and the "
                "trained parameters of the checkpoint"
            )
        stored = self._stored[name]
        for piece in stored:
            if wanted is not None and piece.box.whole != wanted.whole:
                raise ConfigError(
                    f"{piece.path}: {name} has shape {piece.box.whole}, the model has "
                    f"{wanted.whole}; resume with the model of the checkpoint"
                )
        return stored

    def _read(self, name: str, stored: _Stored, box: Box) -> Tensor:
        if not box.size:
            values: Tensor = stored.file.get_tensor(name)
            return values
        part: Tensor = stored.file.get_slice(name)[box.inside(stored.box)]
        return part


@contextmanager
def open_shards(folder: Path) -> Iterator[ShardReader]:
    """All files of a saved state; CorruptStateError when gradus did not write one of them."""
    stored: dict[str, list[_Stored]] = {}
    with ExitStack() as stack:
        for path in sorted(folder.glob(_FILE_PATTERN)):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
                header = (file.metadata() or {}).get(_HEADER_KEY, "")
                boxes = msgspec.json.decode(header, type=dict[str, Box])
            except (SafetensorError, OSError, ValueError) as error:
                raise CorruptStateError(f"{path} is not part of a checkpoint: {error}") from error
            for name, box in boxes.items():
                _check_box(path, name, box, file.get_slice(name).get_shape())
                stored.setdefault(name, []).append(_Stored(box, file, path))
        if not stored:
            raise CorruptStateError(f"{folder} holds no {_FILE_PATTERN}")
        yield ShardReader(stored, folder)


def _check_box(path: Path, name: str, box: Box, shape: Sequence[int]) -> None:
    lengths = {len(box.whole), len(box.offset), len(box.size)}
    if len(lengths) > 1 or list(shape) != box.size or min(box.offset, default=0) < 0:
        raise CorruptStateError(f"{path}: the place of {name} is not that of its values")


def _copied(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().to("cpu", copy=True).contiguous()


def _is_first_copy(tensor: DTensor) -> bool:
    """Tell whether this rank is the first of those that hold the same part."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    pairs = zip(tensor.placements, coordinate, strict=True)
    return all(position == 0 for placement, position in pairs if placement.is_replicate())
