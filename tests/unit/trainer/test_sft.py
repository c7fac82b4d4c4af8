"""Supervised runs learn a toy file and leave a model behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gradus.config import (
    AdamWConfig,
    LoraConfig,
    ModelConfig,
    SftDataConfig,
    SftProcessConfig,
)
from gradus.errors import ConfigError
from gradus.run.paths import RunDirectory
from gradus.trainer.entry.sft import run

pytestmark = pytest.mark.torch


def write_greetings(path: Path) -> Path:
    rows = [
        {
            "messages": [
                {"role": "user", "content": letter},
                {"role": "assistant", "content": letter * 3},
            ]
        }
        for letter in "abcd"
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def build_config(root: Path, model: Path, data: Path, **options: Any) -> SftProcessConfig:
    settings = {
        "model": ModelConfig(name=str(model), max_length_tokens=64),
        "data": SftDataConfig(path=str(data)),
        "optimizer": AdamWConfig(lr=1e-2, warmup_steps=3),
        "max_steps": 30,
        "batch_conversations": 4,
        "micro_batch_tokens": 64,
        "compute_dtype": "float32",
        **options,
    }
    return SftProcessConfig(run_dir=str(root), term=0, **settings)


def test_a_toy_file_is_learned(tmp_path: Path, tiny_model: Path) -> None:
    data = write_greetings(tmp_path / "data.jsonl")
    run(build_config(tmp_path / "run", tiny_model, data))
    run_dir = RunDirectory(tmp_path / "run")
    records = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(30))
    assert records[0]["loss/ce/mean"] > 4
    assert records[-1]["loss/ce/mean"] < 0.1
    assert records[0]["batch/samples/sum"] == 4
    model = AutoModelForCausalLM.from_pretrained(run_dir.model)
    tokenizer = AutoTokenizer.from_pretrained(run_dir.model)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "c"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]) == "ccc<|im_end|>"


def test_an_adapter_learns_and_is_saved_beside_the_merged_model(
    tmp_path: Path, tiny_model: Path
) -> None:
    data = write_greetings(tmp_path / "data.jsonl")
    run(build_config(tmp_path / "run", tiny_model, data, lora=LoraConfig(), max_steps=12))
    run_dir = RunDirectory(tmp_path / "run")
    records = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    assert records[-1]["loss/ce/mean"] < 0.8 * records[0]["loss/ce/mean"]
    assert (run_dir.adapter / "adapter_model.safetensors").is_file()
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(run_dir.model, dtype=torch.float32)
    assert torch.equal(model.lm_head.weight, base.lm_head.weight)
    layer = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(model.get_parameter(layer), base.get_parameter(layer))


def test_the_loss_does_not_depend_on_micro_batches(tmp_path: Path, tiny_model: Path) -> None:
    data = write_greetings(tmp_path / "data.jsonl")
    losses = []
    for tokens in (24, 64):
        root = tmp_path / str(tokens)
        run(build_config(root, tiny_model, data, micro_batch_tokens=tokens, max_steps=3))
        lines = (root / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss/total/mean"] for line in lines])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_row_that_cannot_be_encoded_ends_the_run_before_its_first_step(
    tmp_path: Path, tiny_model: Path
) -> None:
    texts = ("a", "b", "\ud800", "d")
    rows = [json.dumps({"prompt": "x", "completion": text}) for text in texts]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    options = {"data": SftDataConfig(path=str(tmp_path / "data.jsonl"), shuffle=False)}
    config = build_config(tmp_path / "run", tiny_model, tmp_path, batch_conversations=1)
    with pytest.raises(ConfigError, match=r"data\.jsonl:3: the text is not Unicode"):
        run(config.model_copy(update=options))
    metrics = RunDirectory(tmp_path / "run").metrics
    assert not metrics.exists() or not metrics.read_text()


def test_a_wrong_data_file_ends_before_the_model_loads(tmp_path: Path, tiny_model: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("4\n")
    with pytest.raises(ConfigError, match=r"data\.jsonl:1"):
        run(build_config(tmp_path / "run", tmp_path / "no-model", data))
