"""Seconds until an episode has its container, started with it and started ahead; what one costs.

python benchmarks/spare_containers.py --output benchmarks/results/spare_containers.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from verifiers.v1.runtimes.docker import PodmanConfig, PodmanRuntime

from gradus.environments.containers import owner_label, remove_containers
from gradus.environments.spares import SpareContainers
from gradus.environments.verifiers.table import ProcessSettings, apply

IMAGE = "localhost/gradus-sandbox:1"


def idle_memory(container: str) -> dict[str, int]:
    """MiB of the container's own process, and of what the engine keeps beside it."""
    told = subprocess.run(
        ["podman", "inspect", "--format", "{{.State.Pid}} {{.State.ConmonPid}}", container],
        capture_output=True,
        text=True,
        check=True,
    )
    names = ("sleep_kib", "conmon_kib")
    return {
        name: int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])  # type: ignore[index]
        for name, pid in zip(names, told.stdout.split(), strict=True)
    }


async def timed(start: Any, runtime: Any) -> float:
    """Seconds until the runtime runs a command."""
    began = time.perf_counter()
    await start(runtime)
    assert (await runtime.run(["sh", "-c", ":"], {})).exit_code == 0
    return time.perf_counter() - began


async def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """Cold and warm in turn, then as many at once as were asked for."""
    config, begin = PodmanConfig(image=IMAGE), PodmanRuntime.start
    found: dict[str, list[float]] = {"cold": [], "warm": []}
    kept = SpareContainers(1)
    await kept.start(begin, used := PodmanRuntime(config))
    await used.stop()
    for _ in range(chosen.rounds):
        await asyncio.gather(*kept._starting)
        for name, start in (("warm", lambda it: kept.start(begin, it)), ("cold", begin)):
            runtime = PodmanRuntime(config)
            found[name].append(await timed(start, runtime))
            if name == "warm":
                await asyncio.gather(*kept._starting)
            await runtime.stop()
    (kind,) = kept._kinds.values()
    memory = idle_memory(kind.ready[0]._container)
    many = [PodmanRuntime(config) for _ in range(chosen.at_once)]
    began = time.perf_counter()
    await asyncio.gather(*(begin(it) for it in many))
    seconds = time.perf_counter() - began
    await asyncio.gather(*(it.stop() for it in many))
    return {
        "load": [round(it, 1) for it in os.getloadavg()],
        "seconds": {name: round(statistics.median(it), 2) for name, it in found.items()},
        "all": {name: [round(it, 2) for it in each] for name, each in found.items()},
        "idle": memory,
        "at_once": {"containers": chosen.at_once, "seconds": round(seconds, 2)},
    }


async def run(chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure, and leave nothing."""
    label = os.environ["VF_RUN_ID"] = owner_label("bench")
    try:
        return await measure(chosen)
    finally:
        await remove_containers(["podman"], label.__eq__)


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    apply(ProcessSettings())
    result = asyncio.run(run(chosen))
    print(json.dumps(result, indent=1))
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
