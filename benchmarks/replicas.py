"""Two inference servers of a run against one, and where a worker sends the calls of an episode.

The same model and the same conversations in turn, each of several calls whose prompt holds what was
said before:

- `one`: one server;
- `two, by session`: two servers; the worker keeps a conversation at one, as a run does;
- `two, at random`: two servers; each call goes to either, as without sessions.

Then calls of one token, with and without a choice between servers, and the choice alone.

    python benchmarks/replicas.py --output benchmarks/results/replicas.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import verifiers.v1 as vf

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from episodes_per_second import cpu_seconds
from requests_per_second import processor_flags
from running import RunningProcess

from gradus.config import InferenceConfig, InferenceProcessConfig, ModelConfig
from gradus.environments.policy.replicas import Replica, Replicas
from gradus.environments.verifiers.engine_client import EngineClient
from gradus.files import write_atomically
from gradus.inference.guard import Tokens
from gradus.processes.table import descendants, living_processes
from gradus.run.paths import RunDirectory
from gradus.testing.tiny_model import build_tiny_model
from gradus.wire.inference import EngineStatus, join_addresses

NAMES = ("inference_0", "inference_1")
FIRST_TOKENS, FURTHER_TOKENS, REPLY_TOKENS = 192, 24, 16
IN_FLIGHT = 32
NUM_CHOICES = 20_000


@dataclass
class Servers:
    """Two servers of one run."""

    urls: list[str]
    pids: list[int]
    token: str

    def status(self, url: str) -> EngineStatus:
        headers = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(f"{url}/gradus/status", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            return msgspec.json.decode(response.read(), type=EngineStatus)

    def cpu_seconds(self) -> float:
        below = [p.pid for pid in self.pids for p in descendants(pid, living_processes())]
        return cpu_seconds([*self.pids, *below])


@contextmanager
def started(root: Path) -> Iterator[Servers]:
    """Both servers, with one thread each, as on two cores."""
    model = build_tiny_model(
        root / "model", dtype=torch.float32, hidden_size=256, num_layers=6, max_length_tokens=1024
    )
    run_dir = RunDirectory(root / "run")
    Tokens.read_or_make(run_dir)
    with ExitStack() as stack:
        running = []
        for name in NAMES:
            config = InferenceProcessConfig(
                run_dir=str(run_dir.root),
                term=0,
                model=ModelConfig(name=str(model), max_length_tokens=1024),
                seed=0,
                inference=InferenceConfig(kv_cache_gib=0.5, dtype="float32", replicas=2),
                process=name,
            )
            file = run_dir.config / f"{name}.json"
            write_atomically(file, config.model_dump_json().encode())
            command = [sys.executable, "-m", "gradus.cli.main", "inference", "@", str(file)]
            process = RunningProcess(
                command,
                ready_file=run_dir.ready_file(name),
                log_file=run_dir.logs / f"{name}.log",
                start_timeout_seconds=240,
            )
            running.append(stack.enter_context(process))
        urls = [str(process.wait_ready()["base_url"]) for process in running]
        token = run_dir.inference_token.read_text().strip()
        os.environ["BENCH_TOKEN"] = token
        yield Servers(urls, [process.process.pid for process in running], token)


class RandomReplicas(Replicas):
    """Any replica for any call."""

    def choose(self, session_id: str | None) -> Replica | None:  # noqa: ARG002
        return random.choice([replica for replica in self.all if replica.is_up])


def client_of(urls: list[str], *, by_session: bool = True) -> EngineClient:
    config = vf.TrainClientConfig(base_url=join_addresses(urls), api_key_var="BENCH_TOKEN")
    client = EngineClient(config)
    if not by_session:
        client._replicas = RandomReplicas(
            urls, is_there=client._is_there, on_lost=client._disconnect
        )
    return client


async def ask(
    client: EngineClient, prompt: list[int], session: str, salt: str, max_tokens: int
) -> list[int]:
    sampling = {"temperature": 1.0, "max_tokens": max_tokens, "min_tokens": max_tokens}
    sampling |= {"logprobs": 1, "ignore_eos": True, "seed": 1}
    body = {"token_ids": prompt, "sampling_params": sampling, "cache_salt": salt}
    answer = await client.post(
        f"{client.base_url}/inference/v1/generate",
        body=body,
        options={"headers": {"X-Session-ID": session}},
    )
    reply: list[int] = msgspec.json.decode(answer.content)["choices"][0]["token_ids"]
    return reply


async def converse(client: EngineClient, *, count: int, turns: int, salt: str) -> None:
    """So many conversations, some at once."""
    waiting = iter(range(count))

    async def play() -> None:
        for number in waiting:
            chance = random.Random(number)
            prompt = [chance.randrange(5, 60) for _ in range(FIRST_TOKENS)]
            for _ in range(turns):
                prompt += await ask(client, prompt, f"{salt} {number}", salt, REPLY_TOKENS)
                prompt += [chance.randrange(5, 60) for _ in range(FURTHER_TOKENS)]

    await asyncio.gather(*(play() for _ in range(IN_FLIGHT)))


async def short_calls(client: EngineClient, *, count: int, salt: str) -> None:
    """Calls of one token, all of different sessions."""
    waiting = iter(range(count))

    async def play() -> None:
        for number in waiting:
            prompt = [5 + (number * 7 + at) % 60 for at in range(30)]
            await ask(client, prompt, f"{salt} {number}", salt, 1)

    await asyncio.gather(*(play() for _ in range(256)))


def measure(servers: Servers, case: str, what: str, plan: argparse.Namespace) -> dict[str, float]:
    """One round of one case."""
    urls = servers.urls[:1] if case == "one" else servers.urls
    salt = f"{case} {what} {time.monotonic()}"

    async def play() -> None:
        client = client_of(urls, by_session=case != "two, at random")
        try:
            if what == "conversations":
                await converse(client, count=plan.conversations, turns=plan.turns, salt=salt)
            else:
                await short_calls(client, count=plan.calls, salt=salt)
        finally:
            await client.close()

    before, cpu = [servers.status(url) for url in urls], servers.cpu_seconds()
    own, began = time.process_time(), time.perf_counter()
    asyncio.run(play())
    seconds, own = time.perf_counter() - began, time.process_time() - own
    after, cpu = [servers.status(url) for url in urls], servers.cpu_seconds() - cpu
    pairs = list(zip(before, after, strict=True))
    queries = sum(b.prefix_queries - a.prefix_queries for a, b in pairs)
    generated = sum(b.generated_tokens - a.generated_tokens for a, b in pairs)
    calls = plan.calls if what == "calls" else plan.conversations * plan.turns
    return {
        "calls_per_second": calls / seconds,
        "generated_tokens_per_second": generated / seconds,
        "prefix_hit_share": sum(b.prefix_hits - a.prefix_hits for a, b in pairs) / max(queries, 1),
        "server_cpu_ms_per_call": 1000 * cpu / calls,
        "client_cpu_ms_per_call": 1000 * own / calls,
    }


async def choice_microseconds(number: int) -> float:
    """CPU of the worker for a call that is sent to one of two, without the call."""

    async def answered(*_: object) -> bool:
        return True

    replicas = Replicas(["http://a", "http://b"], is_there=answered, on_lost=lambda _: None)
    began = time.process_time()
    for call in range(number):
        await replicas.ask(f"session {call // 4}", answered)
    spent = time.process_time() - began
    await replicas.close()
    return 1e6 * spent / number


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=64, help="in a round")
    parser.add_argument("--turns", type=int, default=6, help="calls of a conversation")
    parser.add_argument("--calls", type=int, default=1024, help="of one token, in a round")
    parser.add_argument("--output", type=Path)
    plan = parser.parse_args()
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="gradus-bench-") as folder,
        started(Path(folder)) as servers,
    ):
        for number in range(plan.rounds + 1):
            for what, cases in {
                "conversations": ("one", "two, by session", "two, at random"),
                "calls": ("one", "two, by session"),
            }.items():
                for case in cases:
                    found = measure(servers, case, what, plan)
                    # The first round opens and fills what the others find.
                    if number:
                        rounds.setdefault(what, {}).setdefault(case, []).append(found)
                        shown = ", ".join(f"{k} {v:.3g}" for k, v in found.items())
                        print(f"{what}, {case}: {shown}", flush=True)
    medians = {
        what: {
            case: {key: round(statistics.median(it[key] for it in series), 4) for key in series[0]}
            for case, series in cases.items()
        }
        for what, cases in rounds.items()
    }
    choice = round(asyncio.run(choice_microseconds(NUM_CHOICES)), 2)
    print(json.dumps({"medians": medians, "choice_microseconds": choice}, indent=1))
    if plan.output is not None:
        record = {
            "cores": len(os.sched_getaffinity(0)),
            "processor": processor_flags(),
            "load_at_the_end": os.getloadavg()[0],
            "plan": {k: v for k, v in vars(plan).items() if k != "output"},
            "choice_microseconds": choice,
            "medians": medians,
            "rounds": rounds,
        }
        plan.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
