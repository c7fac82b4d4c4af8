"""Whole runs with the scripted engine that must come out alike, bit by bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from commands import GRADUS, records, wait_until

from gradus.files import read_json
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
pool = {{ type = "static", num_workers = 1 }}
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


def far_side(run_dir: Path, number: int) -> subprocess.Popen[str]:
    """The processes of a node that has another disk where the run's folder lies."""
    wait_until(RunDirectory(run_dir).launcher.exists, timeout_seconds=60, what="the launcher")
    where = read_json(RunDirectory(run_dir).launcher)
    own = run_dir.parent.with_name(f"{run_dir.parent.name} of node {number}")
    own.mkdir(exist_ok=True)
    token = own / "token"
    token.write_bytes(RunDirectory(run_dir).node_token.read_bytes())
    command = [
        *("unshare", "-rm", "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"'),
        *(str(own), str(run_dir.parent), sys.executable, *GRADUS, "node", str(run_dir)),
        *("--number", str(number), "--launcher", f"{where['host']}:{where['port']}"),
        *("--token-file", str(run_dir.parent / "token")),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
