"""Replies of one token per second: gradus's engine, plain vLLM, and the environments alone.

The same model, the same prompts, one engine computing at a time, rounds in turn:

- `gradus`: the inference server of a run, asked as the environments do;
- `vllm`: `vllm.entrypoints.openai.api_server`, asked by the OpenAI client with token ids;
- `environment`: the environment process with one worker and an engine that answers at once,
  episodes of one turn, which bounds what a run can ask for.

Core-seconds are those of the processes of each side, children included.

    python benchmarks/requests_per_second.py --output benchmarks/results/requests_per_second.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
import verifiers.v1 as vf

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from commands import wait_until
from episodes_per_second import Bench, Case, cpu_seconds
from episodes_per_second import Result as PlayedEpisodes
from running import RunningInference

from gradus.config import InferenceConfig, InferenceProcessConfig, ModelConfig
from gradus.environments.verifiers.engine_client import EngineClient
from gradus.processes.table import descendants, living_processes
from gradus.testing.tiny_model import build_tiny_model

PROMPT_TOKENS = 30
KV_CACHE_BYTES = 1 << 29
START_SECONDS = 240.0
WARM_UP_REQUESTS = 64
IN_FLIGHT = (64, 512, 4096)
Ask = Callable[[int], Awaitable[object]]


@dataclass
class Measured:
    """One side at one number in flight; one entry per round."""

    requests_per_second: list[float] = field(default_factory=list)
    server_ms: list[float] = field(default_factory=list)
    """CPU time of the engine's processes, per request."""
    client_ms: list[float] = field(default_factory=list)
    """CPU time of who asks, per request."""


@dataclass(frozen=True)
class Side:
    """A server and a way to ask it."""

    name: str
    pid: int
    ask: Ask

    def pids(self) -> list[int]:
        """Its processes."""
        return [self.pid, *(p.pid for p in descendants(self.pid, living_processes()))]


def prompt(number: int) -> list[int]:
    """Another prompt for each request, so that no cache helps."""
    return [5 + (number * 7 + at * (1 + number % 5)) % 60 for at in range(PROMPT_TOKENS)]


@contextmanager
def gradus_server(root: Path, model: Path) -> Iterator[tuple[int, str]]:
    """The inference process of a run; its process and address."""
    config = InferenceProcessConfig(
        run_dir=str(root / "run"),
        term=0,
        model=ModelConfig(name=str(model), max_length_tokens=512),
        seed=0,
        inference=InferenceConfig(
            kv_cache_gib=KV_CACHE_BYTES / (1 << 30), max_num_seqs=256, dtype="float32"
        ),
    )
    with RunningInference(config) as server:
        server.wait_ready()
        os.environ["BENCH_TOKEN"] = server.data_token
        yield server.process.pid, server.base_url


@contextmanager
def plain_vllm(model: Path) -> Iterator[tuple[int, str]]:
    """vLLM's own OpenAI server with its defaults, except what would favour one side."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options: dict[str, object] = {
        "model": model,
        "served-model-name": "policy",
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-model-len": 512,
        "max-num-seqs": 256,
        "kv-cache-memory-bytes": KV_CACHE_BYTES,
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    arguments += ["--enforce-eager", "--disable-uvicorn-access-log"]
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(f"{url}/health"), timeout_seconds=START_SECONDS, what=url)
        yield process.pid, url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def answers(url: str) -> bool:
    """Whether a server says that it is well."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


async def measure(side: Side, num_requests: int, in_flight: int) -> tuple[float, float, float]:
    """Requests per second, and CPU milliseconds of the server and of the client per request."""
    waiting = iter(range(num_requests))

    async def player() -> None:
        for number in waiting:
            await side.ask(number)

    pids = side.pids()
    server, own, started = cpu_seconds(pids), time.process_time(), time.perf_counter()
    await asyncio.gather(*(player() for _ in range(in_flight)))
    seconds = time.perf_counter() - started
    used = cpu_seconds(pids) - server, time.process_time() - own
    return num_requests / seconds, *(1000 * spent / num_requests for spent in used)


def gradus_ask(url: str) -> tuple[Ask, Callable[[], Awaitable[None]]]:
    """As verifiers' train client asks."""
    client = EngineClient(vf.TrainClientConfig(base_url=url, api_key_var="BENCH_TOKEN"))
    sampling = {"temperature": 1.0, "max_tokens": 1, "logprobs": 1, "stop_token_ids": [2]}

    async def ask(number: int) -> object:
        body = {"model": "policy", "token_ids": prompt(number), "sampling_params": sampling}
        return await client.post(f"{url}/inference/v1/generate", body=body)

    return ask, client.close


def openai_ask(url: str, in_flight: int) -> tuple[Ask, Callable[[], Awaitable[None]]]:
    """As users of vLLM ask."""
    http = openai.DefaultAsyncHttpxClient(limits=httpx.Limits(max_connections=in_flight))
    client = openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", http_client=http, timeout=300.0
    )

    async def ask(number: int) -> object:
        return await client.completions.create(
            model="policy", prompt=prompt(number), max_tokens=1, temperature=1.0, logprobs=1
        )

    return ask, client.close


async def engine_round(name: str, pid: int, url: str, plan: Plan) -> tuple[float, float, float]:
    """One round of one engine; the first requests open what they need and do not count."""
    ask, close = gradus_ask(url) if name == "gradus" else openai_ask(url, plan.in_flight)
    side = Side(name, pid, ask)
    try:
        await measure(side, WARM_UP_REQUESTS, WARM_UP_REQUESTS)
        return await measure(side, plan.num_requests, plan.in_flight)
    finally:
        await close()


@dataclass(frozen=True)
class Plan:
    """How much is asked."""

    in_flight: int
    num_requests: int

    @classmethod
    def of(cls, in_flight: int, num_requests: int) -> Plan:
        """At least as many requests as are in flight."""
        return cls(in_flight, max(in_flight, num_requests))


def environment_round(bench: Bench, environment: Any, plan: Plan) -> tuple[float, float, float]:
    """One round of the environments; their CPU time stands where the server's does."""
    played = PlayedEpisodes()
    asyncio.run(bench.play(environment, plan.num_requests, plan.in_flight, played))
    client = played.client_cpu_ms[0] + played.engine_cpu_ms[0]
    return played.episodes_per_second[0], played.environment_cpu_ms[0], client


def run(chosen: argparse.Namespace) -> dict[str, dict[str, Measured]]:
    """Measure each side at each number in flight, in turn."""
    results: dict[str, dict[str, Measured]] = {}
    with tempfile.TemporaryDirectory(prefix="gradus-bench-") as folder, ExitStack() as stack:
        root = Path(folder)
        model = build_tiny_model(root / "model", dtype=torch.float32)
        engines = {"gradus": stack.enter_context(gradus_server(root, model))}
        if not chosen.without_vllm:
            engines["vllm"] = stack.enter_context(plain_vllm(model))
        (root / "bench").mkdir()
        bench = Bench(root / "bench", stack)
        environment = bench.start(Case("chat-1", "gradus-chat", 0))
        asyncio.run(bench.play(environment, 64, 64, PlayedEpisodes()))
        for _ in range(chosen.rounds):
            for in_flight in chosen.in_flight:
                plan = Plan.of(in_flight, chosen.requests)
                measured = {
                    name: asyncio.run(engine_round(name, pid, url, plan))
                    for name, (pid, url) in engines.items()
                }
                episodes = Plan.of(in_flight, chosen.episodes)
                measured["environment"] = environment_round(bench, environment, episodes)
                for name, values in measured.items():
                    keep(results, f"{in_flight}", name, values)
    return results


def keep(
    results: dict[str, dict[str, Measured]], case: str, name: str, values: tuple[float, ...]
) -> None:
    """Note and print one measurement."""
    measured = results.setdefault(case, {}).setdefault(name, Measured())
    for series, value in zip(vars(measured).values(), values, strict=True):
        series.append(round(value, 3))
    print(
        f"{case} in flight, {name}: {values[0]:.0f}/s, {values[1]:.2f} + {values[2]:.2f} ms CPU",
        flush=True,
    )


def processor_flags() -> list[str]:
    """The instructions for matrices that this processor has."""
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return [name for name in wanted if name in flags]


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=1024, help="of each engine in a round")
    parser.add_argument("--episodes", type=int, default=512, help="of the environment in a round")
    parser.add_argument("--in-flight", type=int, nargs="+", default=list(IN_FLIGHT))
    parser.add_argument("--without-vllm", action="store_true")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    results = run(chosen)
    medians = {
        case: {
            name: {key: round(statistics.median(series), 3) for key, series in vars(m).items()}
            for name, m in sides.items()
        }
        for case, sides in results.items()
    }
    print(json.dumps(medians, indent=1))
    if chosen.output is not None:
        record = {
            "cores": len(os.sched_getaffinity(0)),
            "processor": processor_flags(),
            "python": platform.python_version(),
            "medians": medians,
            "rounds": {
                case: {name: vars(m) for name, m in sides.items()}
                for case, sides in results.items()
            },
        }
        chosen.output.parent.mkdir(parents=True, exist_ok=True)
        chosen.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
