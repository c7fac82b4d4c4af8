"""What stands between ordinary clients and two servers: what it costs a request.

Stub servers in processes of their own answer a chat request at once; asked are, in turn,

- `one server`: no choice;
- `in the client`: the client chooses, as a worker of a run does;
- `own`: `gradus.environments.policy.router` behind the guard;
- `vllm-router`: alone, as nobody should use it;
- `vllm-router behind the guard`: the guard needs somebody who passes the request on.

    python benchmarks/serve_replicas.py [--vllm-router FILE] [--output FILE]

FILE is the program of vllm-router 0.1.17, in an environment of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import uvloop
from aiohttp import web

from gradus.environments.policy.replicas import Replicas
from gradus.environments.policy.router import Router
from gradus.inference.guard import Guard, ServedToken
from gradus.inference.http_server import build_http_server
from gradus.processes.listening import bind

TOKEN = "a-token-of-this-benchmark"
BODY = {"model": "m", "messages": [{"role": "user", "content": "word " * 200}]}
ANSWER = {"choices": [{"message": {"role": "assistant", "content": "word " * 100}}]}
PATH = "/v1/chat/completions"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stub(port: int) -> None:
    """A server whose engine takes no time."""

    async def chat(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response(ANSWER)

    async def ok(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application()
    app.add_routes([web.post(PATH, chat), web.get("/health", ok), web.get("/v1/models", ok)])
    web.run_app(app, host="127.0.0.1", port=port, print=None)


def front(port: int, behind: list[str]) -> None:
    """The guard, and who passes requests on."""

    async def serve() -> None:
        with bind("127.0.0.1", port, allow_public_bind=False) as listener:
            server = build_http_server(Guard(Router(behind), ServedToken.of(TOKEN)))
            await server.serve(sockets=[listener])

    uvloop.run(serve())


@contextlib.contextmanager
def started(target: Callable[..., None], *args: object) -> Iterator[multiprocessing.Process]:
    process = multiprocessing.get_context("spawn").Process(target=target, args=args)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def routed(program: Path, port: int, behind: list[str], log: Path) -> Iterator[int]:
    """vllm-router, whose admin routes only this machine reaches; its pid."""
    words = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *behind]
    words += ["--policy", "consistent_hash", "--log-level", "error"]
    words += ["--prometheus-port", str(free_port()), "--health-check-interval-secs", "1"]
    with log.open("wb") as output:
        process = subprocess.Popen([str(program), *words], stdout=output, stderr=output)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


async def answers(url: str) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with asyncio.timeout(60), aiohttp.ClientSession(headers=headers) as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(f"{url}{PATH}", json=BODY) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)


def cpu_seconds(pids: list[int]) -> float:
    """Of these processes and their threads."""
    spent = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        spent += int(fields[11]) + int(fields[12])
    return spent / os.sysconf("SC_CLK_TCK")


async def asked(urls: list[str], *, at_once: int, seconds: float) -> tuple[float, float]:
    """Requests a second, and the milliseconds of the fastest tenth: the least that others on this
    machine disturbed."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    took: list[float] = []
    async with aiohttp.ClientSession(
        headers=headers, connector=aiohttp.TCPConnector(limit=0)
    ) as session:

        async def is_there(*_: object) -> bool:
            return True

        replicas = Replicas(urls, is_there=is_there, on_lost=lambda _: None)

        async def play(number: int) -> None:
            turn = 0
            while time.perf_counter() < until:
                name = f"session {number} {turn // 8}"

                async def post(address: str, name: str = name) -> None:
                    async with session.post(
                        f"{address}{PATH}", json=BODY, headers={"X-Session-ID": name}
                    ) as response:
                        await response.read()
                        assert response.status == 200, response.status

                ask: Awaitable[None] = post(urls[0])
                if len(urls) > 1:
                    ask.close()  # type: ignore[attr-defined]
                    ask = replicas.ask(name, post)
                began = time.perf_counter()
                await ask
                took.append(time.perf_counter() - began)
                turn += 1

        until = time.perf_counter() + seconds
        await asyncio.gather(*(play(number) for number in range(at_once)))
        await replicas.close()
    return len(took) / seconds, 1000 * statistics.quantiles(took, n=10)[0]


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-router", type=Path)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    plan = parser.parse_args()
    with contextlib.ExitStack() as stack:
        ports = [free_port(), free_port()]
        for port in ports:
            stack.enter_context(started(stub, port))
        stubs = [f"http://127.0.0.1:{port}" for port in ports]
        own = free_port()
        between = {"own": [stack.enter_context(started(front, own, stubs)).pid or 0]}
        cases = {"one server": stubs[:1], "in the client": stubs}
        cases["own"] = [f"http://127.0.0.1:{own}"]
        if plan.vllm_router is not None:
            asyncio.run(answers(stubs[0]))
            asyncio.run(answers(stubs[1]))
            port, guarded = free_port(), free_port()
            log = Path(os.devnull)
            pid = stack.enter_context(routed(plan.vllm_router, port, stubs, log))
            between["vllm-router"] = [pid]
            cases["vllm-router"] = [f"http://127.0.0.1:{port}"]
            guard = stack.enter_context(started(front, guarded, cases["vllm-router"]))
            between["vllm-router behind the guard"] = [pid, guard.pid or 0]
            cases["vllm-router behind the guard"] = [f"http://127.0.0.1:{guarded}"]
        for urls in cases.values():
            for url in urls:
                asyncio.run(answers(url))
        found: dict[str, list[tuple[float, float, float]]] = {}
        for number in range(plan.rounds + 1):
            for case, urls in cases.items():
                cpu = cpu_seconds(between.get(case, []))
                rate, _ = asyncio.run(asked(urls, at_once=32, seconds=plan.seconds))
                cpu = (cpu_seconds(between.get(case, [])) - cpu) / (rate * plan.seconds)
                _, alone = asyncio.run(asked(urls, at_once=1, seconds=plan.seconds / 2))
                if number:  # the first round opens connections
                    found.setdefault(case, []).append((rate, alone, 1000 * cpu))
    table = {
        case: {
            "requests_per_second": round(statistics.median(it[0] for it in rounds), 1),
            "milliseconds_alone": round(min(it[1] for it in rounds), 3),
            "cpu_ms_between": round(statistics.median(it[2] for it in rounds), 3),
        }
        for case, rounds in found.items()
    }
    print(json.dumps(table, indent=1))
    if plan.output is not None:
        record = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0], "cases": table}
        plan.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
