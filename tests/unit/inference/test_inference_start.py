"""What is refused before vLLM is loaded."""

from __future__ import annotations

import ast
import socket
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gradus.config import InferenceProcessConfig, ModelConfig
from gradus.errors import ConfigError, ExitCode, HubError
from gradus.files import write_json
from gradus.inference.http_server import base_url_of
from gradus.inference.server import check_model, check_name
from gradus.processes.listening import bind
from gradus.run.model_files import ask_hub
from gradus.run.paths import RunDirectory


def complete_model(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def test_a_complete_model_directory_and_a_hub_name_pass(tmp_path: Path) -> None:
    check_model(ModelConfig(name=str(complete_model(tmp_path / "model"))))
    check_model(ModelConfig(name="Qwen/Qwen3-0.6B"))


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "~/model", "model", "a/b/c"])
def test_a_path_without_a_directory_is_refused_with_the_path(name: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.name") as caught:
        check_model(ModelConfig(name=name))
    assert name in str(caught.value)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_directory_that_is_no_model_is_refused(tmp_path: Path, missing: str) -> None:
    model = complete_model(tmp_path / "model")
    (model / missing).unlink()
    with pytest.raises(ConfigError, match=missing.removeprefix("model")):
        check_model(ModelConfig(name=str(model)))


@pytest.mark.shows("F77")
def test_a_model_that_the_hub_cannot_be_asked_for_says_where_it_was_sought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        HubError, match=r"'o/tiny' is not a directory \(seen from .*be reached"
    ) as caught:
        ask_hub("o/tiny")
    assert caught.value.exit_code == ExitCode.TRY_AGAIN


@pytest.mark.shows("F77")
def test_the_hub_is_not_asked_for_a_model_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ask_hub(str(complete_model(tmp_path / "model")))


@pytest.mark.shows("F16")
def test_a_server_takes_the_name_of_no_other_process(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    write_json(run_dir.ready_file("orchestrator"), {"pid": 1, "term": 1})
    write_json(run_dir.ready_file("node7"), {"base_url": "http://10.0.0.7:8000", "pid": 1})
    with pytest.raises(ConfigError, match="'orchestrator' is the name of another process"):
        check_name(run_dir, "orchestrator")
    check_name(run_dir, "node7")
    check_name(run_dir, "node8")


def test_a_name_of_a_server_leads_to_no_other_folder() -> None:
    known = {"model": {"name": "tiny"}, "seed": 0, "inference": {}, "run_dir": "/runs/x", "term": 1}
    InferenceProcessConfig(**known, process="inference_0")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="process"):
        InferenceProcessConfig(**known, process="../node7")  # type: ignore[arg-type]


def test_port_zero_gives_a_free_port_that_nobody_can_take_meanwhile() -> None:
    with bind("127.0.0.1", 0, allow_public_bind=False) as listener:
        port = listener.getsockname()[1]
        assert base_url_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"{port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port, allow_public_bind=False)


@pytest.mark.shows("F16")
def test_a_port_in_use_is_a_config_error_that_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match="or use 0 for a free one") as caught:
            bind("127.0.0.1", port, allow_public_bind=False)
    assert caught.value.exit_code == ExitCode.CONFIG


@pytest.mark.shows("SEC6")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_host_that_others_can_reach_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="allow_public_bind"):
        bind(host or "0.0.0.0", 0, allow_public_bind=False)


@pytest.mark.shows("SEC6")
def test_a_public_host_is_bound_when_it_is_allowed() -> None:
    with bind("0.0.0.0", 0, allow_public_bind=True) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_loopback_by_name_and_in_ipv6_passes() -> None:
    with bind("localhost", 0, allow_public_bind=False):
        pass
    if socket.has_ipv6:
        with bind("::1", 0, allow_public_bind=False) as listener:
            assert base_url_of(listener).startswith("http://[::1]:")


def test_a_host_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid"):
        bind("no-such-host.invalid", 0, allow_public_bind=False)


def test_checks_need_neither_torch_nor_vllm() -> None:
    program = (
        "import sys, gradus.inference.server;"
        "print(sorted({'torch', 'vllm', 'transformers'} & sys.modules.keys()))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert output.stdout.strip() == b"[]"


FORKING = """
import logging, multiprocessing, os, socket, sys
from multiprocessing import forkserver
from gradus.inference import server
from gradus.log import configure_logging

configure_logging("inference")
held = socket.create_server(("127.0.0.1", 0))

def main(listener, alive, preload):
    multiprocessing.current_process().name = "EngineCore"
    opened = [it for it in range(99) if os.path.exists(f"/proc/self/fd/{it}")]
    logging.getLogger("vllm").warning("holds %s", opened)
    logging.getLogger("vllm").info("too much")
    raise {error}

forkserver.main = main
passed = os.pipe()
pid = server._fork_forkserver("", [], passed)
print(passed, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize(("error", "status"), [("SystemExit", 0), ("ValueError('why')", 1)])
def test_the_copy_that_forks_the_engine_keeps_two_files_and_says_why_it_ends(
    error: str, status: int
) -> None:
    program = FORKING.replace("{error}", error)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    (first, second), found = ast.literal_eval(f"[{ended.stdout.replace(') ', '), ')}]")
    assert found == status
    assert f"inference/EngineCore vllm: holds [0, 1, 2, {first}, {second}]" in ended.stderr
    assert "too much" not in ended.stderr
    assert ("ValueError: why" in ended.stderr) is (status == 1)


@pytest.mark.torch
@pytest.mark.slow
def test_models_are_looked_at_in_a_fork_of_ours_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gradus.inference import compat

    registry: Any = vars(compat)["registry"]
    own: Any = forkserver
    for name in ("_run_in_subprocess", "_SUBPROCESS_COMMAND"):
        monkeypatch.setattr(registry, name, getattr(registry, name))
    before = registry._run_in_subprocess
    monkeypatch.setattr(own._forkserver, "_forkserver_pid", None)
    compat.inspect_models_with_gradus()
    assert registry._run_in_subprocess is before
    monkeypatch.setattr(own._forkserver, "_forkserver_pid", 1)
    compat.inspect_models_with_gradus()
    assert registry._run_in_subprocess is compat._in_our_fork
