"""`gradus serve --replicas`: real processes that stand in for servers, one of which is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import wait_until

from gradus.cli.serve import _replica_folder, _replica_specs, _serve_in_front
from gradus.config import ServeConfig
from gradus.environments.policy.router import Router
from gradus.errors import GradusError, ProcessError
from gradus.plan.machine import check
from gradus.processes.listening import bind
from gradus.processes.started import ChildSilent
from gradus.processes.table import read_process

pytestmark = pytest.mark.slow

# A server on the socket that it inherits; it answers with its name and pid.
STUB = """
import http.server, json, os, pathlib, socket, sys
name, ready = sys.argv[1:]
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = f"{name} {os.getpid()}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
server.socket = socket.socket(fileno=int(os.environ["GRADUS_LISTENER"]))
port = server.socket.getsockname()[1]
path = pathlib.Path(ready)
path.with_suffix(".tmp").write_text(json.dumps({"base_url": f"http://127.0.0.1:{port}"}))
path.with_suffix(".tmp").rename(path)
server.serve_forever()
"""
SERVE = """
import json, os, pathlib, sys
from gradus.cli.serve import serve_replicas
from gradus.errors import GradusError
from gradus.processes.listening import bind
from gradus.processes.started import Listens, ProcessSpec
folder, restarts, stub = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
specs = [
    ProcessSpec(
        name,
        (sys.executable, "-c", stub, name, str(folder / f"{name}.json")),
        dict(os.environ),
        log=folder / f"{name}.log",
        ready_file=folder / f"{name}.json",
        restarts=restarts,
        listens=Listens("127.0.0.1", 0),
    )
    for name in ("inference_0", "inference_1")
]
try:
    listener = bind("127.0.0.1", 0, allow_public_bind=False)
    tell = lambda url: print(url, flush=True)
    serve_replicas(specs, listener, tell, token=None, own_token="own")
except GradusError as error:
    print(error)
    sys.exit(error.exit_code)
"""


class Server:
    """What is served, its processes and what it printed."""

    def __init__(self, folder: Path, restarts: int) -> None:
        self.folder = folder
        self.out = folder / "out"
        words = [sys.executable, "-c", SERVE, str(folder), str(restarts), STUB]
        with self.out.open("wb") as output:
            self.process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)

    def printed(self) -> str:
        return self.out.read_text()

    def url(self) -> str:
        wait_until(lambda: "http://" in self.printed() or self.process.poll() is not None)
        return next(line for line in self.printed().splitlines() if line.startswith("http://"))

    def pids(self) -> dict[str, int]:
        processes = json.loads((self.folder / "pids.json").read_text())["processes"]
        return {it["name"]: it["pid"] for it in processes}

    def ask(self) -> tuple[str, int]:
        """Name and pid of the one that answered."""
        with urllib.request.urlopen(f"{self.url()}/v1/models", timeout=30) as response:
            name, pid = response.read().decode().split()
            return name, int(pid)


@contextmanager
def serving(folder: Path, *, restarts: int) -> Iterator[Server]:
    server = Server(folder, restarts)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait(30)


@pytest.mark.shows("F09")
def test_a_killed_replica_costs_no_answer_and_comes_back_and_sigterm_ends_all(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, restarts=3) as server:
        assert server.ask()[0] in ("inference_0", "inference_1")
        first = server.pids()
        os.kill(first["inference_0"], signal.SIGKILL)
        answered: set[tuple[str, int]] = set()

        def is_back() -> bool:
            answered.add(server.ask())
            return any(name == "inference_0" and pid != first[name] for name, pid in answered)

        wait_until(is_back, what="inference_0 answers again")
        assert server.pids()["inference_1"] == first["inference_1"]
        assert "inference_0 was killed by SIGKILL" in server.printed()
        assert "restart 1 of 3 in " in server.printed()
        last = list(server.pids().values())
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        server.process.wait(30)
        assert time.monotonic() - began < 10
        assert [pid for pid in last if read_process(pid)] == []


@pytest.mark.shows("F09")
def test_a_replica_without_restarts_stays_out_and_the_last_one_ends_it(tmp_path: Path) -> None:
    with serving(tmp_path, restarts=0) as server:
        server.url()
        pids = server.pids()
        os.kill(pids["inference_1"], signal.SIGKILL)
        wait_until(lambda: "inference_1 stays out, and the others serve" in server.printed())
        assert [server.ask()[0] for _ in range(4)] == ["inference_0"] * 4
        os.kill(pids["inference_0"], signal.SIGKILL)
        assert server.process.wait(30) == 75
        assert "inference_0 was killed by SIGKILL" in server.printed()
        assert "Traceback" not in server.printed()


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"addresses": "others.txt"}, "inference.addresses: only an RL run asks servers"),
        ({"host": "0.0.0.0"}, "inference.host: '0.0.0.0' can be reached by others"),
        ({"port": 65535, "replicas": 3}, "inference.port: 65535: replicas count up"),
    ],
)
def test_what_no_server_heeds_is_refused(own: dict[str, Any], told: str, tmp_path: Path) -> None:
    config = ServeConfig(model=str(tmp_path), inference=own)  # type: ignore[arg-type]
    assert any(str(problem).startswith(told) for problem in check(config))


def test_each_replica_has_its_gpus_its_share_of_cores_and_a_token_of_its_own(
    tmp_path: Path,
) -> None:
    config = ServeConfig(model="tiny", inference={"replicas": 2, "port": 8000, "gpus": [0, 1]})  # type: ignore[arg-type]
    variables = {name: {"CUDA_VISIBLE_DEVICES": name[-1]} for name in config.inference.processes}
    specs, token = _replica_specs(config, variables, tmp_path, num_cores=5)
    written = json.loads((tmp_path / "serve.json").read_text())["inference"]
    assert [written[key] for key in ("replicas", "port", "gpus")] == [1, 0, None]
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["0", "1"]
    assert {spec.env["OMP_NUM_THREADS"] for spec in specs} == {"2"}
    # The token stands in a file that only this user reads, and in no list of processes.
    assert not any(token in word for spec in specs for word in spec.argv)
    assert (tmp_path / "token").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (ChildSilent("inference_0", "it was silent", "silence"), ["inference_0.log"]),
        (ProcessError("no"), []),
    ],
)
def test_the_logs_that_a_failure_names_are_left_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: GradusError, left: list[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def serve() -> None:
        with _replica_folder() as folder:
            for name in ("inference_0.log", "token", "serve.json"):
                (folder / name).touch()
            raise error

    with pytest.raises(type(error)):
        serve()
    assert [it.name for it in tmp_path.rglob("*") if it.is_file()] == left
    assert len(list(tmp_path.iterdir())) == len(left)


async def test_servers_that_can_no_longer_be_looked_after_are_the_end() -> None:
    class Broken:
        def check(self) -> None:
            raise OSError("No space left on device")

    supervisor: Any = Broken()
    with (
        bind("127.0.0.1", 0, allow_public_bind=False) as listener,
        pytest.raises(ProcessError, match="looked after: No space left"),
    ):
        async with asyncio.timeout(20):
            await _serve_in_front(Router([]), supervisor, {}, listener, None, lambda _: None)
