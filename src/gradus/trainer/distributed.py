"""The ranks of one trainer: how they find each other, agree, and give up on a silent one.

Also what a rank sets for its whole process: its device, determinism, and the memory that it keeps.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from gradus.config import ParallelConfig
from gradus.errors import DeadlineError, ProcessError, first_line, refuse
from gradus.heartbeat import beat, busy
from gradus.trainer.model.kernels import count_gpus, own_device

CPU = torch.device("cpu")
COLLECTIVE_TIMEOUT_SECONDS = 600.0
"""Deadline of one collective; a rank that is later is taken for dead."""
_TURN_KEY = "gradus/first_rank"
_BEAT_SECONDS = 5.0
_SHORTEST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.02


Number = float | Tensor
"""Of the host, or a scalar on the device; one call takes only one of the two."""


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share the tokens of one micro batch, seen from one of them."""

    rank: int
    """Which part of the tokens is this rank's."""
    size: int
    group: dist.ProcessGroup
    is_ring: bool = False
    """True if keys travel among them; else each attends with a part of the heads."""


@dataclass(frozen=True)
class World:
    """All ranks of the trainer, seen from one of them; a world of one runs the same code.

    Ranks of one context group hold the same micro batches and see the same losses, so they count
    as one data-parallel rank.

    >>> with join_world(training_device()) as world:  # doctest: +SKIP
    ...     world.sums({"tokens": 3.0})
    {'tokens': 3.0}
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """The model is sharded over its last dimension and copied over the first of two."""
    experts: DeviceMesh | None = None
    """The same ranks where experts are split: over the last dimension the experts of a layer, over
    the one before what is left of them. None when every rank computes all experts."""
    context: ContextGroup | None = None
    """None when every rank reads whole micro batches."""
    _turns: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)
    """Counts what the first rank does alone; the same on all ranks."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def context_size(self) -> int:
        return 1 if self.context is None else self.context.size

    @property
    def data_rank(self) -> int:
        """Whose micro batches this rank trains."""
        return self.rank // self.context_size

    @property
    def data_size(self) -> int:
        return self.size // self.context_size

    def sums(self, values: Mapping[str, Number]) -> dict[str, float]:
        """Each value added up over all data-parallel ranks, in float64.

        All ranks must pass the same names. The ranks of a context group hold the same numbers;
        only the first of them counts. Numbers of the host never meet the device, so that adding
        them up does not wait for it; tensors are read once, after the sum.
        """
        names, vector = _as_vector(values)
        return dict(zip(names, self.added_up(vector), strict=True))

    def added_up(self, vector: Tensor) -> list[float]:
        """A vector of float64 added up like `sums`; read once, after the sum."""
        added = vector.clone()
        if self.context is not None and self.context.rank > 0:
            added.zero_()
        with _collective("sum numbers over ranks"):
            dist.all_reduce(added)
        return [float(value) for value in added.tolist()]

    def maxima(self, values: Mapping[str, Number]) -> dict[str, float]:
        """The largest of each value over all ranks, which must pass the same names; as `sums`."""
        if not values:
            return {}
        names, vector = _as_vector(values)
        with _collective("compare numbers over ranks"):
            dist.all_reduce(vector, op=dist.ReduceOp.MAX)
        return dict(zip(names, vector.tolist(), strict=True))

    def names_of_all(self, names: Iterable[str]) -> list[str]:
        """The names that any rank brings, sorted. A loss of a user may give a metric only where it
        has something to count."""
        own = sorted(names)
        text = "\n".join(own).encode()
        digest = int.from_bytes(hashlib.sha256(text).digest()[:6])  # exact in float64
        seen = self.maxima({"digest": digest, "-digest": -digest, "bytes": len(text)})
        if seen["digest"] == -seen["-digest"]:
            return own
        mine = torch.zeros(int(seen["bytes"]), dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        with _collective("gather names over ranks"):
            dist.all_gather(every, mine)
        texts = [bytes(encoded.tolist()).rstrip(b"\0").decode() for encoded in every]
        return sorted({name for it in texts for name in it.split("\n")})

    def all_agree(self, condition: bool) -> bool:
        """True when the condition holds on every rank."""
        vote = torch.tensor(int(condition), dtype=torch.int32)
        with _collective("agree over ranks"):
            dist.all_reduce(vote, op=dist.ReduceOp.MIN)
        return bool(vote.item())

    def first_rank_does(self, action: Callable[[], None]) -> None:
        """Run `action` on rank 0 while the others wait; an error there ends all ranks.

        It may take longer than a collective: the others wait while rank 0 reports that it is alive.
        """
        failure: BaseException | None = None
        turn = FirstRankTurn(next(self._turns))
        if self.is_first:
            with turn.taken() if self.size > 1 else nullcontext():
                try:
                    action()
                except BaseException as error:
                    failure = error
        else:
            with named_failures("wait for rank 0"):
                turn.wait()
        is_done = self.all_agree(failure is None)
        if failure is not None:
            raise failure
        if not is_done:
            raise ProcessError("rank 0 failed; its own message says why")


@dataclass(frozen=True)
class FirstRankTurn:
    """Something that rank 0 does alone; the store of the group tells the others when it is over."""

    number: int

    @contextmanager
    def taken(self) -> Iterator[None]:
        """On rank 0: say every few seconds that the body still runs, and then that it is over."""
        ended = threading.Event()
        thread = threading.Thread(target=self._beat, args=(ended,), name="first-rank", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            _store().set(_TURN_KEY, self._over)

    def wait(self) -> None:
        """On every other rank: return when it is over; DeadlineError when rank 0 says nothing."""
        store, pause = _store(), _SHORTEST_PAUSE_SECONDS
        said, since = b"", time.monotonic()
        while said != self._over.encode():
            beat("waits for rank 0")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            before, said = said, store.get(_TURN_KEY) if store.check([_TURN_KEY]) else b""
            if said != before:
                since = time.monotonic()
            if time.monotonic() - since > COLLECTIVE_TIMEOUT_SECONDS:
                raise DeadlineError(
                    f"rank 0 said nothing for {COLLECTIVE_TIMEOUT_SECONDS:g} s while others "
                    "waited for it; look for a stopped trainer rank"
                )

    def _beat(self, ended: threading.Event) -> None:
        for number in itertools.count():
            _store().set(_TURN_KEY, f"{self.number}.{number}")
            if ended.wait(_BEAT_SECONDS):
                return

    @property
    def _over(self) -> str:
        return f"{self.number}.over"


def _as_vector(values: Mapping[str, Number]) -> tuple[list[str], Tensor]:
    """The names in order, and their values in float64, where they are."""
    names = sorted(values)
    ordered = [values[name] for name in names]
    tensors = [value for value in ordered if isinstance(value, Tensor)]
    if tensors:
        assert len(tensors) == len(names), "numbers of the host and of the device at once"
        return names, torch.stack([tensor.double() for tensor in tensors])
    return names, torch.tensor(ordered, dtype=torch.float64)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


@contextmanager
def join_world(
    device: torch.device,
    *,
    deterministic: bool = False,
    parallel: ParallelConfig | None = None,
    timeout_seconds: float = COLLECTIVE_TIMEOUT_SECONDS,
) -> Iterator[World]:
    """The world that torchrun describes, or a world of one without torchrun, on a device.

    Runs pass `training_device()`; whoever wants a CPU says so, and never finds itself on a GPU.
    `deterministic` makes torch use one thread and deterministic kernels only, until the exit.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
        # oneDNN asks the kernel for AMX by itself; not every kernel does. Elsewhere it is nothing.
        torch.cpu._init_amx()
    is_alone = "WORLD_SIZE" not in os.environ
    dist.init_process_group(
        # Numbers of the host, and offloaded gradients and weights, are summed in CPU memory.
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=HashStore() if is_alone else None,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    try:
        world = build_world(parallel or ParallelConfig(), device)
        with _determinism() if deterministic else nullcontext():
            yield world
    finally:
        dist.destroy_process_group()


def build_world(parallel: ParallelConfig, device: torch.device) -> World:
    """The ranks of the running process group, arranged; ConfigError when sizes do not divide.

    Neighbouring ranks share a context, and neighbouring ranks share a copy of the model, so that
    both stay inside a machine where possible.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    refuse(f"parallel.{key}: {message}" for key, message in parallel.problems(size))
    parts, experts = parallel.context_parallel_size, None
    mesh = _model_mesh(parallel, device, {"shard": size // parallel.replicate_size})
    if (owners := parallel.expert_parallel_size) > 1:
        shards = size // parallel.replicate_size // owners
        experts = _model_mesh(parallel, device, {"shard": shards, "expert": owners})
    world = World(rank=rank, size=size, device=device, mesh=mesh, experts=experts)
    if parts == 1:
        return world
    contexts = init_device_mesh(
        device.type, (size // parts, parts), mesh_dim_names=("data", "context")
    )
    is_ring = parallel.context_parallel_style == "ring"
    context = ContextGroup(rank % parts, parts, contexts.get_group("context"), is_ring)
    return replace(world, context=context)


def _model_mesh(
    parallel: ParallelConfig, device: torch.device, sizes: Mapping[str, int]
) -> DeviceMesh:
    """Of these dimensions, and one of copies before them where there are several."""
    if parallel.replicate_size > 1:
        sizes = {"replicate": parallel.replicate_size, **sizes}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@contextmanager
def named_failures(action: str) -> Iterator[None]:
    """Turn torch's errors about silent and dead ranks into ours, which say what was waited for."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "imed out" in text or "timeout" in text.lower():
            raise DeadlineError(
                f"cannot {action}: a rank did not answer in time ({first_line(text)}); "
                "look for a stopped or overloaded trainer rank"
            ) from error
        if "onnection closed" in text or "onnection reset" in text:
            raise ProcessError(f"cannot {action}: a rank died ({first_line(text)})") from error
        raise


@contextmanager
def _collective(action: str) -> Iterator[None]:
    """As `named_failures`; a rank that waits for one with long work of its own does not hang."""
    waits = busy(f"waits for other ranks to {action}", COLLECTIVE_TIMEOUT_SECONDS)
    with waits, named_failures(action):
        yield


Place = Callable[[str, Tensor, torch.dtype], Tensor]
"""Puts a gathered tensor of a name, in a dtype, to where it is wanted."""


def on_cpu(_: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In main memory; maybe the tensor itself."""
    return tensor.detach().to(device="cpu", dtype=dtype).contiguous()


def whole_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor, also of one that is split over ranks; then it is a collective.

    Where one rank has all of it, that is the tensor itself and not a copy.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor that is split over ranks, with its gradient; or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def training_device() -> torch.device:
    return own_device(count_gpus(), int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def _determinism() -> Iterator[None]:
    threads = torch.get_num_threads()
    was_enabled = torch.are_deterministic_algorithms_enabled()
    # cuBLAS reads this when it starts; it has no other switch.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled)
        torch.set_num_threads(threads)


# Memory that a step frees stays with the process, for the next step to use; on CPUs.

_TRIM_THRESHOLD, _MAP_THRESHOLD = -1, -3
"""What `mallopt` of the GNU C library calls M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""
_NEVER = 2**31 - 1
_LARGEST_KEPT_BYTES = 32 * 2**20
"""The highest that the library allows; larger tensors always come from the system."""


def keep_freed_memory() -> bool:
    """Ask the C library not to give freed tensors back to the system; whether it knows how to.

    By default it returns the activations of every step and gets them again page by page, zeroed:
    thousands of page faults a step. What the process needs at most does not change. torch does
    the same on GPUs. It holds for the whole process and cannot be undone.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is None:
        return False
    return bool(change(_MAP_THRESHOLD, _LARGEST_KEPT_BYTES) and change(_TRIM_THRESHOLD, _NEVER))
