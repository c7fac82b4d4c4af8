"""A webhook hears of alarms and of the end, and of nothing else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from tracked import tracked_record, tracked_run

from gradus.config import RunConfig, load_config
from gradus.errors import ConfigError
from gradus.plan.machine import check
from gradus.tracking.webhook import Webhook


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What a server on this machine was sent."""
    posts: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if "refuse" in str(posts[-1]) else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:{server.server_port}/services/T0/secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield posts
    server.shutdown()
    server.server_close()


def test_an_alarm_and_the_end_are_posted(heard: list[Any], tmp_path: Path) -> None:
    hook = Webhook(url_var="HOOK", key="content")
    hook.open(tracked_run(tmp_path))
    hook.log(tracked_record(0, {"loss/total/mean": 1.0}))
    hook.alert("demo: truncated", "alarm truncated at step 8: 0.6", 7)
    hook.close("done")
    hook.close("unknown")
    assert heard == [
        {"content": "demo: alarm truncated at step 8: 0.6"},
        {"content": "demo: done"},
    ]


def test_what_a_server_does_not_take_is_an_error(heard: list[Any], tmp_path: Path) -> None:
    hook = Webhook(url_var="HOOK", key="text")
    hook.open(tracked_run(tmp_path))
    with pytest.raises(HTTPError):
        hook.alert("demo", "refuse this", 0)
    assert len(heard) == 1


@pytest.mark.parametrize("value", ["", "hooks.example/x", "file:///etc/passwd"])
def test_an_address_that_is_none_is_refused_without_showing_it(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", value)
    with pytest.raises(ConfigError, match="HOOK holds no address") as caught:
        Webhook(url_var="HOOK", key="text")
    assert not value or value not in str(caught.value)


def test_a_variable_that_the_shell_lacks_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["--model.name", "someone/tiny", "--max-steps", "2", "--monitor"]
    words += ['[{"type": "webhook", "url_var": "HOOK"}]', "--orchestrator.train.env.0.id"]
    config = load_config(RunConfig, [*words, "gradus-reverse-text"])
    monkeypatch.delenv("HOOK", raising=False)
    assert any("monitor.0.url_var" in str(it) or "HOOK" in str(it) for it in check(config))
    monkeypatch.setenv("HOOK", "http://127.0.0.1/x")
    assert not any("HOOK" in str(it) for it in check(config))
