"""The ranks of one trainer: how they find each other, agree, and give up on a silent one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gradus.errors import DeadlineError, ProcessError

COLLECTIVE_TIMEOUT_SECONDS = 600.0
"""Deadline of one collective; a rank that is later is taken for dead."""


@dataclass(frozen=True)
class World:
    """All data-parallel ranks, seen from one of them; a world of one runs the same code.

    >>> with join_world() as world:  # doctest: +SKIP
    ...     world.sums({"tokens": 3.0})
    {'tokens': 3.0}
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each value added up over all ranks, in float64; all ranks must pass the same names."""
        names = sorted(values)
        vector = torch.tensor(
            [values[name] for name in names], dtype=torch.float64, device=self.device
        )
        with named_failures("sum numbers over ranks"):
            dist.all_reduce(vector)
        return dict(zip(names, vector.tolist(), strict=True))

    def maxima(self, values: Mapping[str, float]) -> dict[str, float]:
        """The largest of each value over all ranks, which must pass the same names."""
        if not values:
            return {}
        names = sorted(values)
        vector = torch.tensor(
            [values[name] for name in names], dtype=torch.float64, device=self.device
        )
        with named_failures("compare numbers over ranks"):
            dist.all_reduce(vector, op=dist.ReduceOp.MAX)
        return dict(zip(names, vector.tolist(), strict=True))

    def all_agree(self, condition: bool) -> bool:
        """True when the condition holds on every rank."""
        vote = torch.tensor(int(condition), dtype=torch.int32, device=self.device)
        with named_failures("agree over ranks"):
            dist.all_reduce(vote, op=dist.ReduceOp.MIN)
        return bool(vote.item())

    def first_rank_does(self, action: Callable[[], None]) -> None:
        """Run `action` on rank 0 while the others wait; an error there ends all ranks."""
        failure: BaseException | None = None
        if self.is_first:
            try:
                action()
            except BaseException as error:
                failure = error
        is_done = self.all_agree(failure is None)
        if failure is not None:
            raise failure
        if not is_done:
            raise ProcessError("rank 0 failed; its own message says why")


@contextmanager
def join_world(
    *, deterministic: bool = False, timeout_seconds: float = COLLECTIVE_TIMEOUT_SECONDS
) -> Iterator[World]:
    """The world that torchrun describes, or a world of one without torchrun.

    `deterministic` makes torch use one thread and deterministic kernels only, until the exit.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = _own_device()
    is_alone = "WORLD_SIZE" not in os.environ
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=HashStore() if is_alone else None,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    try:
        mesh = init_device_mesh(device.type, (size,))
        with _determinism() if deterministic else _as_configured():
            yield World(rank=rank, size=size, device=device, mesh=mesh)
    finally:
        dist.destroy_process_group()


@contextmanager
def named_failures(action: str) -> Iterator[None]:
    """Turn torch's errors about silent and dead ranks into ours, which say what was waited for."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "imed out" in text or "timeout" in text.lower():
            raise DeadlineError(
                f"cannot {action}: a rank did not answer in time ({_first_line(text)}); "
                "look for a stopped or overloaded trainer rank"
            ) from error
        if "onnection closed" in text or "onnection reset" in text:
            raise ProcessError(f"cannot {action}: a rank died ({_first_line(text)})") from error
        raise


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200]


def _own_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


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


@contextmanager
def _as_configured() -> Iterator[None]:
    yield
