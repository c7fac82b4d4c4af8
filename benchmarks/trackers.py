"""CPU time of the process that feeds the trackers: of its start, and of each step of a run.

Writes the files of a run with made-up numbers, a record every `--interval` seconds and episodes
with every tenth, beside `gradus tracker` as a run starts it, and reads what the kernel counted for
that process and its children. Each tracker alone, then all of them in one process. The start ends
when the first record is safe everywhere. A step's cost holds what the process does while it waits
for the step, so it grows with the interval; `nothing` is a tracker that keeps nothing.

    python benchmarks/trackers.py --out benchmarks/results/trackers.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from commands import wait_until

from gradus.files import read_json, write_json
from gradus.monitor import JsonlMonitor
from gradus.processes.table import descendants, living_processes
from gradus.run.lease import mark_run
from gradus.run.paths import RunDirectory

TRACKERS: Mapping[str, Mapping[str, Any]] = {
    "nothing": {"type": "trackers:Nothing"},
    "tensorboard": {"type": "tensorboard"},
    "wandb": {"type": "wandb", "mode": "offline"},
    "mlflow": {"type": "mlflow"},
    "trackio": {"type": "trackio"},
    "prometheus": {"type": "prometheus"},
}
EPISODES_INTERVAL_STEPS = 10
TEXT = "Reverse the words of this sentence, and answer with them only. "
START_SECONDS = 300.0
LAG_SECONDS = 60.0
SCRAPE_INTERVAL_SECONDS = 15.0


class Nothing:
    """A tracker that costs only what feeding it costs."""

    def open(self, run: object) -> None: ...

    def log(self, record: object) -> None: ...

    def log_episodes(self, step: int, rows: object) -> None: ...

    def flush(self) -> None: ...

    def close(self, outcome: str) -> None: ...


class Clock:
    """CPU seconds of a process and all its descendants, also of those that have ended."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seconds: dict[tuple[int, int], float] = {}

    def read(self) -> float:
        """Seconds until now; a child counts from the first call that sees it."""
        everybody = living_processes()
        ours = descendants(self._pid, everybody)
        ours += [entry for entry in everybody if entry.pid == self._pid]
        for entry in ours:
            try:
                fields = Path(f"/proc/{entry.pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks = int(fields[11]) + int(fields[12])
            self._seconds[entry.pid, entry.start_time] = ticks / os.sysconf("SC_CLK_TCK")
        return sum(self._seconds.values())


class MadeUpRun:
    """The folder of a run that is written step by step."""

    def __init__(self, root: Path, *, num_metrics: int, num_episodes: int) -> None:
        self.folder = RunDirectory(root)
        root.mkdir()
        mark_run(self.folder, "rl")
        self._monitor = JsonlMonitor(self.folder.metrics)
        self._names = [f"episode/source_{n // 10}/part_{n % 10}/mean" for n in range(num_metrics)]
        self._num_episodes = num_episodes
        self._random = random.Random(0)

    def write(self, step: int) -> None:
        """The step's episodes, then its record, as the orchestrator does."""
        if step % EPISODES_INTERVAL_STEPS == 0:
            path = self.folder.episodes / f"step_{step}" / "train.jsonl"
            path.parent.mkdir(parents=True)
            lines = [json.dumps(self._episode(number)) for number in range(self._num_episodes)]
            path.write_text("".join(f"{line}\n" for line in lines))
        self._monitor.record({name: self._random.random() for name in self._names}, step=step)

    def _episode(self, number: int) -> dict[str, Any]:
        reward = self._random.random()
        nodes = [
            {"message": {"role": "user", "content": TEXT * 4}, "sampled": False},
            {"message": {"role": "assistant", "content": TEXT * 8}, "sampled": True},
        ]
        fields = {
            "episode": f"g{number}.0",
            "source": "words",
            "task": {"index": number, "key": str(number)},
            "advantages": [reward - 0.5],
            "error": None,
        }
        trace = {"rewards": {"exact": {"score": reward, "weight": 1.0}}, "nodes": nodes}
        return {"gradus": fields, "traces": [trace]}


def measure(names: Sequence[str], args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Follow one made-up run with the trackers of these names."""
    run = MadeUpRun(root, num_metrics=args.metrics, num_episodes=args.episodes)
    monitors = [{"name": name, **TRACKERS[name]} for name in names]
    config = run.folder.config / "tracker.json"
    write_json(config, {"run_dir": str(root), "term": 0, "monitor": monitors})
    run.write(0)
    with (root / "tracker.out").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "gradus.cli.main", "tracker", "@", str(config)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )
    try:
        clock = Clock(process.pid)
        started = time.monotonic()
        wait_until_sent(run.folder, names, 1, START_SECONDS)
        start_wall, start = time.monotonic() - started, clock.read()
        scraper = Scraper(run.folder)
        for step in range(1, args.steps + 1):
            run.write(step)
            scraper.wait(args.interval)
        wait_until_sent(run.folder, names, args.steps + 1, LAG_SECONDS)
        steps = clock.read() - start
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=LAG_SECONDS)
    return {
        "trackers": list(names),
        "start_cpu_seconds": round(start, 2),
        "start_seconds": round(start_wall, 2),
        "step_cpu_ms": round(1000 * steps / args.steps, 1),
        "scrapes": scraper.num_scrapes,
    }


def wait_until_sent(
    folder: RunDirectory, names: Sequence[str], num_records: int, timeout_seconds: float
) -> None:
    """Until every tracker has confirmed so many records."""
    cursors = [folder.trackers / f"{name}.json" for name in names]

    def is_sent() -> bool:
        return all(
            path.is_file() and read_json(path)["num_sent"] >= num_records for path in cursors
        )

    wait_until(is_sent, timeout_seconds=timeout_seconds, what=f"record {num_records} of {names}")


class Scraper:
    """Asks for the page of a run as often as Prometheus would, where there is one."""

    def __init__(self, folder: RunDirectory) -> None:
        self.num_scrapes = 0
        self._address = folder.root / "ready" / "prometheus.json"
        self._due = 0.0

    def wait(self, seconds: float) -> None:
        """Let the time pass."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if time.monotonic() >= self._due and self._address.is_file():
                (target,) = read_json(self._address)[0]["targets"]
                urllib.request.urlopen(f"http://{target}/metrics", timeout=5).read()
                self.num_scrapes += 1
                self._due = time.monotonic() + SCRAPE_INTERVAL_SECONDS
            time.sleep(min(left, 0.1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trackers", nargs="+", default=list(TRACKERS), choices=list(TRACKERS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two steps")
    parser.add_argument("--metrics", type=int, default=120, help="numbers in a record")
    parser.add_argument("--episodes", type=int, default=64, help="episodes of a recorded step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    real = [name for name in args.trackers if name != "nothing"]
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for names in [[name] for name in args.trackers] + [real] * (len(real) > 1):
            rows.append(measure(names, args, Path(place) / "+".join(names)))
            rows[-1]["load"] = round(os.getloadavg()[0], 1)
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        settings = {key: getattr(args, key) for key in ("steps", "interval", "metrics", "episodes")}
        args.out.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
