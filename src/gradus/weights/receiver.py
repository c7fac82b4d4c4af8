"""The engine's end of a broadcast: one worker that receives versions, or reads them from files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from gradus.errors import CorruptStateError
from gradus.log import get_logger
from gradus.weights.buckets import StreamedTensor, bucket_sizes, checksum, unpack
from gradus.weights.rendezvous import (
    Backend,
    GroupError,
    GroupPlace,
    Member,
    Rendezvous,
    WeightGroup,
    form_group,
)
from gradus.weights.stream import (
    TIMEOUT_SECONDS,
    WeightStream,
    done_key,
    files_key,
    go_key,
    group_path,
    leave,
    read_stream,
    ready_key,
    receive_buckets,
)

logger = get_logger(__name__)


class StreamReceiver:
    """A worker's end: owns its place in the group."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        *,
        backend: Backend = "gloo",
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """`rank` counts the workers from 0; `backend` is what the launch told it."""
        self._rank = rank
        self._device = device
        self._backend: Backend = backend
        self._seconds = timeout_seconds
        self._group: WeightGroup | None = None
        self._left: list[WeightGroup] = []
        self._rendezvous: Rendezvous | None = None
        self._last_version = -1

    def receive(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the version in `directory`, each checked, on the device.

        CorruptStateError for a version that was sent before, and for a tensor that is not the one
        announced; ProcessError names the process that ended.
        """
        stream = read_stream(directory)
        if stream.version <= self._last_version:
            raise CorruptStateError(
                f"version {stream.version} was sent once and is not kept; versions that can be "
                'loaded again need trainer.weight_transfer = "filesystem"'
            )
        self._last_version = stream.version
        rendezvous = self._rendezvous = self._rendezvous or self._join(stream)
        rendezvous.post(f"{ready_key(stream.version)}/{self._rank}")
        num_received = 0
        try:
            arriving = zip(stream.tensors, self._over_group(rendezvous, stream), strict=True)
            for entry, tensor in arriving:
                yield entry.name, self._checked(stream.version, entry, tensor)
                num_received += 1
        except GroupError as error:
            logger.warning("version %d comes through files: %s", stream.version, error)
            rendezvous.give_up_group(str(error))
            if self._group is not None:
                self._left.append(leave(self._group))
                self._group = None
            yield from self._from_files(rendezvous, stream, num_received)

    def _join(self, stream: WeightStream) -> Rendezvous:
        rendezvous = Rendezvous(
            Path(stream.rendezvous), stream.num_receivers, timeout_seconds=self._seconds
        )
        rendezvous.register(str(self._rank), Member.current(self._device, self._backend))
        return rendezvous

    def _over_group(self, rendezvous: Rendezvous, stream: WeightStream) -> Iterator[Tensor]:
        go = go_key(stream.version)
        rendezvous.wait_until(
            lambda: rendezvous.read(go) is not None,
            f"the sending of version {stream.version}, for which the trainer and every inference "
            "worker must be ready,",
        )
        device = self._device if self._backend == "nccl" else torch.device("cpu")
        if self._group is None:
            path = group_path(Path(stream.rendezvous))
            place = GroupPlace(path, self._rank + 1, stream.num_receivers + 1)
            self._group = form_group(rendezvous, place, self._backend, device)
        sizes = bucket_sizes(stream.tensors, stream.bucket_bytes)
        buckets = receive_buckets(rendezvous, self._group, sizes, device)
        yield from unpack(stream.tensors, buckets, stream.bucket_bytes)

    def _from_files(
        self, rendezvous: Rendezvous, stream: WeightStream, first: int
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors from the number `first` on, from the folder that the sender names."""
        key = files_key(stream.version)
        what = f"the writing of version {stream.version} into files"
        rendezvous.wait_until(lambda: rendezvous.read(key) is not None, what, needs_group=False)
        folder = Path(rendezvous.read(key) or "")
        places: dict[str, Path] = {}
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                places |= dict.fromkeys(file.keys(), path)
        for entry in stream.tensors[first:]:
            with safe_open(places[entry.name], framework="pt") as file:
                tensor = file.get_tensor(entry.name)
            yield entry.name, self._checked(stream.version, entry, tensor)
        rendezvous.post(f"{done_key(stream.version)}/{self._rank}")

    def _checked(self, version: int, entry: StreamedTensor, tensor: Tensor) -> Tensor:
        if checksum(tensor) != entry.checksum:
            text = f"{entry.name} of version {version} arrived with another checksum"
            if self._rendezvous is not None:
                self._rendezvous.end(f"inference worker {self._rank}: {text}")
            raise CorruptStateError(text)
        return tensor.to(self._device)
