"""`gradus rl` on real parts, evaluating as it goes, killed in the middle and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import finish, kill, processes_of, records, start, wait_until

from gradus.orchestrator.records.journal import JournalEvent, check_journal, read_journal, surviving
from gradus.run.checkpoints import CheckpointStore
from gradus.run.paths import RunDirectory

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

MAX_STEPS = 6
NUM_TASKS = 6
TOML = """
name = "r"
output_dir = "{root}"
max_steps = {steps}
[model]
name = "{model}"
renderer = "qwen3"
max_length_tokens = 96
[checkpoint]
interval_steps = 1
[orchestrator]
groups_per_batch = 4
[orchestrator.train.sampling]
temperature = 0.9
max_completion_tokens = 16
[[orchestrator.train.env]]
id = "gradus-reverse-text"
group_size = 4
pool = {{ type = "static", num_workers = 1 }}
[orchestrator.eval]
interval_steps = 2
sampling = {{ temperature = 0 }}
[[orchestrator.eval.env]]
id = "gradus-reverse-text"
name = "held-out"
num_tasks = {tasks}
taskset = {{ split = "holdout" }}
pool = {{ type = "static", num_workers = 1 }}
[trainer.optimizer]
lr = 1e-3
[inference]
kv_cache_gib = 0.2
max_num_seqs = 32
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A finished run of which the orchestrator was killed between versions 3 and 6."""
    root = tmp_path_factory.mktemp("v")
    config = root / "run.toml"
    config.write_text(TOML.format(root=root, model=tiny_model, steps=MAX_STEPS, tasks=NUM_TASKS))
    run_dir = root / "r"
    process = start("rl", "@", str(config))
    committed = run_dir / "checkpoints" / "step_00000003"
    wait_until(
        lambda: committed.exists() or process.poll() is not None,
        timeout_seconds=240,
        what="the third checkpoint",
    )
    assert process.poll() is None, process.communicate()
    kill(run_dir, "orchestrator")
    printed = finish(process, exit_code=None)
    assert "orchestrator was killed by SIGKILL" in printed
    assert processes_of(run_dir) == []
    newest = CheckpointStore(RunDirectory(run_dir), term=0).latest()
    assert newest is not None
    assert newest.label.parts == ["trainer", "orchestrator"]
    resumed = finish(start("rl", "@", str(config), "--resume"))
    assert f"from checkpoint {newest.step} of {MAX_STEPS} steps" in resumed
    return run_dir


def test_no_task_is_lost_and_no_sample_trains_twice(run_dir: Path) -> None:
    found = check_journal(read_journal(RunDirectory(run_dir).journal))
    assert found.problems == []
    assert list(found.batches) == list(range(MAX_STEPS))
    assert found.open_episodes == set()
    trained = [row for row in records(run_dir / "metrics.jsonl") if "loss/total/mean" in row]
    assert [row["step"] for row in trained] == list(range(MAX_STEPS))


def test_each_evaluation_measures_one_version_once(run_dir: Path) -> None:
    lines = surviving(read_journal(RunDirectory(run_dir).journal))
    ended = [e["version"] for e in lines if e["event"] == JournalEvent.EVALUATION_ENDED]
    assert ended == [0, 2, 4, 6]
    rows = [row for row in records(run_dir / "metrics.jsonl") if "eval/version" in row]
    assert [(row["step"], row["eval/version"]) for row in rows] == [(n, n) for n in ended]
    for version in ended:
        episodes = records(run_dir / "episodes" / f"step_{version}" / "eval.jsonl")
        found = [episode["gradus"] for episode in episodes]
        assert sorted(s["task"]["index"] for s in found) == list(range(NUM_TASKS))
        assert all(s["versions"] == {"oldest": version, "newest": version} for s in found)
        assert all(s["error"] is None for s in found)


def test_no_weights_change_while_an_evaluation_runs(run_dir: Path) -> None:
    """Neither in the surviving lineage nor in what the kill made void."""
    measured: int | None = None
    for line in read_journal(RunDirectory(run_dir).journal):
        match line["event"]:
            case JournalEvent.EVALUATION_STARTED:
                measured = line["version"]
            case JournalEvent.EVALUATION_ENDED | JournalEvent.RUN_RESUMED:
                measured = None
            case JournalEvent.POLICY_APPLIED:
                assert measured is None
