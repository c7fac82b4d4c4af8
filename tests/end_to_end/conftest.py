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
from xdist.scheduler import LoadScopeScheduling

from gradus.config import InferenceConfig, InferenceProcessConfig, ModelConfig
from gradus.errors import ExitCode
from gradus.processes.table import descendants, is_alive, living_processes
from gradus.testing.tiny_model import build_tiny_model

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LONGEST = (
    "test_init_run.py",
    "test_main_job.py",
    "test_episodes.py",
    "test_resume.py",
    "test_orchestrator.py",
    "test_environment_process.py",
    "test_sft_with_eval.py",
    "test_sft_commands.py",
    "test_chaos.py",
    "test_silent_processes.py",
    "test_solved_run.py",
    "test_plugins_that_leave.py",
)
"""Files that take minutes, longest first; they start first, so that no worker ends long after the
others."""
LIMIT_SECONDS = 600
"""Of a test; whole runs on a busy machine take a few minutes."""


class ByWhatIsShared(LoadScopeScheduling):
    """One worker takes all tests of a file, and one all files of the one inference server."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0]
        asks_server = "inference_server:" in (ROOT / path).read_text()
        return "inference_server" if asks_server else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByWhatIsShared:
    return ByWhatIsShared(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, with a limit of their own."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
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
