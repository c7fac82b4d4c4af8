"""What the orchestrator and a worker need for 16, 256 and 1,024 inference servers.

The orchestrator's own clients ask as many servers over HTTP as there would be: for their status,
which it does every two seconds, and for a new version, which all check before any of them serves
it. The servers are stubs in one other process: they answer at once and count bytes. What is
measured is the asking, not the reading of weights.

    python benchmarks/replicas_scale.py --output benchmarks/results/replicas_scale.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from gradus.environments.policy.replicas import Replicas
from gradus.files import write_json
from gradus.orchestrator.play.concurrency import INTERVAL_SECONDS
from gradus.orchestrator.play.replicas import connect_policy
from gradus.run.paths import RunDirectory
from gradus.wire.events import PolicyPublished
from gradus.wire.inference import ApplyRequest, ApplyResult, EngineStatus

SIZES = (16, 256, 1024)
ROUNDS, VERSIONS, SESSIONS = 10, 5, 500
TICK_SECONDS = 0.005
TOKEN = "t" * 64


class Stub(asyncio.Protocol):
    """One connection to one server that does nothing."""

    version = 0
    num_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        Stub.num_bytes += len(data)
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        lengths = [it for it in head.split(b"\r\n") if it.lower().startswith(b"content-length:")]
        length = int(lengths[0].split(b":")[1]) if lengths else 0
        if len(rest) >= length:
            self._buffer = rest[length:]
            self._answer(rest[:length])

    def _answer(self, body: bytes) -> None:
        answer: ApplyResult | EngineStatus
        if body:
            asked = msgspec.json.decode(body, type=ApplyRequest)
            if not asked.only_verifies:
                Stub.version = asked.version
            answer = ApplyResult(asked.version, 0.0, 0.0, 0.0)
        else:
            answer = EngineStatus(
                *(Stub.version, 1, 100, 3, 0.71, 0, 12_345_678, 23_456_789, False, 1_000_000),
                incarnation="0123456789abcdef",
                run_id="run",
                model="/models/of/some/length",
            )
        text = msgspec.json.encode(answer)
        whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)
        Stub.num_bytes += len(whole)
        self._transport.write(whole)


def serve(number: int, pipe: Connection) -> None:
    """Be all servers; answers each word on the pipe with the bytes until then."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(Stub, "127.0.0.1", 0) for _ in range(number)]
        pipe.send([it.sockets[0].getsockname()[1] for it in servers])
        while await asyncio.to_thread(pipe.recv):
            pipe.send(Stub.num_bytes)

    asyncio.run(run())


async def measured(work: Callable[[], Awaitable[Any]]) -> dict[str, float]:
    """Time, CPU of this process, and by how much its event loop was late."""
    late = 0.0

    async def tick() -> None:
        nonlocal late
        while True:
            due = time.monotonic() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            late = max(late, time.monotonic() - due)

    ticking = asyncio.create_task(tick())
    begun, cpu = time.monotonic(), time.process_time()
    await work()
    found = {"seconds": time.monotonic() - begun, "cpu_seconds": time.process_time() - cpu}
    ticking.cancel()
    return {**found, "late_seconds": late}


async def run_size(number: int, root: Path) -> dict[str, Any]:
    """The numbers of one size."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(number, theirs))
    process.start()
    ports = await asyncio.to_thread(ours.recv)

    def count() -> int:
        ours.send(True)
        return int(ours.recv())

    run_dir = RunDirectory(root / "run")
    for folder in (run_dir.ready, run_dir.secrets):
        folder.mkdir(parents=True)
    run_dir.admin_token.write_text(TOKEN)
    names = [f"inference_{n}" for n in range(number)]
    addresses = [f"http://127.0.0.1:{port}" for port in ports]
    for name, address in zip(names, addresses, strict=True):
        # On another node, where nobody here watches its process.
        write_json(run_dir.ready_file(name), {"base_url": address, "pid": 0})
    told: list[str] = []
    begun, cpu = time.monotonic(), time.process_time()
    policy = await connect_policy(run_dir, names, term=1, tell=told.append)
    connected = {"seconds": time.monotonic() - begun, "cpu_seconds": time.process_time() - cpu}
    await policy.status()
    before = count()
    rounds = [await measured(policy.status) for _ in range(ROUNDS)]
    status_bytes = (count() - before) / ROUNDS
    versions = []
    before = count()
    for version in range(1, VERSIONS + 1):
        published = PolicyPublished(version, 1, "weights/version", "0" * 64)
        versions.append(await measured(lambda published=published: policy.apply(published)))
    apply_bytes = (count() - before) / VERSIONS
    assert len(policy.addresses()) == number, told
    files = len(list(Path("/proc/self/fd").iterdir()))
    await policy.close()
    ours.send(False)
    process.join()
    median = {
        f"{what}_{key}": round(statistics.median(it[key] for it in found), 4)
        for what, found in (("status", rounds), ("version", versions))
        for key in found[0]
    }
    return {
        "replicas": number,
        "connect_seconds": round(connected["seconds"], 2),
        "connect_cpu_seconds": round(connected["cpu_seconds"], 2),
        **median,
        "status_share_of_a_core": round(median["status_cpu_seconds"] / INTERVAL_SECONDS, 4),
        "status_bytes_per_second": round(status_bytes / INTERVAL_SECONDS),
        "version_bytes": round(apply_bytes),
        "open_files": files,
        "choice_microseconds": round(1e6 * choice_seconds(addresses), 1),
    }


def choice_seconds(addresses: list[str]) -> float:
    """CPU that a worker takes to choose the server of a new conversation."""

    async def is_there(_: str, __: bool) -> bool:
        return True

    replicas = Replicas(addresses, is_there=is_there, on_lost=lambda _: None)
    begun = time.process_time()
    for number in range(SESSIONS):
        replicas.choose(f"conversation {number}")
    return (time.process_time() - begun) / SESSIONS


def main() -> None:
    """Measure every size, print, and store."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    chosen = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    results = []
    for number in chosen.sizes:
        with tempfile.TemporaryDirectory(prefix="gradus-bench-") as folder:
            results.append(asyncio.run(run_size(number, Path(folder))))
        print(json.dumps(results[-1]), flush=True)
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
