"""Behind a proxy, the processes of a run still reach one another on loopback."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from gradus.orchestrator.failures import FirstFailures
from gradus.orchestrator.types import Failure
from gradus.plan.variables import (
    inference_variables,
    orchestrator_variables,
    source_variables,
    trainer_variables,
)
from gradus.run.paths import RunDirectory

ASK = """
import sys, urllib.request, urllib.error, httpx
url = sys.argv[1]
print(urllib.request.urlopen(url, timeout=5).read().decode(), httpx.get(url).text)
print(httpx.get("http://somewhere.invalid/").status_code)
"""


class Answering(HTTPServer):
    """Answers every GET with one status and text, as an engine or as a proxy that refuses."""

    def __init__(self, status: int, text: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                """Nothing."""

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


@pytest.fixture
def servers() -> Iterator[tuple[Answering, Answering]]:
    """An engine, and a proxy that lets nobody through."""
    both = Answering(200, "engine"), Answering(403, "refused")
    for server in both:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield both
    for server in both:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY"])
def test_the_engine_on_loopback_is_asked_past_a_proxy_that_refuses(
    servers: tuple[Answering, Answering], name: str
) -> None:
    engine, proxy = servers
    caller = {name: f"http://{proxy.address}", "PATH": "/usr/bin", "no_proxy": "intranet"}
    variables = source_variables(caller, {}, verifiers={})
    command = [sys.executable, "-c", ASK, f"http://{engine.address}/"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["engine", "engine", "403"], done.stderr


def test_every_role_keeps_the_exceptions_of_the_user() -> None:
    caller = {"https_proxy": "http://proxy:3128", "NO_PROXY": "intranet, 127.0.0.1"}
    built = [
        inference_variables(caller, {}),
        trainer_variables(caller, {}, num_cores=2, num_processes=1),
        orchestrator_variables(caller, {}, config={}),
        source_variables(caller, {}, verifiers={}),
    ]
    wanted = "intranet, 127.0.0.1,localhost,::1"
    assert [(it["NO_PROXY"], it["no_proxy"]) for it in built] == [(wanted, wanted)] * 4
    assert "no_proxy" not in inference_variables({"NO_PROXY": "intranet"}, {})


def test_an_exception_of_every_host_stays_one() -> None:
    caller = {"http_proxy": "http://proxy:3128", "NO_PROXY": "*", "PATH": "/usr/bin"}
    variables = source_variables(caller, {}, verifiers={})
    ask = "import urllib.request; print(urllib.request.proxy_bypass('intranet'))"
    command = [sys.executable, "-c", ask]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_the_first_error_of_a_model_that_is_not_reached_names_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://me:secret@proxy:3128")
    failures = FirstFailures(RunDirectory(tmp_path), "train")
    failures.add("words", "task 1", Failure("ProviderError", "403 Forbidden"))
    failures.add("words", "task 2", Failure("TaskError", "no answer"))
    assert failures.first == "403 Forbidden; this shell names the proxy proxy:3128"
    assert "proxy:3128" in (tmp_path / "notices.log").read_text()
