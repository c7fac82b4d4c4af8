"""The rendezvous of sender and receivers of weights: who is there, who is ready, what failed.

A file that all of them read and write (torch's FileStore). Whoever waits also watches the others:
when a process ends or fails, every wait ends at once with an error that names it.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeAlias

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

from gradus.errors import ConfigError, DeadlineError, ProcessError, first_line
from gradus.log import get_logger
from gradus.processes.table import is_alive, read_process

Backend: TypeAlias = Literal["gloo", "nccl"]

SENDER = "sender"
GROUP_SECONDS = 120.0
"""For forming a group, and for each bucket: less than the server's deadline for a change of
weights, so that files can help out within it."""

_SHORTEST_LOOK_SECONDS = 0.0002
_LONGEST_LOOK_SECONDS = 0.01
_LIVENESS_SECONDS = 1.0
_BROKEN = "broken"
_ENDED = "ended"

logger = get_logger(__name__)


class GroupError(ProcessError):
    """No group of processes can be formed, or it broke; the weights then go through files."""


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one end says of itself before anything is sent."""

    pid: int
    start_time: int
    host: str
    backend: Backend
    """What the launch decided for it."""
    device: str
    """Type of the device that its weights lie on."""
    gpu: str = ""
    """Of a GPU, the id that no other has."""
    has_nccl: bool = False
    """Whether its torch was built with nccl."""

    @classmethod
    def current(cls, device: torch.device, backend: Backend) -> Self:
        own = read_process(os.getpid())
        is_gpu = device.type == "cuda"
        return cls(
            pid=os.getpid(),
            start_time=own.start_time if own else 0,
            host=socket.gethostname(),
            backend=backend,
            device=device.type,
            gpu=str(torch.cuda.get_device_properties(device).uuid) if is_gpu else "",
            has_nccl=dist.is_nccl_available(),
        )


def group_obstacle(sender: Member, workers: Sequence[Member]) -> str | None:
    """Why these processes cannot form a group, in words; None when nothing speaks against it.

    ConfigError when the two ends were told different backends: no group and no file was meant.
    """
    for rank, worker in enumerate(workers):
        if worker.backend != sender.backend:
            raise ConfigError(
                f"the trainer was told to broadcast weights over {sender.backend} and inference "
                f"worker {rank} over {worker.backend}; give both the same "
                "trainer.broadcast_backend"
            )
    names = ["the trainer", *(f"inference worker {rank}" for rank in range(len(workers)))]
    used: dict[str, str] = {}
    for name, member in zip(names, [sender, *workers], strict=True):
        if member.host != sender.host:
            return f"{name} runs on {member.host} and the trainer on {sender.host}"
        if sender.backend != "nccl":
            continue
        if not member.has_nccl:
            return f"the torch of {name} was built without nccl"
        if member.device != "cuda":
            return f"{name} computes on {member.device}, and nccl needs a GPU"
        if member.gpu in used:
            return f"{used[member.gpu]} and {name} share a GPU, which nccl refuses"
        used[member.gpu] = name
    return None


class Rendezvous:
    """Owns one end's view of the file; every wait has a deadline and ends with the others."""

    def __init__(self, path: Path, num_receivers: int, *, timeout_seconds: float) -> None:
        self._store = FileStore(str(path), num_receivers + 1)
        self._store.set_timeout(timedelta(seconds=timeout_seconds))
        self._num_receivers = num_receivers
        self.seconds = timeout_seconds
        self._looked_at = 0.0

    def register(self, name: str, member: Member) -> None:
        """Post who this is: SENDER, or the rank of a worker."""
        self.post(f"member/{name}", msgspec.json.encode(member).decode())

    def workers(self) -> list[Member]:
        """All workers, once they are ready."""
        found = [self.member(str(rank)) for rank in range(self._num_receivers)]
        assert None not in found
        return [member for member in found if member is not None]

    def member(self, name: str) -> Member | None:
        """Who registered under that name; None while the name is free."""
        text = self.read(f"member/{name}")
        return None if text is None else msgspec.json.decode(text, type=Member)

    def post(self, key: str, value: str = "yes") -> None:
        self._store.set(key, value)

    def read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def have_all_posted(self, key: str) -> bool:
        keys = [f"{key}/{rank}" for rank in range(self._num_receivers)]
        return bool(self._store.check(keys))

    def give_up_group(self, reason: str) -> None:
        """Begin no collective from now on, and abandon those under way; the first reason stays."""
        if self.read(_BROKEN) is None:
            self.post(_BROKEN, reason)

    def end(self, reason: str) -> None:
        """Send nothing any more, neither by a group nor by files; the first reason stays."""
        if self.read(_ENDED) is None:
            self.post(_ENDED, reason)

    def wait_until(
        self,
        is_met: Callable[[], bool],
        what: str,
        *,
        needs_group: bool = True,
        seconds: float = math.inf,
    ) -> None:
        """Return once it is met; with `needs_group` GroupError as soon as the group is given up.

        ProcessError names a member that ended; DeadlineError says what did not happen.
        """
        seconds = min(seconds, self.seconds)
        deadline, pause = time.monotonic() + seconds, _SHORTEST_LOOK_SECONDS
        while not is_met():
            self.look(needs_group=needs_group)
            if time.monotonic() > deadline:
                raise DeadlineError(f"{what} did not happen in {seconds:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_LOOK_SECONDS)

    def look(self, *, needs_group: bool = True) -> None:
        """Raise what ends a wait; see `wait_until`. Asks the system once a second."""
        if (ended := self.read(_ENDED)) is not None:
            raise ProcessError(ended)
        if needs_group and (broken := self.read(_BROKEN)) is not None:
            raise GroupError(broken)
        if time.monotonic() - self._looked_at > _LIVENESS_SECONDS:
            self.refuse_dead()
            self._looked_at = time.monotonic()

    def refuse_dead(self) -> None:
        """ProcessError when a member of this host that joined the rendezvous has ended."""
        host = socket.gethostname()
        for name in (SENDER, *map(str, range(self._num_receivers))):
            member = self.member(name)
            if member is None or member.host != host:
                continue
            if is_alive(member.pid, member.start_time):
                continue
            is_sender = name == SENDER
            who = "the trainer" if is_sender else f"inference worker {name}"
            log = "trainer" if is_sender else "inference"
            raise ProcessError(
                f"{who} (pid {member.pid}) ended before the weights were transferred; see "
                f"logs/{log}.log"
            )


class WeightGroup(Protocol):
    """What is asked of a process group of torch."""

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        """A transfer from `root`, under way."""

    def abort(self) -> None:
        """Leave what is under way."""


@dataclass(frozen=True)
class GroupPlace:
    """Where one member stands in a group."""

    path: Path
    """The file through which the group finds together."""
    rank: int
    size: int


def form_group(
    rendezvous: Rendezvous, place: GroupPlace, backend: Backend, device: torch.device
) -> WeightGroup:
    """A group apart from torch's default one, after one byte went from rank 0 to all.

    GroupError says why it cannot be formed. It is formed on a thread that is left behind when
    another member fails meanwhile: a rendezvous cannot be ended from outside.
    """
    formed: Future[WeightGroup] = Future()

    def form() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            group = _build(place, backend, rendezvous.seconds)
            group.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), 0).wait()
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            formed.set_result(group)
        except BaseException as error:
            formed.set_exception(error)

    threading.Thread(target=form, name="gradus-group", daemon=True).start()
    try:
        what = f"a {backend} group of {place.size} processes"
        rendezvous.wait_until(formed.done, what, seconds=GROUP_SECONDS)
    except DeadlineError as error:
        raise GroupError(str(error)) from error
    try:
        group = formed.result()
    except Exception as error:
        raise GroupError(f"{backend} failed: {first_line(error)}") from error
    logger.info("weights are broadcast over %s, %d processes, on %s", backend, place.size, device)
    return group


def begin(group: WeightGroup, bucket: Tensor) -> Any:
    """Send a bucket from rank 0, or fill it; GroupError when it cannot be begun."""
    try:
        return group.broadcast(bucket, 0)
    except RuntimeError as error:
        raise GroupError(f"a transfer failed: {first_line(error)}") from error


def finish(rendezvous: Rendezvous, transfer: Any) -> None:
    """Return once a transfer is over; GroupError when it failed or another member failed."""
    try:
        what = "the transfer of a bucket of weights"
        rendezvous.wait_until(transfer.is_completed, what, seconds=GROUP_SECONDS)
        transfer.wait()
    except DeadlineError as error:
        raise GroupError(str(error)) from error
    except RuntimeError as error:
        raise GroupError(f"a transfer failed: {first_line(error)}") from error


def _build(place: GroupPlace, backend: Backend, seconds: float) -> Any:
    timeout = timedelta(seconds=seconds)
    store = FileStore(str(place.path), place.size)
    store.set_timeout(timeout)
    if backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, place.rank, place.size, nccl)
    options: Any = ProcessGroupGloo  # torch's stubs leave them out
    gloo = options._Options()
    gloo._timeout = timeout
    gloo._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(store, place.rank, place.size, gloo)
