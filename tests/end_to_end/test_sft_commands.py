"""`gradus sft` killed twice, then `gradus export`, then `gradus eval` of what came out.

The run that nothing kills trains on another node, and the evaluation's server is on one too.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from commands import finish, kill, processes_of, records, start, wait_for_checkpoint, wait_until
from transformers import AutoModelForCausalLM, AutoTokenizer

from gradus.files import read_json
from gradus_reverse_text.words import generate_texts

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

MAX_STEPS = 30
SFT_TOML = """
name = "{name}"
output_dir = "{root}"
max_steps = {steps}
batch_conversations = 5
deterministic = true
compute_dtype = "float32"
[model]
name = "{model}"
max_length_tokens = 96
[data]
path = "{root}/conversations.jsonl"
[checkpoint]
interval_steps = 3
[optimizer]
lr = 3e-3
"""
EVAL_TOML = """
name = "e"
output_dir = "{root}"
[model]
name = "{root}/exported"
renderer = "qwen3"
max_length_tokens = 96
[sampling]
temperature = 0
max_completion_tokens = 12
[[env]]
id = "gradus-reverse-text"
num_tasks = 8
[inference]
dtype = "float32"
kv_cache_gib = 0.2
max_num_seqs = 32
[launch.nodes]
inference = [1]
host = "127.0.0.1"
"""
ON_ANOTHER_NODE = ("--launch.nodes.trainer", "[1]", "--launch.nodes.host", "127.0.0.1")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 23 conversations: no pass ends where a checkpoint lies."""
    root = tmp_path_factory.mktemp("s")
    texts = generate_texts(23, seed=1, min_words=1, max_words=2)
    rows = [{"prompt": text, "completion": text[::-1]} for text in texts]
    (root / "conversations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def sft(root: Path, name: str, model: Path, *words: str) -> subprocess.Popen[str]:
    config = root / f"{name}.toml"
    config.write_text(SFT_TOML.format(root=root, name=name, model=model, steps=MAX_STEPS))
    return start("sft", "@", str(config), *words)


def finish_over_nodes(launcher: subprocess.Popen[str], run_dir: Path) -> None:
    """Until the launcher and the side of node 1 have ended."""
    side = start("node", str(run_dir), "--number", "1")
    try:
        assert "node 1 " in finish(launcher)
        finish(side)
    finally:
        side.kill()
        side.communicate()


@pytest.fixture(scope="module")
def killed(root: Path, tiny_model: Path) -> Path:
    """A run that was killed twice: its launcher first, then its trainer."""
    run_dir = root / "killed"
    process = sft(root, "killed", tiny_model)
    wait_for_checkpoint(run_dir, 6, process)
    process.kill()
    process.communicate()
    wait_until(lambda: not processes_of(run_dir), what="the end of every process")
    process = sft(root, "killed", tiny_model, "--resume")
    wait_for_checkpoint(run_dir, 15, process)
    kill(run_dir, "trainer")
    printed = finish(process)
    assert "trainer was killed by SIGKILL" in printed
    assert "restart 1 of 5" in printed
    assert processes_of(run_dir) == []
    return run_dir


@pytest.mark.shows("F01", "F80", "I5")
def test_a_run_that_is_killed_twice_ends_as_an_undisturbed_one(
    root: Path, tiny_model: Path, killed: Path
) -> None:
    finish_over_nodes(sft(root, "straight", tiny_model, *ON_ANOTHER_NODE), root / "straight")
    ours, theirs = killed, root / "straight"
    assert [row["step"] for row in records(ours / "metrics.jsonl")] == list(range(MAX_STEPS))
    pairs = zip(records(ours / "metrics.jsonl"), records(theirs / "metrics.jsonl"), strict=True)
    assert all(a["loss/total/mean"] == b["loss/total/mean"] for a, b in pairs), "the data's order"
    for name in ("model/model.safetensors", f"checkpoints/step_{MAX_STEPS:08d}/trainer"):
        assert contents(ours / name) == contents(theirs / name)
    assert list((ours / "checkpoints").glob(".step_*")) == [], "half of one is left"


def contents(place: Path) -> dict[str, bytes]:
    files = [place] if place.is_file() else sorted(place.iterdir())
    return {file.name: file.read_bytes() for file in files}


def test_an_exported_checkpoint_says_the_same_in_transformers_and_in_vllm(
    root: Path, killed: Path
) -> None:
    exported = root / "exported"
    finish(start("export", str(killed), str(exported)))
    (root / "eval.toml").write_text(EVAL_TOML.format(root=root))
    finish_over_nodes(start("eval", "@", str(root / "eval.toml")), root / "e")
    (row,) = read_json(root / "e" / "results.json")["environments"]
    assert row["num_episodes"] == 8
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    for record in records(root / "e" / "episodes" / "step_0" / "eval.jsonl"):
        asked, replied = [node["message"] for node in record["traces"][0]["nodes"]]
        assert replied["content"] == greedy_reply(model, tokenizer, asked["content"])


def greedy_reply(model: torch.nn.Module, tokenizer: AutoTokenizer, text: str) -> str:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    tokens = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    reply: str = tokenizer.decode(
        tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return reply
