"""The main job on real parts: `gradus sft`, then `gradus rl` with vLLM, verifiers and FSDP2."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from commands import finish, processes_of, records, start
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gradus_reverse_text.words import generate_texts

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

NUM_STEPS = 3
NUM_GROUPS, GROUP_SIZE = 4, 4

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
name = "{name}"
output_dir = "{root}"
max_steps = {steps}
[model]
name = "{root}/warm-up/model"
renderer = "qwen3"
max_length_tokens = 96
[orchestrator]
groups_per_batch = {groups}
[orchestrator.train.sampling]
temperature = 0.7
max_completion_tokens = 24
[[orchestrator.train.env]]
id = "gradus-reverse-text"
group_size = {size}
pool = {{ type = "static", num_workers = 1 }}
[trainer]
deterministic = true
[trainer.optimizer]
lr = 1e-3
[inference]
kv_cache_gib = 0.2
max_num_seqs = 32
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with a model that `gradus sft` has trained for a few steps."""
    root = tmp_path_factory.mktemp("main-job")
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
    (root / "sft.toml").write_text(SFT_TOML.format(root=root, model=tiny_model))
    finish(start("sft", "@", str(root / "sft.toml")))
    return root


def write_rl_config(root: Path, name: str, *, steps: int) -> Path:
    path = root / f"{name}.toml"
    path.write_text(
        RL_TOML.format(root=root, name=name, steps=steps, groups=NUM_GROUPS, size=GROUP_SIZE)
    )
    return path


@pytest.fixture(scope="module")
def run(workspace: Path) -> tuple[Path, str]:
    """A finished run of a few steps: its directory and what it printed."""
    config = write_rl_config(workspace, "whole", steps=NUM_STEPS)
    return workspace / "whole", finish(start("rl", "@", str(config)))


def test_supervised_training_lowers_the_loss(workspace: Path) -> None:
    losses = [r["loss/total/mean"] for r in records(workspace / "warm-up" / "metrics.jsonl")]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def test_each_step_has_one_record_with_the_promised_numbers(run: tuple[Path, str]) -> None:
    rows = records(run[0] / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(NUM_STEPS))
    promised = {
        "time",
        "episode/reward/mean",
        "episode/gradus-reverse-text/reward/mean",
        "sample/staleness/max",
        "loss/mismatch_kl/mean",
        "loss/entropy/mean",
        "time/step_seconds",
        "throughput/trained_tokens_per_second",
        "throughput/generated_tokens_per_second",
    }
    assert all(promised <= row.keys() for row in rows)
    assert all(math.isfinite(row[key]) for row in rows for key in promised)


def test_trainer_and_engine_agree_on_the_sampled_tokens(run: tuple[Path, str]) -> None:
    first = records(run[0] / "metrics.jsonl")[0]
    assert first["sample/staleness/max"] == 0
    assert 0 <= first["loss/mismatch_kl/mean"] < 0.01


def test_nothing_older_than_allowed_is_trained(run: tuple[Path, str]) -> None:
    rows = records(run[0] / "metrics.jsonl")
    assert all(0 <= row["sample/staleness/max"] <= row["step"] for row in rows)


def test_every_episode_is_kept_as_a_readable_record(run: tuple[Path, str]) -> None:
    for step in range(NUM_STEPS):
        episodes = records(run[0] / "episodes" / f"step_{step}" / "train.jsonl")
        assert len(episodes) >= NUM_GROUPS * 2
        trace = episodes[0]["traces"][0]
        assert [node["message"]["role"] for node in trace["nodes"]] == ["user", "assistant"]
        assert "__nd__" not in json.dumps(trace)


def test_the_final_model_is_the_last_published_version(run: tuple[Path, str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(run[0] / "model", dtype=torch.bfloat16)
    published = load_file(run[0] / "weights" / f"version_{NUM_STEPS:08d}" / "model.safetensors")
    parameters = dict(model.named_parameters())
    assert set(published) <= set(parameters)
    assert all(torch.equal(parameters[name], tensor) for name, tensor in published.items())


def test_training_changed_the_weights(run: tuple[Path, str], workspace: Path) -> None:
    before = load_file(workspace / "warm-up" / "model" / "model.safetensors")
    after = load_file(run[0] / "model" / "model.safetensors")
    assert any(not torch.equal(before[name].to(t.dtype), t) for name, t in after.items())


def test_a_person_sees_each_process_each_step_and_the_results(run: tuple[Path, str]) -> None:
    run_dir, printed = run
    for process in ("inference", "env_gradus-reverse-text", "trainer", "orchestrator"):
        assert any(line.startswith(process) and "ready in" in line for line in printed.splitlines())
    assert all(f"step {step}/{NUM_STEPS}" in printed for step in range(1, NUM_STEPS + 1))
    assert str(run_dir) in printed.splitlines()[-1]
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "done"


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
    assert max(row["sample/staleness/max"] for row in records(run[0] / "metrics.jsonl")) >= 1
    replay = tmp_path / "again"
    printed = finish(start("rl", "--replay", str(run[0]), "--run-dir", str(replay)))
    assert f"bitwise the same: {NUM_STEPS} published versions" in printed
    assert not (replay / "logs" / "inference.log").exists()
    before, after = (path / "model" / "model.safetensors" for path in (run[0], replay))
    assert before.read_bytes() == after.read_bytes()


def test_a_replay_with_another_loss_repeats_the_batches_and_not_the_weights(
    run: tuple[Path, str], tmp_path: Path
) -> None:
    folder = str(tmp_path / "other")
    words = ("--run-dir", folder, "--trainer.optimizer.lr", "1e-4", "--max-steps", "2")
    printed = finish(start("rl", "--replay", str(run[0]), *words))
    assert "trainer.optimizer.lr was 0.001 and is 0.0001" in printed
    assert "batches     2 made again from the episodes, each as recorded" in printed
    assert "the weights differ, as they may" in printed
