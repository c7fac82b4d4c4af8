"""Whole runs with the scripted engine that must come out alike, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path

from commands import records

from gradus.orchestrator.records.journal import check_journal, read_journal
from gradus.run.paths import RunDirectory

SCRIPTED = (str(Path(__file__).parents[1] / "end_to_end" / "scripted_run.py"),)
MAX_STEPS = 6
TOML = """
name = "{name}"
output_dir = "{root}"
max_steps = {steps}
[model]
name = "{model}"
renderer = "qwen3"
max_length_tokens = 96
[checkpoint]
interval_steps = 1
keep_last = 3
[orchestrator]
groups_per_batch = 3
max_lag = 0
max_staleness = 0
[orchestrator.train.sampling]
max_completion_tokens = 16
[[orchestrator.train.env]]
id = "gradus-reverse-text"
group_size = 4
[trainer]
num_processes = 2
deterministic = true
[trainer.optimizer]
lr = 1e-2
"""


def write_config(root: Path, name: str, model: Path) -> str:
    path = root / f"{name}.toml"
    path.write_text(TOML.format(root=root, name=name, model=model, steps=MAX_STEPS))
    return str(path)


def weights(run_dir: Path) -> dict[str, bytes]:
    """The final model and all of the trainer's state: master weights, moments, random states."""
    step = run_dir / "checkpoints" / f"step_{MAX_STEPS:08d}"
    found = {path.name: path.read_bytes() for path in sorted((step / "trainer").iterdir())}
    progress = json.loads(found["progress.json"])
    progress["origin"]["model"]["name"] = "where the model lies, which may be another place"
    found["progress.json"] = json.dumps(progress).encode()
    return found | {"model": (run_dir / "model" / "model.safetensors").read_bytes()}


def assert_same_run(found: Path, expected: Path) -> None:
    """One journal without a contradiction, the same batches, the same weights."""
    lines = read_journal(RunDirectory(found).journal)
    checked = check_journal(lines)
    assert checked.problems == []
    undisturbed = check_journal(read_journal(RunDirectory(expected).journal))
    assert checked.batches == undisturbed.batches
    assert checked.ended == undisturbed.ended
    assert [row["step"] for row in records(found / "metrics.jsonl")] == list(range(MAX_STEPS))
    ours, theirs = weights(found), weights(expected)
    different = [name for name in theirs if ours.get(name) != theirs[name]]
    assert not different, f"{different} of {found} are not those of {expected}"
