"""The main job on real parts: `gradus sft`, then `gradus rl` with vLLM, verifiers and FSDP2.

The one run shows drawings, two in each conversation, to a model that also reads texts, on which it
is evaluated as it goes; it is killed in the middle and resumed, and is replayed at the end.
"""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import finish, kill, processes_of, records, start, wait_for_checkpoint
from listening import listeners
from running import TEST_PATH
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from gradus.files import read_json
from gradus.orchestrator.records.journal import JournalEvent, check_journal, read_journal, surviving
from gradus.processes.table import descendants, living_processes
from gradus.run.checkpoints import CheckpointStore
from gradus.run.episodes import images_in
from gradus.run.paths import RunDirectory
from gradus.wire.images import ImageStore
from gradus_lab.chaos.invariants import check_run
from gradus_reverse_text.words import generate_texts

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

LISTENERS = "listeners.json"
NUM_STEPS = 6
NUM_GROUPS, GROUP_SIZE = 4, 4
NUM_HELD_OUT = 6
"""Tasks of an evaluation."""

SFT_TOML = """
name = "warm-up"
output_dir = "{root}"
max_steps = 6
batch_conversations = 16
[model]
name = "{model}"
max_length_tokens = 96
[data]
path = "{root}/conversations.jsonl"
[optimizer]
lr = 1e-3
"""
RL_TOML = """
name = "whole"
output_dir = "{root}"
max_steps = {steps}
[model]
name = "{root}/warm-up/model"
renderer = "qwen3-vl"
max_length_tokens = 192
[checkpoint]
interval_steps = 1
[orchestrator]
groups_per_batch = {groups}
[orchestrator.train.sampling]
temperature = 0.7
max_completion_tokens = 8
[[orchestrator.train.env]]
id = "gradus-test-drawings"
group_size = {size}
taskset = {{ turns = 2 }}
[orchestrator.eval]
interval_steps = 2
sampling = {{ temperature = 0 }}
[[orchestrator.eval.env]]
id = "gradus-reverse-text"
name = "held-out"
num_tasks = {held_out}
taskset = {{ split = "holdout" }}
[trainer]
deterministic = true
[trainer.optimizer]
lr = 1e-3
[inference]
kv_cache_gib = 0.2
max_num_seqs = 32
"""
MAKE_MODEL = (
    "import sys; from pathlib import Path; from gradus.companions import show_torchvision; "
    "show_torchvision(); from gradus.testing.tiny_images import build_tiny_image_model as make; "
    "make(Path(sys.argv[1]), num_layers=2, hidden_size=96)"
)
"""In a process of its own, in which transformers finds torchvision."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that `gradus sft` has trained for a few steps."""
    root = tmp_path_factory.mktemp("main-job")
    model = root / "start"
    subprocess.run([sys.executable, "-c", MAKE_MODEL, str(model)], check=True)
    texts = generate_texts(200, seed=1, min_words=1, max_words=2)
    rows = [
        {
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": text[::-1]},
            ]
        }
        for text in texts
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (root / "conversations.jsonl").write_text(lines)
    (root / "sft.toml").write_text(SFT_TOML.format(root=root, model=model))
    finish(start("sft", "@", str(root / "sft.toml")))
    return root


def write_rl_config(root: Path) -> str:
    path = root / "whole.toml"
    sizes = {"groups": NUM_GROUPS, "size": GROUP_SIZE, "held_out": NUM_HELD_OUT}
    path.write_text(RL_TOML.format(root=root, steps=NUM_STEPS, **sizes))
    return str(path)


def note_listeners(run_dir: Path, path: Path) -> None:
    """Write what listens in the run: role, address, who may reach it, and its word to strangers."""
    living = living_processes()
    found = []
    for child in read_json(RunDirectory(run_dir).processes)["processes"]:
        pids = [child["pid"], *(it.pid for it in descendants(child["pid"], living))]
        for it in listeners(pids):
            is_http = it.is_tcp and (child["name"].startswith("env_") or it.pid == child["pid"])
            found.append(
                {
                    "role": child["name"],
                    "address": it.address,
                    "is_tcp": it.is_tcp,
                    "mode": None if it.is_tcp else Path(it.address).parent.stat().st_mode & 0o777,
                    "answer": greet(it.port) if is_http and child["name"] != "trainer" else "",
                }
            )
    path.write_text(json.dumps(found))


def greet(port: int) -> str:
    """The first line of what a server says to somebody without a token."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return connection.recv(1000).decode(errors="replace").split("\r\n")[0]


@pytest.fixture(scope="module")
def run(workspace: Path) -> tuple[Path, str]:
    """A finished run whose orchestrator was killed after version 3, and what it printed."""
    config, run_dir = write_rl_config(workspace), workspace / "whole"
    process = start("rl", "@", config, variables={"PYTHONPATH": TEST_PATH})
    wait_for_checkpoint(run_dir, 3, process, seconds=240)
    note_listeners(run_dir, workspace / LISTENERS)
    kill(run_dir, "orchestrator")
    printed = finish(process)
    assert "orchestrator was killed by SIGKILL" in printed
    assert "restart 1 of 5 in 1 s, of orchestrator alone" in printed
    assert processes_of(run_dir) == []
    newest = CheckpointStore(RunDirectory(run_dir), term=0).latest()
    assert newest is not None
    assert newest.label.parts == ["trainer", "orchestrator"]
    return run_dir, printed


def trained(run_dir: Path) -> list[dict[str, Any]]:
    """The records of the steps; those of evaluations stand between them."""
    return [row for row in records(run_dir / "metrics.jsonl") if "loss/total/mean" in row]


def test_supervised_training_lowers_the_loss(workspace: Path) -> None:
    losses = [r["loss/total/mean"] for r in records(workspace / "warm-up" / "metrics.jsonl")]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def test_each_step_has_one_record_with_the_promised_numbers(run: tuple[Path, str]) -> None:
    rows = trained(run[0])
    assert [row["step"] for row in rows] == list(range(NUM_STEPS))
    promised = {
        "time",
        "episode/reward/mean",
        "episode/gradus-test-drawings/reward/mean",
        "sample/staleness/max",
        "loss/mismatch_kl/mean",
        "loss/entropy/mean",
        "time/step_seconds",
        "throughput/trained_tokens_per_second",
        "throughput/generated_tokens_per_second",
    }
    assert all(promised <= row.keys() for row in rows)
    assert all(math.isfinite(row[key]) for row in rows for key in promised)


@pytest.mark.shows("SEC1", "SEC6")
def test_only_known_roles_listen_and_only_for_this_user(
    run: tuple[Path, str], workspace: Path
) -> None:
    found = json.loads((workspace / LISTENERS).read_text())
    of_tcp = [it for it in found if it["is_tcp"]]
    environments = {"env_gradus-test-drawings", "eval_held-out"}
    assert {it["role"] for it in found} <= {"inference", "trainer", *environments}
    assert {it["address"] for it in of_tcp} == {"127.0.0.1"}
    assert {it["mode"] for it in found if not it["is_tcp"]} == {0o700}
    said = [it["answer"] for it in of_tcp if it["answer"]]
    assert any(it.startswith("HTTP/1.1 401") for it in said)
    assert [it for it in said if " 200 " in it] == []


@pytest.mark.shows("F05", "I1", "I2", "I3", "I4", "I6", "I7", "I8", "I9")
def test_what_must_hold_holds_after_the_kill(run: tuple[Path, str]) -> None:
    assert check_run(RunDirectory(run[0])) == []


def test_trainer_and_engine_agree_on_the_sampled_tokens(run: tuple[Path, str]) -> None:
    first = trained(run[0])[0]
    assert first["sample/staleness/max"] == 0
    assert 0 <= first["loss/mismatch_kl/mean"] < 0.01


@pytest.mark.shows("F46", "I3")
def test_nothing_older_than_allowed_is_trained(run: tuple[Path, str]) -> None:
    rows = trained(run[0])
    assert all(0 <= row["sample/staleness/max"] <= row["step"] for row in rows)


def test_every_episode_is_kept_as_a_readable_record(run: tuple[Path, str]) -> None:
    for step in range(NUM_STEPS):
        episodes = records(run[0] / "episodes" / f"step_{step}" / "train.jsonl")
        assert len(episodes) >= NUM_GROUPS * 2
        trace = episodes[0]["traces"][0]
        assert [node["message"]["role"] for node in trace["nodes"]][:2] == ["user", "assistant"]
        assert "__nd__" not in json.dumps(trace)


def test_each_image_that_an_episode_shows_is_kept_once_by_its_bytes(run: tuple[Path, str]) -> None:
    run_dir = RunDirectory(run[0])
    shown: set[str] = set()
    for path in run[0].glob("episodes/*/train.jsonl"):
        for episode in records(path):
            assert "base64" not in json.dumps(episode)
            said = [node["message"] for node in episode["traces"][0]["nodes"]]
            shown |= {name for it in said for name in images_in(it.get("content"))}
    assert len(shown) >= 2 * NUM_GROUPS * NUM_STEPS
    assert all(ImageStore(run_dir.images).read(name) for name in shown)
    assert {it.name for it in run_dir.images.iterdir()} >= shown


def test_a_reward_is_that_of_what_was_said_after_both_images(run: tuple[Path, str]) -> None:
    for episode in records(run[0] / "episodes" / "step_0" / "train.jsonl"):
        trace = episode["traces"][0]
        said = [it["message"].get("content") or "" for it in trace["nodes"] if it["sampled"]]
        if episode["gradus"]["error"] is None:  # nor did the policy write a placeholder itself
            assert len(said) == 2
            even = [sum(map(str.islower, it)) % 2 == 0 for it in said]
            assert trace["rewards"]["evenly"]["score"] == sum(even) / 2


def test_the_final_model_is_the_last_published_version(run: tuple[Path, str]) -> None:
    model = load_file(run[0] / "model" / "model.safetensors")
    published = load_file(run[0] / "weights" / f"version_{NUM_STEPS:08d}" / "model.safetensors")
    assert set(published) == set(model)
    assert all(torch.equal(model[name], tensor) for name, tensor in published.items())
    AutoModelForImageTextToText.from_pretrained(run[0] / "model", dtype=torch.bfloat16)


@pytest.mark.shows("F05", "I1", "I2")
def test_no_task_is_lost_and_no_sample_trains_twice(run: tuple[Path, str]) -> None:
    found = check_journal(read_journal(RunDirectory(run[0]).journal))
    assert found.problems == []
    assert list(found.batches) == list(range(NUM_STEPS))
    assert found.open_episodes == set()


def test_each_evaluation_measures_one_version_once(run: tuple[Path, str]) -> None:
    run_dir = run[0]
    lines = surviving(read_journal(RunDirectory(run_dir).journal))
    ended = [e["version"] for e in lines if e["event"] == JournalEvent.EVALUATION_ENDED]
    assert ended == [0, 2, 4, 6]
    rows = [row for row in records(run_dir / "metrics.jsonl") if "eval/version" in row]
    assert [(row["step"], row["eval/version"]) for row in rows] == [(n, n) for n in ended]
    for version in ended:
        episodes = records(run_dir / "episodes" / f"step_{version}" / "eval.jsonl")
        found = [episode["gradus"] for episode in episodes]
        assert sorted(s["task"]["index"] for s in found) == list(range(NUM_HELD_OUT))
        assert all(s["versions"] == {"oldest": version, "newest": version} for s in found)
        assert all(s["error"] is None for s in found)


def test_no_weights_change_while_an_evaluation_runs(run: tuple[Path, str]) -> None:
    """Neither in the surviving lineage nor in what the kill made void."""
    measured: int | None = None
    for line in read_journal(RunDirectory(run[0]).journal):
        match line["event"]:
            case JournalEvent.EVALUATION_STARTED:
                measured = line["version"]
            case JournalEvent.EVALUATION_ENDED | JournalEvent.RUN_RESUMED:
                measured = None
            case JournalEvent.POLICY_APPLIED:
                assert measured is None


def test_training_changed_the_weights(run: tuple[Path, str], workspace: Path) -> None:
    before = load_file(workspace / "warm-up" / "model" / "model.safetensors")
    after = load_file(run[0] / "model" / "model.safetensors")
    assert any(not torch.equal(before[name].to(t.dtype), t) for name, t in after.items())


def test_a_person_sees_each_process_each_step_and_the_results(run: tuple[Path, str]) -> None:
    run_dir, printed = run
    for process in (
        "inference",
        "env_gradus-test-drawings",
        "eval_held-out",
        "trainer",
        "orchestrator",
    ):
        assert any(line.startswith(process) and "ready in" in line for line in printed.splitlines())
    assert all(f"step {step}/{NUM_STEPS}" in printed for step in range(1, NUM_STEPS + 1))
    assert str(run_dir) in printed.splitlines()[-1]
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "done"


@pytest.mark.shows("I7", "I9", "SEC3")
def test_no_process_outlives_the_run_and_no_token_is_logged(run: tuple[Path, str]) -> None:
    run_dir, printed = run
    assert processes_of(run_dir) == []
    tokens = [path.read_text() for path in (run_dir / "secrets").iterdir()]
    assert len(tokens) == 2
    texts = [printed, *(path.read_text() for path in run_dir.rglob("*.log"))]
    texts += [path.read_text() for path in (run_dir / "config").iterdir()]
    assert not [token for token in tokens for text in texts if token in text]


def test_a_replay_of_the_asynchronous_run_reaches_bitwise_the_same_weights(
    run: tuple[Path, str], tmp_path: Path
) -> None:
    assert max(row["sample/staleness/max"] for row in trained(run[0])) >= 1
    replay = tmp_path / "again"
    printed = finish(start("lab", "replay", str(run[0]), "--run-dir", str(replay)))
    assert f"bitwise the same: {NUM_STEPS} published versions" in printed
    assert "of 1 launch" in printed
    assert not (replay / "logs" / "inference.log").exists()
    before, after = (path / "model" / "model.safetensors" for path in (run[0], replay))
    assert before.read_bytes() == after.read_bytes()


def test_a_replay_with_another_loss_repeats_the_batches_and_not_the_weights(
    run: tuple[Path, str], tmp_path: Path
) -> None:
    folder = str(tmp_path / "other")
    words = ("--run-dir", folder, "--trainer.optimizer.lr", "1e-4", "--max-steps", "2")
    printed = finish(start("lab", "replay", str(run[0]), *words))
    assert "trainer.optimizer.lr was 0.001 and is 0.0001" in printed
    assert "batches     2 made again from the episodes, each as recorded" in printed
    assert "the weights differ, as they may" in printed
