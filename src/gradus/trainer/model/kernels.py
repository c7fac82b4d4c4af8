"""Which kernels run where: pure functions of what a device and its packages can do.

The only place of the trainer that asks what a machine has. `Platform` carries the answer to those
who compute, with the operations that only CUDA has; a test that passes CUDA's facts and plain forms
of those operations runs a GPU's code on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.backends.cuda import is_flash_attention_available
from torch.nn.attention.varlen import varlen_attn

from gradus.errors import ConfigError
from gradus.plan.machine import compiler_problem
from gradus.trainer.model.cpu.head import has_bfloat16_instructions
from gradus.trainer.model.gpu.offload import InputStore

Attention = Literal["varlen", "padded"]
FlashVersion = Literal["none", "FA2", "FA3", "FA4"]
Product = Literal["plain", "float32", "shifted", "widening"]
"""How logits are multiplied: in the dtype of their factors; in float32; as distances from likely
ones; or from 16-bit factors into float32 sums."""
GradientSync = Literal["last", "each"]
"""After which micro batches of a step gradients are added up over ranks."""
Half = (torch.bfloat16, torch.float16)

_OLDEST_WITH_FLASH = (8, 0)
"""Compute capability of Ampere; torch's flash attention runs on nothing older."""
_OLDEST_WITH_FLOAT8 = (8, 9)
_HOPPER, _BLACKWELL = 9, 10
_LARGEST_FLASH_HEAD = 256
"""Flash attention knows heads up to this size, in steps of 8."""


@dataclass(frozen=True)
class DeviceFacts:
    """What a device and the packages for it can do; a choice of kernels depends on nothing else."""

    kind: str
    """`cpu` or `cuda`."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability of a GPU."""
    has_flash: bool = False
    """True if torch was built with flash attention."""
    installed: frozenset[FlashVersion] = frozenset()
    """Versions of flash attention that lie in their own packages."""
    has_bfloat16: bool = False
    """True if a CPU has instructions for bfloat16."""
    can_compile: bool = False
    """True if the machine has what torch.compile needs: a C compiler, and Triton for a GPU."""


class BlockSize(NamedTuple):
    """Largest block of logits that exists at once."""

    tokens: int
    vocabulary: int


_CPU_BLOCK = BlockSize(tokens=512, vocabulary=1024)
_CUDA_BLOCK = BlockSize(tokens=4096, vocabulary=16384)
"""Near the caches of a CPU core; large enough to fill a GPU."""


def attention_kernel(
    facts: DeviceFacts, dtype: torch.dtype, head_size: int, *, is_capped: bool = False
) -> Attention:
    """Samples of different lengths in one kernel where flash attention runs, else in rectangles;
    `is_capped` says that the model caps its scores, which that kernel cannot."""
    fits = head_size <= _LARGEST_FLASH_HEAD and head_size % 8 == 0 and not is_capped
    return "varlen" if flash_version(facts) != "none" and dtype in Half and fits else "padded"


def flash_version(facts: DeviceFacts) -> FlashVersion:
    """What torch's flash attention should run on; the newest that knows the GPU."""
    if facts.kind != "cuda" or not facts.has_flash or facts.capability < _OLDEST_WITH_FLASH:
        return "none"
    newer: dict[int, tuple[FlashVersion, ...]] = {_HOPPER: ("FA3", "FA4"), _BLACKWELL: ("FA4",)}
    versions = newer.get(facts.capability[0], ())
    return next((version for version in versions if version in facts.installed), "FA2")


def head_product(facts: DeviceFacts, dtype: torch.dtype) -> Product:
    """How the output layer multiplies into float32 sums."""
    if dtype not in Half:
        return "plain"
    if facts.kind == "cuda":
        return "widening"
    return "shifted" if facts.has_bfloat16 and dtype == torch.bfloat16 else "float32"


def head_block(facts: DeviceFacts, vocabulary: int) -> BlockSize:
    """The usual block; a small vocabulary leaves room for more tokens."""
    usual = _CUDA_BLOCK if facts.kind == "cuda" else _CPU_BLOCK
    words = min(usual.vocabulary, vocabulary)
    return BlockSize(usual.tokens * usual.vocabulary // words, words)


def compiles(facts: DeviceFacts, choice: bool | Literal["auto"]) -> bool:
    """Tell whether layers are compiled: what the user says, or on GPUs only.

    On a CPU compiling takes longer than it saves, and the forms of `fuses_layers` do as much.
    """
    return facts.kind == "cuda" and facts.can_compile if choice == "auto" else choice


def multiplies_float8(facts: DeviceFacts) -> bool:
    """Tell whether the device has float8 arithmetic, which came with Ada and Hopper."""
    return facts.kind == "cuda" and facts.capability >= _OLDEST_WITH_FLOAT8


def gradient_sync(facts: DeviceFacts, choice: GradientSync | Literal["auto"]) -> GradientSync:
    """After which micro batches gradients are added up over ranks.

    "last" holds a whole float32 gradient on each device. A CPU has the memory, and computes nothing
    while it sums; a GPU lacks it, and sums one layer while it computes the next.
    """
    if choice == "auto":
        return "each" if facts.kind == "cuda" else "last"
    return choice


def fuses_layers(facts: DeviceFacts, *, is_compiled: bool) -> bool:
    return facts.kind == "cpu" and not is_compiled


VarlenAttention = Callable[..., Any]
"""Called as `torch.nn.attention.varlen.varlen_attn` is: [T, H, D]."""


class VarlenBackward(Protocol):
    """Gradients of queries, keys and values, from what attention gave: its result [T, H, D], and
    the logarithm [H, T] of the sum that each query's weights were divided by. `starts` are those of
    the samples' queries and of their keys, and the longest of each."""

    def __call__(
        self,
        gradient: Tensor,
        tokens: tuple[Tensor, Tensor, Tensor],
        attended: tuple[Tensor, Tensor],
        starts: tuple[Tensor, Tensor, int, int],
        scale: float,
        window_size: tuple[int, int],
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def _varlen_backward(
    gradient: Tensor,
    tokens: tuple[Tensor, Tensor, Tensor],
    attended: tuple[Tensor, Tensor],
    starts: tuple[Tensor, Tensor, int, int],
    scale: float,
    window_size: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    left, right = window_size
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        gradient.contiguous(),
        *tokens,
        *attended,
        *(*starts, 0.0, window_size == (-1, 0)),
        # What dropout would have drawn from, twice.
        torch.zeros(2, dtype=torch.uint64, device=gradient.device),
        gradient.new_empty(0),
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    return found


class WideningProduct(Protocol):
    """left @ right of 16-bit factors as float32 sums, or added to those of `into`."""

    def __call__(self, left: Tensor, right: Tensor, into: Tensor | None = None) -> Tensor: ...


def _widening_product(left: Tensor, right: Tensor, into: Tensor | None = None) -> Tensor:
    if into is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.addmm(into, left, right, out_dtype=torch.float32, out=into)


@dataclass(frozen=True)
class Platform:
    """A device to compute on: what it can do, and the operations that only some devices have."""

    facts: DeviceFacts
    varlen: VarlenAttention = varlen_attn
    varlen_backward: VarlenBackward = _varlen_backward
    widening: WideningProduct = _widening_product
    block: BlockSize | None = None
    """Of the output layer; None means what suits the device."""
    compile_backend: str | Callable[..., Any] = "inductor"
    """What torch.compile makes code with."""
    inputs: InputStore = field(default_factory=InputStore)
    """Where inputs of layers wait for backward."""

    @classmethod
    def of(cls, device: torch.device) -> Platform:
        return _platform(str(device))

    def attention(
        self, dtype: torch.dtype, head_size: int, *, is_capped: bool = False
    ) -> Attention:
        return attention_kernel(self.facts, dtype, head_size, is_capped=is_capped)

    def names(
        self, dtype: torch.dtype, head_size: int, *, is_capped: bool = False
    ) -> dict[str, str]:
        """What computes in this dtype, for a log or a record."""
        kernel = self.attention(dtype, head_size, is_capped=is_capped)
        version = flash_version(self.facts)
        return {
            "attention": f"{kernel} {version}" if kernel == "varlen" else kernel,
            "output_layer": head_product(self.facts, dtype),
        }


@cache
def _platform(device: str) -> Platform:
    return Platform(_read_facts(torch.device(device)))


def _read_facts(device: torch.device) -> DeviceFacts:
    has_compiler = compiler_problem(os.environ) is None
    if device.type != "cuda":
        has_bfloat16 = has_bfloat16_instructions()
        return DeviceFacts(device.type, has_bfloat16=has_bfloat16, can_compile=has_compiler)
    return DeviceFacts(
        "cuda",
        capability=torch.cuda.get_device_capability(device),
        has_flash=is_flash_attention_available(),
        installed=_installed_versions(),
        can_compile=has_compiler and find_spec("triton") is not None,
    )


def _installed_versions() -> frozenset[FlashVersion]:
    found: set[FlashVersion] = set()
    if find_spec("flash_attn_interface") is not None:
        found.add("FA3")
    package = find_spec("flash_attn")
    folders = () if package is None else package.submodule_search_locations or ()
    # Not find_spec("flash_attn.cute"): it would import the package above.
    if any((Path(folder) / "cute").is_dir() for folder in folders):
        found.add("FA4")
    return frozenset(found)


def count_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def own_device(num_gpus: int, local_rank: int) -> torch.device:
    """The GPU of one of the processes on a machine, or the CPU where no GPU is seen."""
    if num_gpus == 0:
        return torch.device("cpu")
    if local_rank >= num_gpus:
        raise ConfigError(
            f"trainer process {local_rank} of this machine has no GPU: {num_gpus} can be seen; "
            "lower num_processes, or name more of them in trainer.gpus"
        )
    return torch.device("cuda", local_rank)
