"""A run whose engine sleeps while the trainer learns: real processes, a scripted engine, no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import finish, records, start

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

SCRIPTED = (str(Path(__file__).parent / "scripted_run.py"),)
TOML = """
name = "shared"
output_dir = "{root}"
max_steps = 4
[model]
name = "{model}"
renderer = "qwen3"
max_length_tokens = 96
[orchestrator]
groups_per_batch = 3
max_lag = 1
[orchestrator.train.sampling]
max_completion_tokens = 16
[[orchestrator.train.env]]
id = "gradus-reverse-text"
group_size = 4
[trainer]
num_processes = 2
[inference]
gpu_sharing = "turns"
"""


def test_the_engine_sleeps_for_each_step_and_serves_its_version_before_the_next(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(TOML.format(root=tmp_path, model=tiny_model))
    finish(start("turns", "@", str(config), program=SCRIPTED))
    run_dir = tmp_path / "shared"
    turns = (run_dir / "turns.txt").read_text().split()
    told = list(zip(turns[::2], map(int, turns[1::2]), strict=True))
    # The orchestrator says at its start what is served, whatever the trainer does meanwhile.
    happened = [entry for entry in told if entry != ("apply", 0)]
    assert len(told) == len(happened) + 1
    expected = [("sleep", 0), ("wake", 0)]  # to load the model
    for version in range(4):
        expected += [("apply", version)] if version else []
        expected += [("sleep", version), ("wake", version)]
    assert happened[: len(expected)] == expected
    # The last version goes live, and the final model is gathered, in either order.
    last = [entry for entry in happened[len(expected) :] if entry != ("apply", 4)]
    assert last == [("sleep", 0), ("wake", 0)]
    assert [row["step"] for row in records(run_dir / "metrics.jsonl")] == [0, 1, 2, 3]
    assert "engine awake" in (run_dir / "logs" / "trainer.log").read_text()
