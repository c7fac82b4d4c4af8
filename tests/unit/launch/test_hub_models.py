"""What kind of model a name is that only the hub has: asked before a first run is planned."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from configs import build_run_config

from gradus.config import EvalConfig
from gradus.errors import HubError, StorageError
from gradus.launch.job import job_of
from gradus.run import model_files
from gradus.run.model_files import ask_hub

HELD = {
    "/o/eyes/resolve/main/config.json": {"model_type": "qwen3_vl", "vision_config": {}},
    "/o/eyes/resolve/main/preprocessor_config.json": {"patch_size": 14},
    "/o/text/resolve/main/config.json": {"model_type": "qwen3"},
    "/o/rwkv/resolve/main/config.json": {"model_type": "rwkv"},
}
LAUNCHES = """
import json, sys
from pathlib import Path
import gradus
from gradus.cli import main as commands
from gradus.errors import GradusError
from gradus.launch import launch
from gradus.launch.from_python import calls
from gradus.run.paths import RunDirectory

def show(job, *_, **__):
    configs = job.plan(RunDirectory(Path("runs") / job.name), 1, None).configs
    seen = [it.reads_images for name, it in configs.items() if name.startswith("env_")]
    print(json.dumps([seen, list(job.notes)]), file=sys.stderr)
    raise KeyboardInterrupt

launch.launch = calls.launch = show
env = [{"id": "reverse-text"}]
keys = {
    "max_steps": 1,
    "orchestrator": {"train": {"env": env}},
    "trainer": {"compute_dtype": "float32", "optimizer": {"lr": 1e-5}},
}
for how, model in json.loads(sys.argv[1]):
    try:
        if how == "python":
            gradus.train({**keys, "model": {"name": model}})
        else:
            Path("run.toml").write_text(
                f'max_steps = 1\\nmodel.name = "{model}"\\ntrainer.compute_dtype = "float32"\\n'
                "trainer.optimizer.lr = 1e-5\\n"
                '[[orchestrator.train.env]]\\nid = "reverse-text"\\n'
            )
            assert commands.main(["rl", "@", "run.toml"]) == 130
    except KeyboardInterrupt:
        pass
    except GradusError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
"""


class Hub(BaseHTTPRequestHandler):
    """The routes of a hub that a first question needs."""

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        body = json.dumps(HELD.get(self.path, {})).encode()
        name = self.path.split("/")[2]
        missing = "RepoNotFound" if name == "none" else "EntryNotFound"
        status = 503 if name == "busy" else 200 if self.path in HELD else 404
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", missing)
        self.send_header("X-Repo-Commit", "5" * 40)
        self.send_header("ETag", f'"{abs(hash(self.path)):040x}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def launched(folder: Path, hub: str, *asked: tuple[str, str]) -> list[str]:
    """A line for each launch, of the command or from Python, on a machine without a cache."""
    env = os.environ | {"HF_ENDPOINT": hub, "HF_HOME": str(folder / "hub")}
    command = [sys.executable, "-c", LAUNCHES, json.dumps(asked)]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.slow
def test_a_first_run_knows_that_its_model_reads_images_and_what_the_hub_refuses(
    tmp_path: Path, hub: str
) -> None:
    models = ("eyes", "text", "none", "rwkv", "busy")
    asked = [("command", "o/eyes"), *(("python", f"o/{it}") for it in models)]
    command, interrupted, eyes, text, *others = launched(tmp_path, hub, *asked)
    assert (command, eyes) == ("[[true], []]", "[[true], []]")
    assert text == "[[false], []]"
    assert interrupted == "gradus rl: interrupted"
    told = "\n".join(others)
    assert re.search(r"ConfigError: model: 'o/none' is not .* the hub refuses it: 404", told)
    assert re.search(r"model\.name.*a recurrence that would carry state", told), told
    busy = json.loads(others[-1])
    assert busy[0] == [False]
    assert re.match("model +its family, size and whether .* not known.*503", *busy[1])
    kept = {it.name for it in tmp_path.rglob("models--o--eyes/snapshots/*/*")}
    assert kept == {"config.json", "preprocessor_config.json"}


def test_a_machine_without_network_says_within_seconds_what_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = job_of(build_run_config({"model": {"name": "o/tiny"}}), asks=True)
    assert re.search(r"whether it reads images are not known.*refused", job.notes[0])
    assert job_of(build_run_config({"model": {"name": "o/tiny"}})).notes[0] != job.notes[0]

    answers = threading.Event()
    monkeypatch.setattr(model_files, "_HUB_SECONDS", -0.9)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: answers.wait(60))
    with pytest.raises(HubError, match=r"cannot be reached to ask for it \(no answer\)"):
        ask_hub("o/tiny")
    (asking,) = [it for it in threading.enumerate() if it.name == "ask-hub"]
    answers.set()
    asking.join()


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "no room"), PermissionError(errno.EACCES, "denied", "/cache/hub")],
)
def test_an_error_of_the_disk_is_not_told_as_one_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", fail)
    with pytest.raises(StorageError, match=r"cannot be kept on this disk .* set HF_HOME"):
        job_of(build_run_config({"model": {"name": "o/tiny"}}), asks=True)


def test_a_model_that_others_serve_is_not_asked_for() -> None:
    values = {"model": {"name": "o/tiny"}, "base_url": "http://127.0.0.1:9/v1"}
    config = EvalConfig.model_validate({**values, "env": [{"id": "reverse-text"}]})
    assert [it for it in job_of(config, asks=True).notes if "not known" in it] == []
