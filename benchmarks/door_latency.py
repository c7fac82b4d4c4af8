"""What the door of the task set `program` adds to a call, over the engine alone, streamed and not.

A program of one file asks the same question again and again, each time for `--tokens` tokens: first
vLLM's own chat completions of the inference server, then the door of an episode in front of the
same server, in each dialect. It tells the time to the first text and to the end; the processor time
is that of the worker, in which door, interception and renderer live, and of the server.

    python benchmarks/door_latency.py --output benchmarks/results/door_latency.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import verifiers.v1 as vf

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from episodes_per_second import cpu_seconds
from policy_talks import policy_seat
from requests_per_second import gradus_server

from gradus.environments.verifiers.table import ProcessSettings, apply
from gradus.processes.table import descendants, living_processes
from gradus.testing.tiny_model import build_tiny_model
from gradus_program.taskset import ProgramConfig, ProgramTaskset

ASKER = """
import http.client, json, os, sys, time
from urllib.parse import urlsplit
address, plan = urlsplit(os.environ["OPENAI_BASE_URL"]), json.loads(sys.stdin.read())
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
key["Content-Type"] = "application/json"
told = []
for number in range(plan["calls"]):
    connection = http.client.HTTPConnection(address.netloc)
    started, first = time.perf_counter(), None
    body = json.dumps(plan["body"]).replace("NUMBER", str(number))
    connection.request("POST", address.path + plan["path"], body, key)
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    if plan["body"]["stream"]:
        for line in reply:
            if first is None and b"delta" in line and (b'"content": "' in line or b"text" in line
                    or b'"content":"' in line) and b'"content":""' not in line:
                first = time.perf_counter() - started
    else:
        reply.read()
    told.append([first, time.perf_counter() - started])
    connection.close()
print(json.dumps(told))
"""
HELLO = [{"role": "user", "content": "NUMBER: a question"}]
BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": HELLO},
    "/responses": {"input": HELLO[0]["content"]},
    "/messages": {"messages": HELLO},
}


async def through_the_door(url: str, model: Path, plan: dict[str, Any]) -> list[list[float]]:
    """An episode of a program that asks so; what it measured."""
    program, rewards = model / "ask.py", model / "rewards.py"
    program.write_text(ASKER)
    rewards.write_text("def rate(output):\n    return 0.0\n")
    keys = {"command": [sys.executable, "ask.py"], "files": [program], "reward": f"{rewards}:rate"}
    tasks = [{"prompt": json.dumps(plan)}]
    task = next(iter(ProgramTaskset(ProgramConfig.model_validate({**keys, "tasks": tasks}))))
    engine: Any = argparse.Namespace(base_url=url)
    sampling = {"max_tokens": plan["tokens"], "ignore_eos": True}
    seat = policy_seat(engine, model, {"id": "gradus-program"}, sampling=sampling)
    player = vf.make_agent(seat)
    async with player:
        trace = await player.run(task)
    assert not trace.errors, trace.errors
    told: list[list[float]] = json.loads(trace.info["program"]["stdout"])
    return told


async def directly(url: str, token: str, plan: dict[str, Any]) -> list[list[float]]:
    """The same program before vLLM's own route of the same server."""
    env = {**os.environ, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": token}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ASKER, stdin=pipe, stdout=pipe, env=env
    )
    out, _ = await process.communicate(json.dumps(plan).encode())
    told: list[list[float]] = json.loads(out)
    return told


async def measure(url: str, pid: int, model: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Medians in milliseconds for each way to ask, in turn, round after round."""
    cases = [("engine", "/chat/completions"), *(("door", path) for path in BODIES)]
    found: dict[str, list[dict[str, float]]] = {}
    for at in range(chosen.rounds + 1):
        for where, path in cases:
            for streamed in (False, True):
                body = {"model": "policy", **BODIES[path], "stream": streamed}
                plan = {"path": path, "body": body, "calls": chosen.calls, "tokens": chosen.tokens}
                if where == "engine":
                    body |= {"max_tokens": chosen.tokens, "ignore_eos": True, "logprobs": True}
                pids = [pid, *(it.pid for it in descendants(pid, living_processes()))]
                server, own = cpu_seconds(pids), time.process_time()
                if where == "engine":
                    told = await directly(url, os.environ["GRADUS_INFERENCE_TOKEN"], plan)
                else:
                    told = await through_the_door(url, model, plan)
                row = {
                    "first_ms": 1e3 * statistics.median(it[0] or it[1] for it in told),
                    "whole_ms": 1e3 * statistics.median(it[1] for it in told),
                    "worker_cpu_ms": 1e3 * (time.process_time() - own) / chosen.calls,
                    "server_cpu_ms": 1e3 * (cpu_seconds(pids) - server) / chosen.calls,
                }
                name = f"{where} {path}{', streamed' if streamed else ''}"
                if at:  # the first round opens what is needed
                    found.setdefault(name, []).append(row)
                    print(name, {key: round(value, 1) for key, value in row.items()}, flush=True)
    return {
        name: {key: round(statistics.median(row[key] for row in rows), 2) for key in rows[0]}
        for name, rows in found.items()
    }


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    apply(ProcessSettings())
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = build_tiny_model(Path(folder) / "model", dtype=torch.float32)
        pid, url = stack.enter_context(gradus_server(Path(folder), model))
        os.environ["GRADUS_INFERENCE_TOKEN"] = os.environ["BENCH_TOKEN"]
        medians = asyncio.run(measure(url, pid, model, chosen))
    load = [round(it, 1) for it in os.getloadavg()]
    record = {"load": load, "calls": chosen.calls, "tokens": chosen.tokens, "medians": medians}
    print(json.dumps(record, indent=1))
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
