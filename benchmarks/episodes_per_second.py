"""Episodes per second of the chat harness and of verifiers' null harness, side by side.

The real environment process and its pool, the orchestrator's client, an engine that answers at
once, the same tasks, 64 episodes in flight. Rounds of the harnesses alternate in one run, and their
medians are compared. `talk` is a conversation of five turns with a user, `tools` two parallel calls
to a server that all episodes share, and a reply. With `--before PYTHON`, the interpreter of
another checkout, its environments play in the same rounds as `before-...`.

    python benchmarks/episodes_per_second.py --output benchmarks/results/episodes_per_second.json

The null harness prepares its program with `uv`, which would download packages. A stand-in for
`uv` in a temporary folder points it at this interpreter, which has them; everything else of it,
above all one Python program per episode, is as shipped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import secrets
import signal
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from renderers import Qwen3RendererConfig

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from commands import wait_until
from running import TEST_PATH, RunningEnvironment

from gradus.config import EnvironmentProcessConfig, SamplingConfig
from gradus.files import read_json
from gradus.orchestrator.play.environment import (
    EnvironmentAddress,
    EnvironmentClient,
    EpisodeSettings,
)
from gradus.processes.table import descendants, living_processes
from gradus.run.paths import RunDirectory
from gradus.testing.tiny_model import build_tiny_tokenizer

TALK = "gradus-test-talk"
TOOLS = "gradus-word-lookup"
REPLIES = "gradus_test_two_calls:reply"
NUM_QUESTIONS = 5
DEADLINE_SECONDS = 120.0
END_SECONDS = 5.0
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
UV_STAND_IN = f"""#!/bin/sh
case "$*" in
  *--help*) echo "--script" ;;
  "python find"*) echo "{sys.executable}" ;;
esac
"""


@dataclass(frozen=True)
class Case:
    """One harness in one process."""

    name: str
    harness: str
    num_episodes: int
    taskset: str = "gradus-reverse-text"
    python: str = sys.executable
    """Whose interpreter runs the environment."""

    @property
    def settings(self) -> dict[str, Any]:
        """verifiers' configuration."""
        seat = {"harness": {"id": self.harness}, "runtime": {"type": "subprocess"}}
        if self.taskset == TALK:
            return {"taskset": {"id": TALK}, "agent": seat, "num_questions": NUM_QUESTIONS}
        if self.taskset == TOOLS:
            return {"taskset": {"id": TOOLS}, "agent": seat}
        return {"taskset": {"id": self.taskset, "num_tasks": 256}, "agent": seat}


@dataclass
class Result:
    """What one case reached, one entry per round."""

    episodes_per_second: list[float] = field(default_factory=list)
    environment_cpu_ms: list[float] = field(default_factory=list)
    """CPU time of the environment's processes and their programs, per episode."""
    client_cpu_ms: list[float] = field(default_factory=list)
    engine_cpu_ms: list[float] = field(default_factory=list)


def cpu_seconds(pids: list[int]) -> float:
    """CPU time that processes, and the children they waited for, have used."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(int(ticks) for ticks in fields[11:15])
    return total / TICKS_PER_SECOND


class Bench:
    """Owns the engine, the environments and the clients of one run."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self._root = root
        self._stack = stack
        self._model = root / "model"
        self._model.mkdir()
        build_tiny_tokenizer(self._model)
        self._uv = root / "bin" / "uv"
        self._uv.parent.mkdir()
        self._uv.write_text(UV_STAND_IN)
        self._uv.chmod(self._uv.stat().st_mode | stat.S_IXUSR)
        self._token = secrets.token_hex(32)
        self._engine, self._base_url = self._start_engine()

    def _run_dir(self, name: str) -> RunDirectory:
        run_dir = RunDirectory(self._root / name)
        run_dir.secrets.mkdir(parents=True)
        run_dir.inference_token.write_text(self._token)
        run_dir.admin_token.write_text(self._token)
        return run_dir

    def _start_engine(self) -> tuple[subprocess.Popen[bytes], str]:
        run_dir = self._run_dir("engine")
        command = [sys.executable, "-m", "gradus.testing.engine", "--run-dir", str(run_dir.root)]
        process = subprocess.Popen(
            [*command, "--reply", REPLIES], env={**os.environ, "PYTHONPATH": TEST_PATH}
        )
        self._stack.callback(_end, process)
        ready = run_dir.ready_file("inference")
        wait_until(ready.exists, timeout_seconds=60)
        return process, read_json(ready)["base_url"]

    def start(self, case: Case) -> RunningEnvironment:
        """The environment process of one case."""
        config = EnvironmentProcessConfig(
            run_dir=str(self._run_dir(case.name).root),
            term=0,
            name="bench",
            verifiers=case.settings,
        )
        path = f"{self._uv.parent}{os.pathsep}{os.environ['PATH']}"
        environment = RunningEnvironment(
            config,
            variables={"PATH": path},
            python=case.python,
        )
        self._stack.enter_context(environment)
        return environment

    async def play(
        self, environment: RunningEnvironment, num_episodes: int, in_flight: int, result: Result
    ) -> None:
        """One round."""
        ready = environment.wait_ready()
        endpoint = vf.TrainClientConfig(
            base_url=self._base_url,
            api_key_var="GRADUS_INFERENCE_TOKEN",
            renderer=Qwen3RendererConfig(),
            renderer_model_name=str(self._model),
        )
        client = EnvironmentClient(
            "bench",
            EnvironmentAddress(ready["run_address"], ready["pid"]),
            EpisodeSettings(endpoint, SamplingConfig(max_completion_tokens=64), DEADLINE_SECONDS),
        )
        num_tasks = min(64, ready["num_tasks"])
        tasks = [await client.task(index) for index in range(num_tasks)]
        waiting = iter(range(num_episodes))

        async def player() -> None:
            for index in waiting:
                episode = await client.run(tasks[index % num_tasks], version=0)
                assert episode.ok, episode.traces[0].errors

        pool = [p.pid for p in descendants(environment.process.pid, living_processes())]
        watched = ([*pool, environment.process.pid], [os.getpid()], [self._engine.pid])
        before = [cpu_seconds(pids) for pids in watched]
        started = time.perf_counter()
        await asyncio.gather(*(player() for _ in range(in_flight)))
        seconds = time.perf_counter() - started
        used = [
            1000 * (cpu_seconds(pids) - start) / num_episodes
            for pids, start in zip(watched, before, strict=True)
        ]
        await client.close()
        result.episodes_per_second.append(num_episodes / seconds)
        result.environment_cpu_ms.append(used[0])
        result.client_cpu_ms.append(used[1])
        result.engine_cpu_ms.append(used[2])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the engine, which may still hold connections of its clients."""
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run(cases: list[Case], rounds: int, in_flight: int) -> dict[str, Result]:
    """Play every case in every round, after one round that does not count."""
    results = {case.name: Result() for case in cases}
    with tempfile.TemporaryDirectory(prefix="gradus-bench-") as folder, ExitStack() as stack:
        bench = Bench(Path(folder), stack)
        environments = {case.name: bench.start(case) for case in cases}
        for number in range(rounds + 1):
            for case in cases:
                result = results[case.name] if number else Result()
                num_episodes = case.num_episodes if number else warm_up(case, in_flight)
                asyncio.run(bench.play(environments[case.name], num_episodes, in_flight, result))
                if number:
                    rate, cpu = result.episodes_per_second[-1], result.environment_cpu_ms[-1]
                    told = f"{rate:.1f}/s, {cpu:.2f} ms of CPU each"
                    print(f"round {number} {case.name}: {told}", flush=True)
    return results


def warm_up(case: Case, in_flight: int) -> int:
    """Episodes of the round that does not count; few of a harness that starts a program for each,
    of which even these take minutes."""
    return min(case.num_episodes, max(in_flight // 4, 1))


def medians(result: Result) -> dict[str, float]:
    """The median of every quantity."""
    return {name: round(statistics.median(values), 2) for name, values in vars(result).items()}


def rounded(result: Result) -> dict[str, list[float]]:
    """Every quantity of every round."""
    return {name: [round(v, 3) for v in values] for name, values in vars(result).items()}


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--chat-episodes", type=int, default=1000)
    parser.add_argument("--null-episodes", type=int, default=16)
    parser.add_argument("--talk-episodes", type=int, default=200)
    parser.add_argument("--tool-episodes", type=int, default=200)
    parser.add_argument("--before", help="python of another checkout, to compare with")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    # A caller's deadline must not leave environments behind: unwind as at Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cases = [Case("chat-1", "gradus-chat", chosen.chat_episodes)]
    if chosen.talk_episodes:
        cases.append(Case("talk-1", "gradus-chat", chosen.talk_episodes, TALK))
    if chosen.tool_episodes:
        cases.append(Case("tools-1", "gradus-chat", chosen.tool_episodes, TOOLS))
    if chosen.before is not None:
        cases += [replace(c, name=f"before-{c.name}", python=chosen.before) for c in cases]
    if chosen.null_episodes:
        cases.append(Case("null-1", "null", chosen.null_episodes))
    if chosen.null_episodes and chosen.tool_episodes:
        cases.append(Case("null-tools-1", "null", chosen.null_episodes, TOOLS))
    results = run(cases, chosen.rounds, chosen.in_flight)
    summary: dict[str, Any] = {name: medians(result) for name, result in results.items()}
    for name, values in summary.items():
        print(name, json.dumps(values))
    for name, other in (("chat-1", "null-1"), ("tools-1", "null-tools-1")):
        if {name, other} <= summary.keys():
            rates = [summary[key]["episodes_per_second"] for key in (name, other)]
            print(f"{name}: {rates[0] / rates[1]:.0f} times the null harness")
    if chosen.output is not None:
        record = {
            "in_flight": chosen.in_flight,
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "medians": summary,
            "rounds": {name: rounded(result) for name, result in results.items()},
        }
        chosen.output.parent.mkdir(parents=True, exist_ok=True)
        chosen.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
