"""What end-to-end tests share: one real inference server with the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gradus.config import InferenceConfig, InferenceProcessConfig, ModelConfig
from gradus.errors import ExitCode
from gradus.processes.table import descendants, is_alive, living_processes
from gradus.testing.commands import wait_until
from gradus.testing.running import RunningInference
from gradus.testing.tiny_model import build_tiny_model


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, the tests of a file stay together, for they share what they started.

    So do all that talk to the one inference server.
    """
    for item in items:
        if item.path.parent == Path(__file__).parent:
            uses_server = "inference_server" in getattr(item, "fixturenames", ())
            group = "inference_server" if uses_server else item.path.stem
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small, randomly initialised model with its tokenizer; read-only."""
    return build_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=96, num_layers=2)


@pytest.fixture(scope="session")
def inference_server(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[RunningInference]:
    """A real vLLM server, started once; its served version only ever goes up.

    Tests read the version from `/gradus/status` and publish the next one; nothing may rely on
    version 0.
    """
    config = InferenceProcessConfig(
        run_dir=str(tmp_path_factory.mktemp("served-run")),
        term=0,
        model=ModelConfig(name=str(tiny_model), max_length_tokens=1024),
        seed=0,
        inference=InferenceConfig(kv_cache_gib=0.5, max_num_seqs=64),
    )
    with RunningInference(config) as server:
        server.wait_ready()
        yield server
        started = descendants(server.process.pid, living_processes())
        assert server.stop() == ExitCode.DONE, server.log
        wait_until(
            lambda: not [entry for entry in started if is_alive(entry.pid, entry.start_time)],
            what="the end of every process of the inference server",
        )
