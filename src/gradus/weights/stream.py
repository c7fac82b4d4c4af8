"""What both ends of a broadcast agree on: `stream.json`, their words, how buckets travel."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from gradus.errors import CorruptStateError
from gradus.weights.buckets import BUCKETS_IN_FLIGHT, StreamedTensor
from gradus.weights.rendezvous import Rendezvous, WeightGroup, begin, finish

STREAM_NAME = "stream.json"
TIMEOUT_SECONDS = 600.0
"""Deadline of one wait."""


class WeightStream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`stream.json`: what the sender will broadcast, in this order."""

    version: int
    num_receivers: int
    rendezvous: str
    """Absolute path of the file through which sender and workers find each other."""
    bucket_bytes: int
    tensors: list[StreamedTensor]


def is_stream(directory: Path) -> bool:
    return (directory / STREAM_NAME).is_file()


def read_stream(directory: Path) -> WeightStream:
    """What the version in `directory` consists of; CorruptStateError when it cannot be read."""
    path = directory / STREAM_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=WeightStream)
    except (OSError, ValueError) as error:
        raise CorruptStateError(f"{path}: {error}") from error


def send_buckets(rendezvous: Rendezvous, group: WeightGroup, buckets: Sequence[Tensor]) -> None:
    """Broadcast buckets in their order, a few at once; GroupError when one cannot be sent."""
    deque(_passed(rendezvous, group, buckets), maxlen=0)


def receive_buckets(
    rendezvous: Rendezvous, group: WeightGroup, sizes: Sequence[int], device: torch.device
) -> Iterator[Tensor]:
    """The buckets of those sizes in their order; a few are asked for before they are needed."""
    empty = (torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
    return _passed(rendezvous, group, empty)


def _passed(
    rendezvous: Rendezvous, group: WeightGroup, buckets: Iterable[Tensor]
) -> Iterator[Tensor]:
    """Each bucket once it went through the group from rank 0 to all."""
    under_way: deque[tuple[Tensor, Any]] = deque()
    for bucket in buckets:
        under_way.append((bucket, begin(group, bucket)))
        if len(under_way) == BUCKETS_IN_FLIGHT:
            yield _arrived(rendezvous, under_way)
    while under_way:
        yield _arrived(rendezvous, under_way)


def _arrived(rendezvous: Rendezvous, under_way: deque[tuple[Tensor, Any]]) -> Tensor:
    bucket, transfer = under_way[0]
    finish(rendezvous, transfer)
    under_way.popleft()
    return bucket


def leave(group: WeightGroup) -> WeightGroup:
    """A broken group, with what it had under way ended where the backend can.

    The caller keeps it: gloo cannot, and its destructor waits for what is under way.
    """
    with contextlib.suppress(RuntimeError):
        group.abort()
    return group


def group_path(rendezvous: Path) -> Path:
    return rendezvous.with_name(f"{rendezvous.name}-group")


def ready_key(version: int) -> str:
    return f"ready/{version}"


def go_key(version: int) -> str:
    return f"go/{version}"


def files_key(version: int) -> str:
    return f"files/{version}"


def done_key(version: int) -> str:
    return f"done/{version}"
