"""What end-to-end tests share: one real inference server with the tiny model."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import wait_until
from running import RunningInference
from scheduling import WholeSession

from gradus.config import InferenceConfig, InferenceProcessConfig, ModelConfig
from gradus.errors import ExitCode
from gradus.processes.table import descendants, is_alive, living_processes
from gradus.testing.tiny_model import build_tiny_model

HERE = Path(__file__).parent
LIMIT_SECONDS = 600
"""Of a test; whole runs on a busy machine take a few minutes."""


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WholeSession:
    return WholeSession(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs have a limit of their own."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.timeout(LIMIT_SECONDS))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small, randomly initialised model with its tokenizer; read-only."""
    return build_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=96, num_layers=2)


@pytest.fixture(scope="session")
def inference_server(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[RunningInference]:
    """A real vLLM server, started once, below a folder of an odd name; its served version only ever
    goes up.

    Tests read the version from `/gradus/status` and publish the next one; nothing may rely on
    version 0.
    """
    root = tmp_path_factory.mktemp('it\'s "a" résumé, served')
    shutil.copytree(tiny_model, root / "the model")
    config = InferenceProcessConfig(
        run_dir=str(root),
        term=0,
        model=ModelConfig(name=str(root / "the model"), max_length_tokens=1024),
        seed=0,
        inference=InferenceConfig(dtype="bfloat16", kv_cache_gib=0.5, max_num_seqs=64),
    )
    with RunningInference(config) as server:
        server.wait_ready()
        yield server
        started = descendants(server.process.pid, living_processes())
        before = len(server.log)
        assert server.stop() == ExitCode.DONE, server.log
        wait_until(
            lambda: not [entry for entry in started if is_alive(entry.pid, entry.start_time)],
            what="the end of every process of the inference server",
        )
        assert not re.search("ERROR|Traceback|EngineDead", server.log[before:]), server.log
