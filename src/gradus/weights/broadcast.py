"""Versions from memory to memory: the trainer's first rank broadcasts to every inference worker.

The collective runs over nccl when trainer and workers all have GPUs, else over gloo through main
memory; the sender decides, once it knows the workers' devices. A version is a directory as with
files, but in the place of tensors it holds `stream.json`: what will be sent, in which order, with a
checksum of each tensor. It has a manifest and a digest like any other, so publishing, refusing and
applying need no second way.

    trainer, rank 0     publish v: copy the tensors, write stream.json, go on training
    orchestrator        POST /gradus/apply with the directory and the digest
    inference workers   say in the store that they are ready for v, then receive, check, load
    sender thread       waits for all of them, then broadcasts v and forgets the copy

A version can be received once. The group is rank 0 = sender, then the workers by their rank. All
run on one machine, so the sender sees when a worker ends, and lets the others go.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroupGloo

from gradus.errors import CorruptStateError, DeadlineError, ProcessError
from gradus.files import DurableFiles
from gradus.log import get_logger
from gradus.processes.table import is_alive, read_process
from gradus.run.paths import RunDirectory
from gradus.sealed import Entries, describe
from gradus.weights.filesystem import FilesystemWeights
from gradus.weights.published import Published

STREAM_NAME = "stream.json"
TIMEOUT_SECONDS = 600.0
"""Deadline of one broadcast, and of the meeting of sender and workers."""

_LOOK_SECONDS = 0.01
_LIVENESS_SECONDS = 1.0
_GROUP_KEY = "group"
_FAILED_KEY = "failed"
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

logger = get_logger(__name__)


class StreamedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a stream."""

    name: str
    """As in a Hugging Face checkpoint."""
    dtype: str
    shape: list[int]
    checksum: int
    """Sum of the raw words, see `checksum`."""


class WeightStream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`stream.json`: what the sender will broadcast, in this order."""

    version: int
    num_receivers: int
    meeting: str
    """Absolute path of the file through which sender and workers find each other."""
    tensors: list[StreamedTensor]


class BroadcastWeights:
    """The trainer's end: owns copies of the versions that were not fetched yet, and one thread.

    >>> weights = BroadcastWeights(run_dir, term=1, extra_files={}, num_receivers=1)
    ... # doctest: +SKIP
    >>> weights.publish_version(1, [("w", torch.zeros(2))])  # doctest: +SKIP
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        *,
        term: int,
        extra_files: Mapping[str, bytes],
        num_receivers: int,
        device: torch.device,
        keep_published: int = 2,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """`device` is the trainer's, wherever the published tensors lie. A publish waits while
        `keep_published` copies are unsent."""
        self._num_receivers = num_receivers
        self._device = device
        self._keep = keep_published
        self._seconds = timeout_seconds
        self._copies: dict[int, list[Tensor]] = {}
        self._written: list[Tensor] = []
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._is_closed = False
        self._files = FilesystemWeights(
            run_dir,
            term=term,
            extra_files=extra_files,
            keep_published=keep_published,
            write=self._write,
        )
        self._meeting = (run_dir.weights / f".meeting-{term}").absolute()
        self._meeting.unlink(missing_ok=True)
        self._version = 0
        self._thread: threading.Thread | None = None

    def wait_for_room(self) -> None:
        """Return when a copy can be kept; errors as `publish_version`."""
        self._wait_until(lambda: len(self._copies) < self._keep, "fetch older versions")

    def publish_version(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Published:
        """Copy `version` and announce it; FencedError when a newer owner took the run.

        DeadlineError when inference fetches nothing for too long; ProcessError when a broadcast
        failed.
        """
        self.wait_for_room()
        self._version = version
        try:
            published = self._files.publish_version(version, tensors)
        finally:
            copies, self._written = self._written, []
        with self._changed:
            self._copies[version] = copies
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._send_all, name="gradus-weights", daemon=True
            )
            # A thread that is inside torch while Python takes itself apart aborts the process.
            atexit.register(self.close)
            self._thread.start()
        return published

    def drain(self) -> None:
        """Return when inference fetched every version; errors as `publish_version`."""
        self._wait_until(lambda: not self._copies, "fetch the last versions")

    def close(self) -> None:
        """Forget what was not fetched; directories of published versions stay."""
        with self._changed:
            self._is_closed = True
            self._copies.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            atexit.unregister(self.close)
        self._meeting.unlink(missing_ok=True)

    def _write(
        self, directory: Path, tensors: Iterable[tuple[str, Tensor]], files: DurableFiles
    ) -> Entries:
        entries: list[StreamedTensor] = []
        for name, tensor in tensors:
            copy = tensor.detach().clone(memory_format=torch.contiguous_format)
            if copy.is_floating_point() and not bool(torch.isfinite(copy).all()):
                raise CorruptStateError(f"{name} holds a value that is not finite")
            dtype = str(copy.dtype).removeprefix("torch.")
            entries.append(StreamedTensor(name, dtype, list(copy.shape), checksum(copy)))
            self._written.append(copy)
        stream = WeightStream(self._version, self._num_receivers, str(self._meeting), entries)
        content = msgspec.json.encode(stream)
        files.stage(directory / STREAM_NAME, content)
        return {STREAM_NAME: describe(content)}

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            is_met = self._changed.wait_for(
                lambda: self._failure is not None or condition(), timeout=self._seconds
            )
            if self._failure is not None:
                raise ProcessError(
                    f"the broadcast of weights failed: {self._failure}"
                ) from self._failure
        if not is_met:
            raise DeadlineError(
                f"inference did not {what} in {self._seconds:g} s; see logs/inference.log"
            )

    def _send_all(self) -> None:
        """The sender thread: versions in their order, each when every worker asks for it."""
        store: Any = None
        group: Any = None
        try:
            device = self._device
            if device.type == "cuda":
                torch.cuda.set_device(device)
            store = FileStore(str(self._meeting), self._num_receivers + 1)
            store.set_timeout(timedelta(seconds=self._seconds))
            while (version := self._next_asked(store)) is not None:
                if group is None:
                    # Each worker says its device before it says that it is ready.
                    device = agree_on_device(store, self._device, self._num_receivers)
                    group = build_group(
                        store, 0, self._num_receivers + 1, device, seconds=self._seconds
                    )
                for copy in self._copies.get(version, []):
                    broadcast(group, copy.to(device))
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                self._forget(version)
        except BaseException as error:
            logger.exception("the broadcast of weights failed")
            # First of all: telling the workers may fail too, and the trainer must not wait for it.
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            # The group closes its connections, and so ends the waits of workers in a broadcast,
            # once nothing holds it.
            traceback.clear_frames(error.__traceback__)
            group = None
            if store is not None:
                store.set(_FAILED_KEY, "failed")

    def _next_asked(self, store: Any) -> int | None:
        """The oldest copy, once all workers are ready for it; None when closed.

        ProcessError when a worker ended during the wait.
        """
        looked_at = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or bool(self._copies))
                if self._is_closed:
                    return None
                # A version that inference never asked for is overtaken by a newer one.
                waiting = sorted(self._copies)
            for version in waiting:
                if store.check(_ready_keys(version, self._num_receivers)):
                    store.set(_go_key(version), "go")
                    return version
            if time.monotonic() - looked_at > _LIVENESS_SECONDS:
                refuse_dead_workers(store, self._num_receivers)
                looked_at = time.monotonic()
            time.sleep(_LOOK_SECONDS)

    def _forget(self, version: int) -> None:
        with self._changed:
            for sent in [v for v in self._copies if v <= version]:
                del self._copies[sent]
            self._changed.notify_all()


class StreamReceiver:
    """A worker's end: owns its place in the group.

    >>> for name, tensor in receiver.receive(directory):  # doctest: +SKIP
    ...     load(name, tensor)
    """

    def __init__(
        self, rank: int, device: torch.device, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        """`rank` counts the workers from 0."""
        self._rank = rank
        self._device = device
        self._seconds = timeout_seconds
        self._group: Any = None
        self._group_device = device
        self._store: Any = None
        self._last_version = -1

    def receive(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the version in `directory`, each checked, on the device.

        CorruptStateError for a version that was sent before, and for a tensor that is not the one
        announced.
        """
        stream = read_stream(directory)
        if stream.version <= self._last_version:
            raise CorruptStateError(
                f"version {stream.version} was sent once and is not kept; versions that can be "
                'loaded again need trainer.weight_transfer = "filesystem"'
            )
        self._last_version = stream.version
        group = self._join(stream)
        for entry in stream.tensors:
            dtype = getattr(torch, entry.dtype)
            tensor = torch.empty(entry.shape, dtype=dtype, device=self._group_device)
            broadcast(group, tensor)
            if checksum(tensor) != entry.checksum:
                raise CorruptStateError(
                    f"{entry.name} of version {stream.version} arrived with another checksum"
                )
            yield entry.name, tensor.to(self._device)

    def _join(self, stream: WeightStream) -> Any:
        if self._store is None:
            self._store = FileStore(stream.meeting, stream.num_receivers + 1)
            self._store.set_timeout(timedelta(seconds=self._seconds))
            own = read_process(os.getpid())
            self._store.set(
                _process_key(self._rank), f"{os.getpid()} {own.start_time if own else 0}"
            )
            self._store.set(_device_key(self._rank), self._device.type)
        self._store.set(_ready_key(stream.version, self._rank), "ready")
        self._wait_for_all(stream.version)
        if self._group is None:
            size = stream.num_receivers + 1
            # The sender's word; it knows the devices of all.
            if self._store.get(_GROUP_KEY).decode() != self._device.type:
                self._group_device = torch.device("cpu")
            self._group = build_group(
                self._store, self._rank + 1, size, self._group_device, seconds=self._seconds
            )
        return self._group

    def _wait_for_all(self, version: int) -> None:
        """Return when every worker is ready; a wait inside the group could not be ended."""
        deadline = time.monotonic() + self._seconds
        while not self._store.check([_go_key(version)]):
            if self._store.check([_FAILED_KEY]):
                raise ProcessError("the sender of weights gave up; see logs/trainer.log")
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"version {version} was not sent in {self._seconds:g} s, since the trainer or "
                    "another inference worker is not ready; see logs/trainer.log"
                )
            time.sleep(_LOOK_SECONDS)


def is_stream(directory: Path) -> bool:
    """Whether the version in `directory` is to be received rather than read."""
    return (directory / STREAM_NAME).is_file()


def read_stream(directory: Path) -> WeightStream:
    """What the version in `directory` consists of; CorruptStateError when it cannot be read."""
    path = directory / STREAM_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=WeightStream)
    except (OSError, ValueError) as error:
        raise CorruptStateError(f"{path}: {error}") from error


def checksum(tensor: Tensor) -> int:
    """Sum of the raw words of a contiguous tensor, modulo 2^64; the same on every device."""
    words = tensor.reshape(-1).view(_WORDS[tensor.element_size()])
    return int(words.sum(dtype=torch.int64))


def agree_on_device(store: Any, own: torch.device, num_receivers: int) -> torch.device:
    """The group's device, which the sender tells all workers: its GPU when every side has one."""
    theirs = [store.get(_device_key(rank)).decode() for rank in range(num_receivers)]
    device = own if group_device_type([own.type, *theirs]) == own.type else torch.device("cpu")
    store.set(_GROUP_KEY, device.type)
    return device


def refuse_dead_workers(store: Any, num_receivers: int) -> None:
    """ProcessError when a worker that joined the meeting has ended."""
    for rank in range(num_receivers):
        if not store.check([_process_key(rank)]):
            continue
        pid, start_time = map(int, store.get(_process_key(rank)).split())
        if not is_alive(pid, start_time):
            raise ProcessError(
                f"inference worker {rank} (pid {pid}) ended before it received the weights; see "
                "logs/inference.log"
            )


def group_device_type(device_types: Sequence[str]) -> str:
    """Where the tensors of a group lie: nccl needs a GPU on every side, gloo takes main memory."""
    return "cuda" if set(device_types) == {"cuda"} else "cpu"


def build_group(store: Any, rank: int, size: int, device: torch.device, *, seconds: float) -> Any:
    """A process group apart from torch's default one, which these processes do not share."""
    timeout = timedelta(seconds=seconds)
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(PrefixStore("weights", store), rank, size, nccl)
    options: Any = ProcessGroupGloo  # torch's stubs leave them out
    gloo = options._Options()
    gloo._timeout = timeout
    gloo._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(PrefixStore("weights", store), rank, size, gloo)


def broadcast(group: Any, tensor: Tensor) -> None:
    """Send a contiguous tensor from rank 0, or fill it, as plain bytes."""
    if math.prod(tensor.shape) > 0:
        group.broadcast(tensor.reshape(-1).view(torch.uint8), 0).wait()


def _device_key(rank: int) -> str:
    return f"device/{rank}"


def _process_key(rank: int) -> str:
    return f"process/{rank}"


def _ready_key(version: int, rank: int) -> str:
    return f"ready/{version}/{rank}"


def _go_key(version: int) -> str:
    return f"go/{version}"


def _ready_keys(version: int, num_receivers: int) -> list[str]:
    return [_ready_key(version, rank) for rank in range(num_receivers)]
