"""Signals to a real run: a stopped process is named and ends it; SIGTERM saves; Ctrl-C is quick."""

from __future__ import annotations

import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import finish, processes_of, records, start, wait_until

from gradus.errors import ExitCode
from gradus.run.paths import RunDirectory

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

SCRIPTED = (str(Path(__file__).parent / "scripted_run.py"),)
TOML = """
name = "{name}"
output_dir = "{root}"
max_steps = 100000
[model]
name = "{model}"
renderer = "qwen3"
max_length_tokens = 96
[launch]
hang_seconds = 20.0
[orchestrator]
groups_per_batch = 2
recording = false
[orchestrator.train.sampling]
max_completion_tokens = 16
[[orchestrator.train.env]]
id = "gradus-reverse-text"
group_size = 2
pool = {{ type = "static", num_workers = 1 }}
"""


def wait_for_a_step(process: subprocess.Popen[str], run_dir: RunDirectory) -> None:
    """Until the first record is written."""
    wait_until(
        lambda: (
            process.poll() is not None or (run_dir.metrics.exists() and records(run_dir.metrics))
        ),
        timeout_seconds=120.0,
    )
    assert process.poll() is None, finish(process)


@dataclass(frozen=True)
class Stopped:
    """A run that SIGTERM ended after its first step."""

    config: Path
    run_dir: RunDirectory
    printed: str


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Stopped:
    root = tmp_path_factory.mktemp("stopped")
    file = root / "rl.toml"
    file.write_text(TOML.format(name="stopped", root=root / "runs", model=tiny_model))
    run_dir = RunDirectory(root / "runs" / "stopped")
    process = start("rl", "@", str(file), program=SCRIPTED)
    wait_for_a_step(process, run_dir)
    process.send_signal(signal.SIGTERM)
    return Stopped(file, run_dir, finish(process, exit_code=ExitCode.TRY_AGAIN))


def saved_step(run_dir: RunDirectory) -> int:
    (saved,) = run_dir.checkpoints.glob("step_*")
    return int(saved.name.removeprefix("step_"))


@pytest.mark.shows("F69")
def test_sigterm_saves_a_checkpoint(stopped: Stopped) -> None:
    assert "is saved; the run ends" in stopped.printed
    assert saved_step(stopped.run_dir) >= 1


@pytest.mark.shows("F69", "I7")
def test_a_resume_goes_on_from_there_and_ctrl_c_ends_it_within_ten_seconds(
    stopped: Stopped,
) -> None:
    step, before = saved_step(stopped.run_dir), len(records(stopped.run_dir.metrics))
    process = start("rl", "@", str(stopped.config), "--resume", program=SCRIPTED)
    wait_until(
        lambda: process.poll() is not None or len(records(stopped.run_dir.metrics)) > before,
        timeout_seconds=120.0,
        what="one more step",
    )
    assert process.poll() is None, finish(process)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    printed = finish(process, exit_code=130)
    assert time.monotonic() - started < 10
    assert f"from checkpoint {step} of" in printed
    assert processes_of(stopped.run_dir.root) == []
