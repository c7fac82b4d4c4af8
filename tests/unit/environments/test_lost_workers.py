"""Real worker processes that die, stop or block: only what they played is asked for again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from commands import wait_until_async

from gradus.environments import broker
from gradus.environments.broker import Broker
from gradus.environments.pool import PoolSize
from gradus.environments.worker import WORKER_VARIABLE
from gradus.processes.table import read_process

_WORKER = f"""
import faulthandler, os, signal, subprocess, sys, time, zmq
from pathlib import Path

address, mishap = sys.argv[1:]
folder = Path(address.removeprefix("ipc://")).parent
mishaps = {{
    "exit 0": lambda: os._exit(0),
    "exit 1": lambda: os._exit(1),
    "blocked": lambda: time.sleep(1000),
    "memory": lambda: bytearray(2 ** 62),
}}
signal.signal(signal.SIGUSR2, lambda *_: mishaps[mishap]())
faulthandler.register(signal.SIGUSR1)
os.environ["{WORKER_VARIABLE}"] = str(os.getpid())
program = subprocess.Popen(["sleep", "1000"])
(folder / f"{{os.getpid()}}.program").write_text(str(program.pid))
socket = zmq.Context().socket(zmq.ROUTER)
socket.linger = 0
socket.bind(address)
held = []
while True:
    if held and (folder / "release").exists():
        for asker, request in held:
            socket.send_multipart([asker, request, b"reply", b"%d" % os.getpid()])
        held.clear()
    if socket.poll(10):
        asker, request, method, payload = socket.recv_multipart()
        if method == b"run":
            held.append((asker, request))
            with (folder / f"{{os.getpid()}}.asked").open("a") as file:
                file.write(payload.decode() + "\\n")
        else:
            socket.send_multipart([asker, request, b"reply", b""])
"""
_TOLD = {
    "SIGKILL": "was killed by SIGKILL (out of memory, or killed by hand), from outside",
    "SIGSTOP": "was stopped by a signal from outside",
    "exit 0": "ended with exit code 0",
    "exit 1": "ended with exit code 1",
    "blocked": "answered nothing for 0.6 s, the longest agent.timeout.scoring",
    "memory": "ended with exit code 1",
}
_OUTSIDE = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}


class _Process(subprocess.Popen[bytes]):
    """With the words of `multiprocessing`, and as its own death pipe."""

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def join(self, timeout: float) -> None:
        self.wait(timeout)

    def is_alive(self) -> bool:
        return self.poll() is None

    def close(self) -> None:
        """As the pipe."""


@dataclass
class Pool:
    """A broker of two real workers, and a client that asks again for what is lost."""

    folder: Path
    mishap: str
    workers: list[_Process] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    """Seed → how often its episode was answered."""
    lost: list[str] = field(default_factory=list)
    context: zmq.asyncio.Context = field(default_factory=zmq.asyncio.Context)

    def start(self, address: str) -> Any:
        command = [sys.executable, "-S", "-c", _WORKER, address, self.mishap]
        paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
        self.workers.append(
            _Process(command, env={**os.environ, **paths}, stderr=subprocess.DEVNULL)
        )
        return self.workers[-1], self.workers[-1]

    @property
    def living(self) -> list[_Process]:
        return [worker for worker in self.workers if worker.is_alive()]

    def asked(self, worker: _Process) -> list[str]:
        file = self.folder / f"{worker.pid}.asked"
        return file.read_text().split() if file.exists() else []

    def program_of(self, worker: _Process) -> int:
        return int((self.folder / f"{worker.pid}.program").read_text())

    async def play(self, seed: str) -> None:
        await self.client.send_multipart([seed.encode(), b"run", seed.encode()])

    async def listen(self) -> None:
        while True:
            request, kind, content = await self.client.recv_multipart()
            assert kind == b"reply"
            if content.isdigit():
                self.answers[request.decode()] += 1
                continue
            refusal = msgspec.msgpack.decode(content)["error"]
            assert refusal.startswith("EnvironmentLost: worker process ")
            self.lost.append(request.decode())
            await self.play(request.decode())

    async def hit(self, worker: _Process) -> None:
        worker.send_signal(_OUTSIDE.get(self.mishap, signal.SIGUSR2))
        await wait_until_async(lambda: not worker.is_alive())

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        address = f"ipc://{self.folder / 'run'}"
        # A busy machine must not make a worker look blocked where that is not the mishap.
        blocked_seconds = 0.6 if self.mishap in ("blocked", "SIGSTOP") else 60.0
        size = PoolSize(2, False, 128, 2, 1, blocked_seconds=blocked_seconds)
        served = Broker(
            address, size, self.folder, start_worker=self.start, report=self.reports.append
        )
        self.client = self.context.socket(zmq.DEALER)
        self.client.setsockopt(zmq.LINGER, 0)
        self.client.connect(address)
        tasks = [asyncio.create_task(work) for work in (served.run(), self.listen())]
        try:
            await self.loaded(served)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.client.close()
            self.context.term()
            for worker in self.workers:
                with contextlib.suppress(OSError):
                    os.kill(self.program_of(worker), signal.SIGKILL)

    async def loaded(self, served: Broker) -> None:
        self.served = served
        await wait_until_async(
            lambda: (
                len(self.living) == 2
                and {w.pid for w in served.workers} == {w.pid for w in self.living}
                and not any(worker.is_loading for worker in served.workers)
            )
        )


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {
        "ASK_SECONDS": 0.02,
        "WATCH_INTERVAL_SECONDS": 0.02,
        "STOPPED_SECONDS": 0.4,
        "SILENT_SECONDS": 0.3,
        "STACKS_SECONDS": 0.1,
    }.items():
        monkeypatch.setattr(broker, name, seconds)


async def lose_a_worker(pool: Pool, seeds: list[str]) -> None:
    """With all episodes of `seeds` played by two workers: only those of one are asked for again."""
    victim, other = pool.living
    await wait_until_async(lambda: {*pool.asked(victim), *pool.asked(other)} == set(seeds))
    its, program = pool.asked(victim), pool.program_of(victim)
    pool.lost.clear()
    await pool.hit(victim)
    await wait_until_async(lambda: len(pool.lost) == len(its))
    assert sorted(pool.lost) == sorted(its)
    await pool.loaded(pool.served)
    assert other in pool.living
    await wait_until_async(lambda: read_process(program) is None)


@pytest.mark.shows("F06")
@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("mishap", ["SIGKILL", "SIGSTOP", "exit 0", "exit 1", "blocked", "memory"])
async def test_a_lost_worker_costs_its_own_episodes_which_are_played_elsewhere(
    tmp_path: Path, mishap: str
) -> None:
    pool = Pool(tmp_path, mishap)
    seeds: list[str] = []
    async with pool.open():
        for num_episodes in (0, 1, 8):
            new = [f"group{number // 2}.{num_episodes}.{number}" for number in range(num_episodes)]
            for seed in new:
                await pool.play(seed)
            seeds += new
            await lose_a_worker(pool, seeds)
        assert pool.answers.total() == 0
        (tmp_path / "release").touch()
        await wait_until_async(lambda: pool.answers.total() == len(seeds))
    assert set(pool.answers.values()) == {1}
    lost = [report for report in pool.reports if "lost" in report]
    assert len(lost) == 3
    assert all(report["is_replaced"] for report in lost)
    assert all(_TOLD[mishap] in report["lost"] for report in lost)


@pytest.mark.shows("F06", "F13")
@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
async def test_workers_that_are_lost_too_often_in_an_hour_end_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "REPLACED_PER_HOUR", 1)
    pool = Pool(tmp_path, "SIGKILL")
    async with pool.open():
        for _ in range(2):
            await pool.hit(pool.living[0])
            await wait_until_async(lambda: any("lost" in it for it in pool.reports))
            if len(pool.workers) == 2:
                await pool.loaded(pool.served)
        await wait_until_async(lambda: sum("lost" in it for it in pool.reports) == 2)
    lost = [report for report in pool.reports if "lost" in report]
    assert [report["is_replaced"] for report in lost] == [True, False]
    assert (
        "was killed by SIGKILL (out of memory, or killed by hand), from outside" in lost[0]["lost"]
    )


@pytest.mark.shows("F14")
@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
async def test_a_kill_for_want_of_memory_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([7, 8, 8])
    monkeypatch.setattr(broker, "memory_kills", lambda: next(counts))
    monkeypatch.setattr(broker, "resident_bytes", lambda _: 3 * 2**30)
    pool = Pool(tmp_path, "SIGKILL")
    async with pool.open():
        for _ in range(2):
            await lose_a_worker(pool, [])
    of_memory, of_somebody = [report["lost"] for report in pool.reports if "lost" in report]
    assert "from outside: the kernel had no memory left; it held 3.0 GiB" in of_memory
    assert of_somebody.endswith("(out of memory, or killed by hand), from outside; it held 3.0 GiB")
