"""Which GPUs this shell may use: those of nvidia-smi that CUDA_VISIBLE_DEVICES lets through.

Asked before anything heavy is loaded, so never through torch. Has not met a real nvidia-smi yet;
the tests give it the output of one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gradus.companions import has_cuda_torch
from gradus.errors import first_line

GIB = 1 << 30

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
DEADLINE_SECONDS = 20.0
"""Without its daemon nvidia-smi wakes each GPU first, seconds for a machine with eight."""

_COLUMNS = ("index", "uuid", "name", "memory.total")
_QUERY = (f"--query-gpu={','.join(_COLUMNS)}", "--format=csv,noheader,nounits")
_MIB = 1 << 20
_DRIVER = Path("/proc/driver/nvidia/version")
_NO_DEVICES_EXIT_CODE = 6
_WARNING_EXIT_CODE = 14
"""The list is whole; the infoROM of a GPU is damaged, which computing does not need."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as processes of this shell may see it."""

    device: str
    """How CUDA_VISIBLE_DEVICES names it: a number, a UUID, or a part of a GPU (MIG)."""
    name: str
    memory_bytes: int | None
    """None where it is not known, as for parts of a GPU."""
    uuid: str = ""

    @property
    def description(self) -> str:
        size = "memory unknown"
        if self.memory_bytes is not None:
            size = f"{self.memory_bytes / GIB:.1f} GiB"
        return f"{self.name}, {size}"


@dataclass(frozen=True)
class FoundGpus:
    """The GPUs of this shell in its own order; a config counts them from 0.

    >>> FoundGpus((Gpu("3", "NVIDIA L4", None),)).gpus[0].device
    '3'
    """

    gpus: tuple[Gpu, ...] = ()
    why_none: str = ""
    """Completes "there is no GPU: ..."; empty when there is one."""
    is_broken: bool = False
    """Whether there may be GPUs, and something keeps this shell from knowing."""


NOT_ASKED = FoundGpus()
"""Where no GPU is looked for."""


def find_gpus(
    variables: Mapping[str, str],
    *,
    deadline_seconds: float = DEADLINE_SECONDS,
    driver: Path = _DRIVER,
    is_usable: bool | None = None,
) -> FoundGpus:
    """The GPUs that a shell with these variables may use; nothing is raised.

    `is_usable` says whether the installed torch can compute on one; None means to look.
    """
    if not (has_cuda_torch() if is_usable is None else is_usable):
        return FoundGpus(why_none="torch is a build for CPUs; gradus-rl[gpu] brings the other")
    chosen = variables.get(VISIBLE)
    if chosen is not None and chosen.split(",")[0].strip() in ("", "-1", "NoDevFiles"):
        return FoundGpus(why_none=f"{VISIBLE} = {chosen!r} hides all")
    program = shutil.which("nvidia-smi", path=variables.get("PATH"))
    if program is None:
        if driver.exists():
            text = f"nvidia-smi is not on the PATH, but {driver} says that NVIDIA's driver is "
            text += (
                "loaded; install it (in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
            )
            return FoundGpus(why_none=text, is_broken=True)
        return FoundGpus(why_none="nvidia-smi is not on the PATH")
    try:
        here = _parse(_ask(program, variables, deadline_seconds))
        found = here if chosen is None else tuple(_visible(here, chosen))
    except ValueError as error:
        return FoundGpus(why_none=str(error), is_broken=True)
    return FoundGpus(found, "" if found else "nvidia-smi lists none")


def _ask(program: str, variables: Mapping[str, str], deadline_seconds: float) -> str:
    """What nvidia-smi prints; ValueError says what went wrong."""
    environment = {name: value for name, value in variables.items() if name != VISIBLE}
    child = subprocess.Popen(
        [program, *_QUERY],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # Apart: the loader and the driver warn there, in the middle of a good list.
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        printed, said = child.communicate(timeout=deadline_seconds)
    except subprocess.TimeoutExpired as error:
        _abandon(child)
        raise ValueError(
            f"nvidia-smi did not answer in {deadline_seconds:g} s; the driver may hang, see `dmesg`"
        ) from error
    if child.returncode == _NO_DEVICES_EXIT_CODE:
        return ""
    if child.returncode not in (0, _WARNING_EXIT_CODE):
        text = first_line(f"{printed}\n{said}")
        raise ValueError(f"nvidia-smi failed (exit code {child.returncode}): {text}")
    return printed


def _abandon(child: subprocess.Popen[str]) -> None:
    """Kill it and all that it started; inside a driver that hangs not even that ends it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=1.0)
    for pipe in filter(None, (child.stdout, child.stderr)):
        pipe.close()


def _parse(printed: str) -> tuple[Gpu, ...]:
    """The lines of nvidia-smi, in its order, without its warnings."""
    found = []
    for line in filter(str.strip, printed.splitlines()):
        if line.startswith("WARNING:"):
            continue
        cells = [cell.strip() for cell in line.split(",")]
        is_row = len(cells) == len(_COLUMNS) and cells[0].isdigit() and cells[1].startswith("GPU-")
        if not is_row:
            raise ValueError(
                f"nvidia-smi printed {first_line(line)!r} where {_COLUMNS} was asked for"
            )
        index, uuid, name, memory = cells
        found.append(Gpu(index, name, int(memory) * _MIB if memory.isdigit() else None, uuid))
    return tuple(found)


def _visible(here: Sequence[Gpu], chosen: str) -> Iterator[Gpu]:
    """What CUDA would let through, in the order of the list; ValueError for what is not there.

    CUDA itself ends the list at the first entry that it does not know, without a word.
    """
    taken: set[str] = set()
    for entry in (part.strip() for part in chosen.split(",")):
        if entry == "-1":
            return
        gpu = _named(here, entry, chosen)
        if gpu.uuid in taken:
            raise ValueError(f"{VISIBLE} = {chosen!r} names {entry} twice")
        taken.add(gpu.uuid)
        yield gpu


def _named(here: Sequence[Gpu], entry: str, chosen: str) -> Gpu:
    if entry.startswith("MIG-"):
        return Gpu(entry, "part of a GPU (MIG)", None, entry)
    if entry.isdigit():
        fitting = [gpu for gpu in here if gpu.device == str(int(entry))]
    else:
        fitting = [gpu for gpu in here if entry and gpu.uuid.startswith(entry)]
    if len(fitting) != 1:
        what = "names" if not fitting else f"names {len(fitting)} GPUs with"
        there = ", ".join(gpu.device for gpu in here) or "none"
        raise ValueError(
            f"{VISIBLE} = {chosen!r} {what} {entry!r}, and the GPUs of this machine are {there}"
        )
    return replace(fitting[0], device=entry)
