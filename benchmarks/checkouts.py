"""One run of `gradus rl` from two checkouts in turn: start-up, step, CPU seconds, memory.

    python benchmarks/checkouts.py ../before . @ run.toml --max-steps 12 --output results.json
    python benchmarks/checkouts.py ../before . --command bench-trainer @ run.toml

`bench-trainer` is the trainer by itself, on made-up samples, without an engine. Each checkout has a
`.venv` of its own. What a change costs when nothing fails is the ratio of the medians; the runs
take turns, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def measure(checkout: Path, command: str, words: list[str], folder: Path) -> dict[str, float]:
    """One run to its end."""
    program = str(checkout.absolute() / ".venv" / "bin" / "gradus")
    started = time.time()
    with (folder / "output.txt").open("wb") as output:
        run = subprocess.Popen(
            [program, command, *words, "--output-dir", str(folder), "--name", "run"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        _, status, used = os.wait4(run.pid, 0)
    wall = time.time() - started
    if status:
        raise SystemExit((folder / "output.txt").read_text())
    (metrics,) = folder.glob("*/metrics.jsonl")  # one of a bench has a name of its own
    lines = map(json.loads, metrics.read_text().splitlines())
    times = [it["time"] for it in lines if "step" in it and it.get("kind") != "evaluation"]
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return {
        "first_step_seconds": times[0] - started,
        "step_seconds": statistics.median(steps),
        "wall_seconds": wall,
        # Of the launcher and of all whom it waited for, so of every process of the run.
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "largest_mebibytes": used.ru_maxrss / 1024,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--command", choices=("rl", "bench-trainer"), default="rl")
    parser.add_argument("--output", type=Path)
    chosen, words = parser.parse_known_args()
    found: dict[str, list[dict[str, float]]] = {"first": [], "second": []}
    for _ in range(chosen.runs):
        for name in found:
            with tempfile.TemporaryDirectory(prefix="checkouts-") as folder:
                found[name].append(
                    measure(getattr(chosen, name), chosen.command, words, Path(folder))
                )
            print(name, json.dumps(found[name][-1]), flush=True)
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in found.items()
    }
    ratios = {key: medians["second"][key] / medians["first"][key] for key in medians["first"]}
    (flags,) = re.findall("^flags.*", Path("/proc/cpuinfo").read_text(), re.M)[:1]
    has = [it for it in FLAGS if it in flags.split()]
    result: dict[str, Any] = {"medians": medians, "ratios": ratios, "processor": has}
    print(json.dumps(result, indent=1))
    result["runs"] = found
    if chosen.output:
        chosen.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
