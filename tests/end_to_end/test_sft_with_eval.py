"""`gradus sft` with `[eval]`: rewards beside the loss, and evaluations that outlive a kill."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import GRADUS, finish, kill, processes_of, records, start, wait_until
from evaluated import read_gradus_fields

from gradus.files import read_json
from gradus.run.paths import RunDirectory
from gradus_reverse_text.words import generate_texts

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

SCRIPTED = str(Path(__file__).with_name("scripted_run.py"))
NUM_TASKS, GROUP_SIZE = 6, 2
TOML = """
name = "s"
output_dir = "{root}"
batch_conversations = 16
[model]
name = "{model}"
renderer = "qwen3"
max_length_tokens = 64
[data]
path = "{root}/conversations.jsonl"
[optimizer]
lr = 3e-3
[eval]
sampling = {{ max_completion_tokens = 12 }}
[[eval.env]]
id = "gradus-reverse-text"
num_tasks = {num_tasks}
group_size = {group_size}
taskset = {{ min_words = 1, max_words = 1, num_tasks = {num_tasks} }}
[inference]
kv_cache_gib = 0.2
max_num_seqs = 16
"""

Train = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short path, because sockets lie below it, and conversations to learn."""
    root = tmp_path_factory.mktemp("s")
    texts = generate_texts(64, seed=1, min_words=1, max_words=1)
    with (root / "conversations.jsonl").open("w") as file:
        for text in texts:
            asked = {"role": "user", "content": text}
            replied = {"role": "assistant", "content": text[::-1]}
            file.write(json.dumps({"messages": [asked, replied]}) + "\n")
    return root


@pytest.fixture
def train(root: Path, tiny_model: Path) -> Train:
    """Starts `gradus sft` under the name "s"."""

    def run(
        *words: str, program: tuple[str, ...] = GRADUS, num_tasks: int = NUM_TASKS
    ) -> subprocess.Popen[str]:
        config = root / "sft.toml"
        values = {"num_tasks": num_tasks, "group_size": GROUP_SIZE}
        config.write_text(TOML.format(root=root, model=tiny_model, **values))
        return start("sft", "@", str(config), *words, program=program)

    return run


def evaluations(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Version → its record; there is one of each."""
    rows = [row for row in records(run_dir / "metrics.jsonl") if "eval/version" in row]
    found = {row["step"]: row for row in rows}
    assert len(found) == len(rows)
    assert all(row["eval/version"] == version for version, row in found.items())
    return found


def episodes_file(run_dir: Path, version: int) -> Path:
    return run_dir / "episodes" / f"step_{version}" / "eval.jsonl"


def assert_each_episode_is_there_once(
    run_dir: Path, version: int, num_tasks: int = NUM_TASKS
) -> None:
    played = read_gradus_fields(episodes_file(run_dir, version))
    assert {it["versions"]["oldest"] for it in played} == {version}
    assert {it["versions"]["newest"] for it in played} == {version}
    assert len({it["episode"] for it in played}) == len(played) == num_tasks * GROUP_SIZE


def test_rewards_of_the_real_engine_stand_beside_the_loss_and_rise(
    root: Path, train: Train
) -> None:
    run_dir = root / "s"
    words = ("--max-steps", "80", "--eval.interval-steps", "30")
    printed = finish(train(*words, num_tasks=16))
    assert "evaluation of version 80" in printed
    rows = records(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss/total/mean" in row] == list(range(80))
    found = evaluations(run_dir)
    assert sorted(found) == [0, 30, 60, 80]
    for version in found:
        assert_each_episode_is_there_once(run_dir, version, num_tasks=16)
    reward = "eval/gradus-reverse-text/avg@2"
    assert found[80][reward] > found[0][reward]
    assert list((run_dir / "weights").iterdir()) == [], "measured versions leave the disk"
    assert read_json(run_dir / "summary.json")["outcome"] == "done"


def test_what_waits_when_a_run_is_killed_is_evaluated_when_it_goes_on(
    root: Path, train: Train
) -> None:
    """The engine is slow: training ends while version 4 plays, and 8 and 12 wait on disk."""
    run_dir = RunDirectory(root / "s")
    words = ("--max-steps", "12", "--eval.interval-steps", "4", "--checkpoint.interval-steps", "6")
    words = (*words, "--compute-dtype", "float32", "--eval.max-in-flight-episodes")
    # Resumed by hand, with more episodes at once.
    by_hand = ("--launch.restarts", "0")
    first = train(*words, "2", *by_hand, program=(SCRIPTED,))
    playing = episodes_file(run_dir.root, 4)
    wait_until(
        lambda: first.poll() is not None or (playing.exists() and run_dir.model.exists()),
        timeout_seconds=120,
        what="the evaluation of version 4 and the end of training",
    )
    wait_until(lambda: first.poll() is not None or playing.stat().st_size > 0, what="an episode")
    assert first.poll() is None, first.communicate()
    waiting = sorted(path.name for path in run_dir.weights.iterdir())
    assert waiting == [run_dir.version(version).name for version in (4, 8, 12)]
    kill(run_dir.root, "evaluator")
    printed = finish(first, exit_code=None)
    assert "gradus sft: evaluator was killed by SIGKILL" in printed
    assert processes_of(run_dir.root) == []
    base = episodes_file(run_dir.root, 0).read_bytes()
    kept = playing.read_bytes().split(b"\n")[:-1]
    assert len(kept) < NUM_TASKS * GROUP_SIZE

    printed = finish(train(*words, "12", "--resume", program=(SCRIPTED,)))
    assert "from checkpoint 12 of 12 steps" in printed
    assert episodes_file(run_dir.root, 0).read_bytes() == base, "played once"
    assert set(kept) <= set(playing.read_bytes().split(b"\n")), "what was played stays"
    assert sorted(evaluations(run_dir.root)) == [0, 4, 8, 12]
    for version in (0, 4, 8, 12):
        assert_each_episode_is_there_once(run_dir.root, version)
    assert list(run_dir.weights.iterdir()) == []
