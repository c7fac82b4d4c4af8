"""How one run ends each time: SIGTERM saves, a solved task is enough, Ctrl-C is quick.

The engine is scripted; the tasks are solved because the reward turns generous.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from commands import finish, processes_of, records, start, wait_until

from gradus.errors import ExitCode
from gradus.files import read_json
from gradus.run.paths import RunDirectory

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

SCRIPTED = (str(Path(__file__).parent / "scripted_run.py"),)
MAX_STEPS = 80
TOML = """
name = "solved"
output_dir = "{root}"
max_steps = {max_steps}
[model]
name = "{model}"
renderer = "qwen3"
max_length_tokens = 64
[checkpoint]
interval_steps = 5
[orchestrator]
groups_per_batch = 2
[orchestrator.train.sampling]
max_completion_tokens = 8
[[orchestrator.train.env]]
id = "jsonl"
group_size = 4
taskset = {{ path = "{root}/tasks.jsonl", reward = "{root}/reward.py:rate" }}
[trainer.optimizer]
lr = 1e-2
"""
REWARD = """
import itertools

asked = itertools.count()

def rate(reply: str) -> float:
    return float(next(asked) >= 40 or len(reply) % 2)
"""


def saved_step(run_dir: RunDirectory) -> int:
    """Of the newest checkpoint."""
    return max(int(it.name.removeprefix("step_")) for it in run_dir.checkpoints.glob("step_*"))


def wait_for_records(process: subprocess.Popen[str], run_dir: RunDirectory, number: int) -> None:
    """Until so many steps have their record."""
    wait_until(
        lambda: (
            process.poll() is not None
            or (run_dir.metrics.exists() and len(records(run_dir.metrics)) >= number)
        ),
        timeout_seconds=120.0,
        what=f"record {number}",
    )
    assert process.poll() is None, finish(process)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[str, ...]:
    """The command of the run, which lies in `solved` beside its config."""
    root = tmp_path_factory.mktemp("ends")
    rows = [json.dumps({"prompt": f"Say a letter. {number}"}) + "\n" for number in range(8)]
    (root / "tasks.jsonl").write_text("".join(rows))
    (root / "reward.py").write_text(REWARD)
    toml = TOML.format(root=root, model=tiny_model, max_steps=MAX_STEPS)
    (root / "rl.toml").write_text(toml)
    return "rl", "@", str(root / "rl.toml")


@pytest.fixture(scope="module")
def run_dir(words: tuple[str, ...]) -> RunDirectory:
    return RunDirectory(Path(words[-1]).parent / "solved")


@pytest.fixture(scope="module")
def stopped(words: tuple[str, ...], run_dir: RunDirectory) -> str:
    """What the run printed that SIGTERM ended after its first step."""
    process = start(*words, program=SCRIPTED)
    wait_for_records(process, run_dir, 1)
    process.send_signal(signal.SIGTERM)
    return finish(process, exit_code=ExitCode.TRY_AGAIN)


@pytest.mark.shows("F69")
def test_sigterm_saves_a_checkpoint(stopped: str, run_dir: RunDirectory) -> None:
    assert "is saved; the run ends" in stopped
    assert saved_step(run_dir) >= 1


@pytest.fixture(scope="module")
def solved(words: tuple[str, ...], run_dir: RunDirectory, stopped: str) -> dict[str, Any]:
    """The summary of the run, which went on from there and ended before its last step."""
    step = saved_step(run_dir)
    printed = finish(start(*words, "--resume", program=SCRIPTED))
    assert f"from checkpoint {step} of {MAX_STEPS} steps" in printed
    summary: dict[str, Any] = read_json(run_dir.summary)
    assert summary["outcome"] == "solved", printed
    return summary


def test_a_run_that_solves_its_task_ends_well_and_its_resume_starts_nothing(
    words: tuple[str, ...], run_dir: RunDirectory, solved: dict[str, Any], tmp_path: Path
) -> None:
    steps = solved["steps"]
    assert 0 < steps < MAX_STEPS
    assert [row["step"] for row in records(run_dir.metrics)] == list(range(steps))
    exported = finish(start("export", str(run_dir.root), str(tmp_path / "model")))
    assert f"holds the weights after {steps} steps" in exported
    assert (tmp_path / "model" / "model.safetensors").read_bytes()

    again = finish(start(*words, "--resume", program=SCRIPTED))
    assert "resume            solved: every episode of the last 200 groups earned 1" in again
    assert "starting" not in again
    assert read_json(run_dir.summary) == solved


@pytest.mark.shows("F69", "I7")
def test_a_longer_run_goes_on_from_there_and_ctrl_c_ends_it_within_ten_seconds(
    words: tuple[str, ...], run_dir: RunDirectory, solved: dict[str, Any]
) -> None:
    steps = solved["steps"]
    longer = ("--resume", "--max-steps", str(MAX_STEPS + 1))
    process = start(*words, *longer, program=SCRIPTED)
    wait_for_records(process, run_dir, steps + 1)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    printed = finish(process, exit_code=130)
    assert time.monotonic() - started < 10
    assert f"from checkpoint {steps} of {MAX_STEPS + 1} steps" in printed
    assert read_json(run_dir.summary)["steps"] >= steps
    assert processes_of(run_dir.root) == []
