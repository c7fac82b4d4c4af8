"""Tensors as a row of byte buckets of bounded size, laid out alike on both ends of a broadcast.

The tensors of a version follow one another at aligned places in one long range of bytes; a bucket
is the next `bucket_bytes` of it. A tensor that crosses the end of a bucket continues in the next.
Nothing here leaves the device of the buckets, but for two numbers for each tensor.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import msgspec
import torch
from torch import Tensor

from gradus.errors import CorruptStateError

BUCKET_BYTES = 64 << 20
"""Most bytes that one collective sends."""
BUCKETS_IN_FLIGHT = 3
"""Collectives that are under way at once, so that the link does not wait for the next call."""

_ALIGNED_BYTES = 16
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StreamedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a stream."""

    name: str
    """As in a Hugging Face checkpoint."""
    dtype: str
    shape: list[int]
    checksum: int
    """Sum of the raw words, see `checksum`."""

    @property
    def num_bytes(self) -> int:
        """Without the gap that follows it."""
        return math.prod(self.shape) * _dtype(self.dtype).itemsize


@dataclass(frozen=True)
class PackedTensors:
    """The copies of one version."""

    buckets: list[Tensor]
    """Raw bytes; all but the last are full."""
    bucket_bytes: int
    names: list[str]
    dtypes: list[torch.dtype]
    shapes: list[list[int]]
    checks: Tensor
    """[tensors, 2]: checksum, and whether every value is finite; on the device."""
    is_packed: torch.cuda.Event | None = None
    """On a GPU, when the copies are made."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of each; the values share the memory of the buckets."""
        shapes = zip(self.dtypes, self.shapes, strict=True)
        plans = [StreamedTensor("", _name(dtype), shape, 0) for dtype, shape in shapes]
        yield from zip(self.names, unpack(plans, self.buckets, self.bucket_bytes), strict=True)

    def entries(self) -> list[StreamedTensor]:
        """What a receiver must know; CorruptStateError names a tensor that is not finite.

        The only read from the device: it waits for the copies to be made, and for nothing that
        was queued after them.
        """
        entries = []
        told = zip(self.names, self.dtypes, self.shapes, self._read_checks(), strict=True)
        for name, dtype, shape, (total, is_finite) in told:
            if not is_finite:
                raise CorruptStateError(f"{name} holds a value that is not finite")
            entries.append(StreamedTensor(name, _name(dtype), shape, total))
        return entries

    def _read_checks(self) -> list[list[int]]:
        if self.is_packed is None:
            return cast("list[list[int]]", self.checks.tolist())
        self.is_packed.synchronize()
        side = torch.cuda.Stream(self.checks.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            return cast("list[list[int]]", self.checks.tolist())


class PackedSnapshot:
    """What is published, packed where it lies between two steps; nothing waits for the copies."""

    def __init__(self, device: torch.device, bucket_bytes: int) -> None:
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._packed: PackedTensors | None = None

    def place(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        """One tensor in the dtype of serving, where it lies; may be the trained weight itself."""
        return tensor.to(dtype)

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._packed = pack(tensors, self._device, self._bucket_bytes)
        if self._device.type == "cuda":
            is_packed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            is_packed.record()
            self._packed = replace(self._packed, is_packed=is_packed)

    def tensors(self) -> PackedTensors:
        """What was packed; asked for once, and then the receiver's own."""
        packed, self._packed = self._packed, None
        assert packed is not None, "asked for a version that was not taken"
        return packed


def pack(
    tensors: Iterable[tuple[str, Tensor]], device: torch.device, bucket_bytes: int
) -> PackedTensors:
    """Copy tensors into buckets on the device, one tensor after the other.

    >>> pack([("w", torch.zeros(5))], torch.device("cpu"), 16).buckets[1].shape
    torch.Size([4])
    """
    assert bucket_bytes % _ALIGNED_BYTES == 0
    buckets: list[Tensor] = []
    names, dtypes, shapes, checks = [], [], [], []
    end = 0
    for name, tensor in tensors:
        source = tensor.detach().to(device).contiguous()
        names.append(name)
        dtypes.append(source.dtype)
        shapes.append(list(source.shape))
        checks.append(torch.stack([_sum_of_words(source), _is_finite(source)]))
        raw, begin = _bytes(source), _aligned(end)
        end = begin + raw.numel()
        while len(buckets) * bucket_bytes < end:
            buckets.append(torch.empty(bucket_bytes, dtype=torch.uint8, device=device))
        for number, here, there in _places(begin, end, bucket_bytes):
            buckets[number][here].copy_(raw[there])
    if buckets:
        buckets[-1] = buckets[-1][: end - (len(buckets) - 1) * bucket_bytes]
    told = torch.stack(checks) if checks else torch.zeros(0, 2, dtype=torch.int64, device=device)
    return PackedTensors(buckets, bucket_bytes, names, dtypes, shapes, told)


def unpack(
    entries: Sequence[StreamedTensor], buckets: Iterable[Tensor], bucket_bytes: int
) -> Iterator[Tensor]:
    """The tensors of `entries` in order; takes a bucket only when it is needed.

    A tensor that lies in one bucket shares its memory, so a bucket may not be filled again.
    """
    incoming = enumerate(buckets)
    held: deque[tuple[int, Tensor]] = deque()
    end = 0
    for entry in entries:
        begin = _aligned(end)
        end = begin + entry.num_bytes
        parts = []
        for number, here, _ in _places(begin, end, bucket_bytes):
            while not held or held[-1][0] < number:
                held.append(next(incoming))
            while held[0][0] < begin // bucket_bytes:
                held.popleft()
            parts.append(held[number - held[0][0]][1][here])
        yield _joined(parts, entry)


def bucket_sizes(entries: Sequence[StreamedTensor], bucket_bytes: int) -> list[int]:
    """The bytes of each bucket of a stream."""
    end = 0
    for entry in entries:
        end = _aligned(end) + entry.num_bytes
    full, rest = divmod(end, bucket_bytes)
    return [bucket_bytes] * full + [rest] * (rest > 0)


def checksum(tensor: Tensor) -> int:
    """Sum of the raw words of a contiguous tensor, modulo 2^64; the same on every device."""
    return int(_sum_of_words(tensor))


def _sum_of_words(tensor: Tensor) -> Tensor:
    words = tensor.reshape(-1).view(_WORDS[tensor.element_size()])
    return words.sum(dtype=torch.int64)


def _is_finite(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return torch.ones((), dtype=torch.int64, device=tensor.device)
    return torch.isfinite(tensor).all().to(torch.int64)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _aligned(end: int) -> int:
    """Where the next tensor begins; views of any dtype need an aligned place."""
    return -(-end // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _places(begin: int, end: int, bucket_bytes: int) -> Iterator[tuple[int, slice, slice]]:
    """Bucket, place in it, and place in the tensor, of each part of a range of bytes."""
    at = begin
    while at < end:
        number, here = divmod(at, bucket_bytes)
        stop = min(end, (number + 1) * bucket_bytes)
        yield number, slice(here, here + stop - at), slice(at - begin, stop - begin)
        at = stop


def _joined(parts: Sequence[Tensor], entry: StreamedTensor) -> Tensor:
    dtype = _dtype(entry.dtype)
    if not parts:
        return torch.empty(entry.shape, dtype=dtype)
    raw = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return raw.view(dtype).reshape(entry.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CorruptStateError(f"a stream holds tensors of an unknown dtype {name!r}")
    return found
