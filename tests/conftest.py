"""What every test starts from."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from scheduling import WholeSession

import gradus.environments  # noqa: F401  # imports of verifiers wait, as in every process of a run

SMALL_DISK_BYTES = 4 << 20

# Who asks for a name such as someone/tiny hears at once that no hub is reached. Here, since the
# library reads its variables when the first module of tests imports it.
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"

# Examples have no deadline, and may be drawn slowly: a busy machine is not a failure.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", PATIENT)
settings.load_profile("default")

# `pytest --hypothesis-profile=nightly`: fifteen times as many examples where a test follows it;
# `quick` is for a look between two edits.
settings.register_profile("quick", PATIENT, max_examples=10)
settings.register_profile("nightly", PATIENT, max_examples=1_500)

INSTALLABLE = ("podman", "zsh", "fish", "bubblewrap", "chromium")
"""Programs that tests skip for, which `scripts/test_tools` installs."""
TORCH_FOLDERS = {"trainer"}
"""Folders of tests whose fixtures import torch."""
TORCH_FILE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(?:torch|end_to_end)\b", re.M)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of tests that are left out are not read: importing torch or vLLM takes seconds."""
    left_out = config.option.markexpr
    if collection_path.is_dir():
        if collection_path.name == "end_to_end":
            return "not end_to_end" in left_out or None
        return ("not torch" in left_out and collection_path.name in TORCH_FOLDERS) or None
    if "not torch" not in left_out:
        return None
    is_test = collection_path.name.startswith("test_")
    return (is_test and TORCH_FILE.search(collection_path.read_text()) is not None) or None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WholeSession | None:
    """`--dist loadfile` shares all tests out, whole runs among them; see `scheduling`."""
    return WholeSession(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What was imported and collected stays: garbage is looked for among what tests make."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Libraries that count their objects at the end find theirs freed."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Below the reasons of skipped tests: the one command that brings what they miss."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [str(report.longrepr) for report in skipped]
    missing = [name for name in INSTALLABLE if any(name in reason for reason in reasons)]
    if missing:
        terminalreporter.section(f"{len(skipped)} tests were skipped, some for want of programs")
        terminalreporter.write_line(f"scripts/test_tools installs {', '.join(missing)} on Debian")


@pytest.fixture(scope="session", autouse=True)
def _no_trace_in_the_users_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Launches keep the outcome of their bfloat16 trial: here for this session and all its workers,
    so that it takes its ten seconds once."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield


@pytest.fixture(autouse=True)
def _fresh_log_level() -> None:
    """Libraries that a test imports may raise the root logger's level for every later test."""
    logging.getLogger().setLevel(logging.WARNING)


@pytest.fixture(autouse=True)
def _same_random_tensors() -> None:
    """A test that draws tensors draws the same ones alone, in any order, and on any worker."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _no_thread_of_ours_is_left() -> Iterator[None]:
    """A thread that outlives its test may be inside torch when Python ends, and abort it."""
    before = set(threading.enumerate())
    yield
    left = [t.name for t in threading.enumerate() if t not in before and is_ours(t)]
    assert left == []


def is_ours(thread: threading.Thread) -> bool:
    """Whether gradus or a test started it, and not a library."""
    function = getattr(thread, "_target", None)
    module = getattr(function, "__module__", type(thread).__module__) or ""
    return module.split(".")[0] in {"gradus", "tests"} or module.startswith("test_")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model's tokenizer, without weights; read-only."""
    from gradus.testing.tiny_model import build_tiny_tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    build_tiny_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(model)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate disk of 4 MiB, which fills up and can be made read-only."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mount is not permitted here: {done.stderr.strip()}")
    yield folder
    # Lazily: a test that failed may still hold a file.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
