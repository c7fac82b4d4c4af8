"""How an inference process starts, listens and ends.

The servers of test_lora_serving.py and test_moe_serving.py are killed, as their last test.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from commands import wait_until
from running import RunningInference, wait_until_ended

from gradus.config import InferenceConfig, InferenceProcessConfig, ModelConfig
from gradus.errors import ExitCode
from gradus.processes.table import catches

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

Start = Callable[..., RunningInference]


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path) -> Iterator[Start]:
    """Starts servers that end with the test."""
    with ExitStack() as stack:

        def start_server(*, model: Path = tiny_model, **inference: Any) -> RunningInference:
            run_dir = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
            run_dir.mkdir()
            config = InferenceProcessConfig(
                run_dir=str(run_dir),
                term=0,
                model=ModelConfig(name=str(model), max_length_tokens=256),
                seed=0,
                inference=InferenceConfig(
                    **{"dtype": "bfloat16", "kv_cache_gib": 0.1, **inference}
                ),
            )
            return stack.enter_context(RunningInference(config))

        yield start_server


def error_line(server: RunningInference) -> str:
    """The one line that says why it ended."""
    lines = [line for line in server.log.splitlines() if line.startswith("gradus inference:")]
    assert len(lines) == 1, server.log
    return lines[0]


def listening_sockets(pids: list[int]) -> list[str]:
    """`address:port` in hex, as in /proc, of every TCP socket that these processes listen on."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1])
    return found


@pytest.mark.shows("SEC6")
def test_everything_listens_on_loopback_and_the_server_only_on_its_port(
    inference_server: RunningInference,
) -> None:
    port = int(inference_server.base_url.rsplit(":", 1)[1])
    children = [entry.pid for entry in inference_server.below()]
    assert len(children) >= 2
    assert listening_sockets([inference_server.process.pid]) == [f"0100007F:{port:04X}"]
    # gloo opens sockets of its own in the engine's process.
    assert {address.split(":")[0] for address in listening_sockets(children)} <= {"0100007F"}


@pytest.mark.shows("I9", "SEC1", "SEC3")
def test_no_token_is_in_the_log_or_on_a_command_line(inference_server: RunningInference) -> None:
    tokens = (inference_server.data_token, inference_server.admin_token)
    pids = [inference_server.process.pid, *(entry.pid for entry in inference_server.below())]
    places = [inference_server.log]
    for pid in pids:
        places.append(Path(f"/proc/{pid}/cmdline").read_text())
        places.append(Path(f"/proc/{pid}/environ").read_text())
    assert not any(token in place for token in tokens for place in places)


def test_every_process_of_the_server_says_where_it_crashes(
    inference_server: RunningInference,
) -> None:
    children = [entry.pid for entry in inference_server.below()]
    python = [pid for pid in children if "python" in os.readlink(f"/proc/{pid}/exe")]
    assert len(python) >= 2, "the engine, and what it was forked from"
    assert all(catches(pid, signal.SIGSEGV) for pid in python)


def test_a_missing_model_is_told_in_one_line_before_anything_is_loaded(
    start: Start, tmp_path: Path
) -> None:
    server = start(model=tmp_path / "nowhere")
    assert server.wait_exit() == ExitCode.CONFIG
    said = error_line(server)
    assert said.startswith("gradus inference: model.name: ")
    assert "nowhere" in said


@pytest.mark.shows("F16")
def test_a_port_in_use_is_told_in_one_line(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = start(port=other.getsockname()[1])
        assert server.wait_exit() == ExitCode.CONFIG
    assert "is in use; stop its owner" in error_line(server)


def test_sigterm_while_loading_ends_everything(start: Start) -> None:
    server = start()
    wait_until(lambda: len(server.below()) >= 1, what="a child process")
    children = server.below()
    assert server.stop() != 0
    wait_until_ended(children)
