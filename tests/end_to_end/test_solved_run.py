"""A run that solves its tasks ends before its last step, and so does its resume.

The engine is scripted; the tasks are solved because the reward turns generous.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import finish, records, start

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
pool = {{ type = "static", num_workers = 1 }}
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


def test_a_run_that_solves_its_task_ends_well_and_its_resume_starts_nothing(
    tmp_path: Path, tiny_model: Path
) -> None:
    rows = [json.dumps({"prompt": f"Say a letter. {number}"}) + "\n" for number in range(8)]
    (tmp_path / "tasks.jsonl").write_text("".join(rows))
    (tmp_path / "reward.py").write_text(REWARD)
    toml = TOML.format(root=tmp_path, model=tiny_model, max_steps=MAX_STEPS)
    (tmp_path / "rl.toml").write_text(toml)
    words = ("rl", "@", str(tmp_path / "rl.toml"))
    printed = finish(start(*words, program=SCRIPTED))
    run_dir = RunDirectory(tmp_path / "solved")
    summary = read_json(run_dir.summary)
    assert summary["outcome"] == "solved", printed
    steps = summary["steps"]
    assert 0 < steps < MAX_STEPS
    assert len(records(run_dir.metrics)) == steps
    exported = finish(start("export", str(run_dir.root), str(tmp_path / "model")))
    assert f"holds the weights after {steps} steps" in exported
    assert (tmp_path / "model" / "model.safetensors").read_bytes()

    again = finish(start(*words, "--resume", program=SCRIPTED))
    assert "resume            solved: every episode of the last 6 groups earned 1" in again
    assert "starting" not in again
    assert read_json(run_dir.summary) == summary
    longer = ("--resume", "--max-steps", str(MAX_STEPS + 1))
    more = finish(start(*words, *longer, program=SCRIPTED))
    assert f"from checkpoint {steps} of {MAX_STEPS + 1} steps" in more
    assert read_json(run_dir.summary)["steps"] >= steps
