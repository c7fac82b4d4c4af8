"""A run that shows images, on two nodes, killed and continued, ends bit by bit as one that nothing
disturbed. The engine is scripted; all else is real."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from commands import finish, processes_of, start, wait_for_checkpoint, wait_until
from running import TEST_PATH
from scripted_runs import SCRIPTED, assert_same_run, write_config

from gradus.run.paths import RunDirectory

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.torch,
    pytest.mark.skipif("IMAGE_RUNS" not in os.environ, reason="three whole runs: make images"),
]

NODES = """
[launch.nodes]
trainer = [1]
inference = [2]
host = "127.0.0.1"
"""
MAKE_MODEL = (
    "import sys; from pathlib import Path; from gradus.companions import show_torchvision; "
    "show_torchvision(); from gradus.testing.tiny_images import build_tiny_image_model as make; "
    "make(Path(sys.argv[1]), num_layers=2, hidden_size=64)"
)
"""In a process of its own, in which transformers finds torchvision."""
DRAWINGS = {
    'id = "gradus-reverse-text"': 'id = "gradus-test-drawings"\ntaskset = { turns = 2 }',
    '"qwen3"': '"qwen3-vl"',
    "max_length_tokens = 96": "max_length_tokens = 192",
    "deterministic = true": "deterministic = true\ntrain_vision = true",
}


def drawings_config(root: Path, name: str, more: str = "") -> str:
    path = Path(write_config(root, name, root.parent / "model"))
    text = path.read_text() + more
    for old, new in DRAWINGS.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return str(path)


def scripted_rl(*words: str) -> subprocess.Popen[str]:
    return start("rl", *words, program=SCRIPTED, variables={"PYTHONPATH": TEST_PATH})


def test_a_run_with_images_killed_on_two_nodes_ends_as_one_that_was_never_disturbed(
    tmp_path: Path,
) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    subprocess.run([sys.executable, "-c", MAKE_MODEL, str(tmp_path / "model")], check=True)
    finish(scripted_rl("@", drawings_config(root, "straight")))
    config = drawings_config(root, "moved", NODES)
    run_dir = root / "moved"

    def started(*words: str) -> Iterator[subprocess.Popen[str]]:
        RunDirectory(run_dir).launcher.unlink(missing_ok=True)
        yield scripted_rl("@", config, *words)
        yield start("node", str(run_dir), "--number", "1")
        yield start("node", str(run_dir), "--number", "2")

    with ExitStack() as running:
        killed = [running.enter_context(ended(it)) for it in started()]
        wait_for_checkpoint(run_dir, 2, killed[0])
    wait_until(lambda: not processes_of(run_dir), timeout_seconds=60, what="the end of all")
    with ExitStack() as running:
        continued = [running.enter_context(ended(it)) for it in started("--resume")]
        told = [finish(process) for process in continued]
    assert "from checkpoint" in told[0]
    assert_same_run(run_dir, root / "straight")
    kept = {it.name: it.read_bytes() for it in RunDirectory(run_dir).images.iterdir()}
    assert kept
    assert all(hashlib.sha256(content).hexdigest() == name for name, content in kept.items())


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """It is killed where it has not ended by itself."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
