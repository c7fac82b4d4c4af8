"""What is published loads as a Hugging Face model and equals the trained weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from gradus.config import ModelConfig
from gradus.errors import ConfigError, CorruptStateError
from gradus.run.paths import RunDirectory
from gradus.testing.builders import build_micro_batch, build_sample
from gradus.testing.tiny_model import build_tiny_model
from gradus.trainer.distributed import World
from gradus.trainer.losses import Dppo
from gradus.trainer.model.load import load_model, load_tokenizer
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import shard_model
from gradus.trainer.publish import PolicyPublisher, model_files, save_model, serving_tensors
from gradus.trainer.step import GradientStep
from gradus.weights.filesystem import FilesystemWeights
from gradus.weights.published import verify_version

pytestmark = pytest.mark.torch


def config_of(directory: Path) -> ModelConfig:
    return ModelConfig(name=str(directory))


def test_a_published_version_is_the_model_in_the_serving_dtype(
    build_policy: Callable[..., PolicyModel], tiny_model: Path, world: World, tmp_path: Path
) -> None:
    policy = build_policy(torch.bfloat16)
    files = model_files(policy.model, load_tokenizer(config_of(tiny_model)), torch.bfloat16)
    weights = FilesystemWeights(RunDirectory(tmp_path), term=0, extra_files=files)
    publisher = PolicyPublisher(policy.model, world, dtype=torch.bfloat16, weights=weights)
    published = publisher.publish_version(1)
    assert published is not None
    verify_version(published.directory, published.digest)
    stored = load_file(published.directory / "model.safetensors")
    trained = dict(policy.model.named_parameters())
    assert stored.keys() == trained.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor, trained[name].full_tensor().bfloat16())


def test_a_saved_model_loads_with_its_tokenizer(
    build_policy: Callable[..., PolicyModel], tiny_model: Path, world: World, tmp_path: Path
) -> None:
    policy = build_policy()
    files = model_files(policy.model, load_tokenizer(config_of(tiny_model)), torch.float32)
    for _ in range(2):  # The second time replaces the first.
        save_model(policy.model, world, torch.float32, tmp_path / "model", files)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.dtype == torch.float32
    original = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert all(torch.equal(value, original[name]) for name, value in loaded.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_tied_embeddings_are_stored_once(world: World, tmp_path: Path) -> None:
    directory = build_tiny_model(
        tmp_path / "tied", hidden_size=32, num_layers=1, tie_word_embeddings=True
    )
    policy = shard_model(
        PolicyModel(load_model(config_of(directory), world.device)), world.mesh, torch.float32
    )
    names = {name for name, _ in serving_tensors(policy.model, torch.bfloat16)}
    assert names == set(load_file(directory / "model.safetensors"))
    assert "lm_head.weight" not in names


def test_ranks_that_do_not_write_keep_nothing(
    build_policy: Callable[..., PolicyModel],
) -> None:
    assert list(serving_tensors(build_policy().model, torch.bfloat16, keep=False)) == []


def test_a_write_that_fails_is_raised_after_all_gathered(
    build_policy: Callable[..., PolicyModel], world: World
) -> None:
    class Broken:
        def wait_for_room(self) -> None: ...

        def publish_version(self, version: int, tensors: Any) -> Any:
            next(iter(tensors))
            raise OSError("disk full")

        def close(self) -> None: ...

    publisher = PolicyPublisher(build_policy().model, world, dtype=torch.float32, weights=Broken())
    with pytest.raises(OSError, match="disk full"):
        publisher.publish_version(1)


def test_files_beside_the_weights_say_the_serving_dtype(tiny_model: Path, world: World) -> None:
    model = load_model(config_of(tiny_model), world.device)
    files = model_files(model, load_tokenizer(config_of(tiny_model)), torch.bfloat16)
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= files.keys()
    assert b'"bfloat16"' in files["config.json"]
    assert b"gradus" not in files["config.json"]


def test_a_llama_trains_like_any_other_model(world: World, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    policy = shard_model(
        PolicyModel(load_model(config_of(tmp_path), world.device)), world.mesh, torch.float32
    )
    samples = [build_sample(9, seed=1), build_sample(5, seed=2)]
    step = GradientStep(policy, Dppo(), world)
    together = step.run([build_micro_batch(samples)])
    packed = {n: p.grad.full_tensor().clone() for n, p in policy.named_parameters()}
    policy.zero_grad()
    apart = step.run([build_micro_batch([sample]) for sample in samples])
    assert together.total == pytest.approx(apart.total, rel=1e-5)
    for name, parameter in policy.named_parameters():
        np.testing.assert_allclose(parameter.grad.full_tensor(), packed[name], rtol=1e-3, atol=1e-6)


def test_a_missing_model_is_a_config_error(tmp_path: Path, world: World) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(config_of(tmp_path / "nothing"), world.device)
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(config_of(tmp_path / "nothing"))


def test_damaged_or_incomplete_weights_are_refused(
    tiny_model: Path, tmp_path: Path, world: World
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_model, directory)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptStateError, match=r"model\.norm\.weight"):
        load_model(config_of(directory), world.device)
    os.truncate(directory / "model.safetensors", 1000)
    with pytest.raises(CorruptStateError, match="damaged"):
        load_model(config_of(directory), world.device)


def test_odd_generation_settings_do_not_stop_a_save(tiny_model: Path, world: World) -> None:
    model = load_model(config_of(tiny_model), world.device)
    model.generation_config.temperature = 0.6
    model.generation_config.do_sample = False
    files = model_files(model, load_tokenizer(config_of(tiny_model)), torch.bfloat16)
    assert json.loads(files["generation_config.json"])["temperature"] == 0.6


def test_a_model_that_changes_its_logits_is_refused(tiny_model: Path, world: World) -> None:
    model = load_model(config_of(tiny_model), world.device)
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        PolicyModel(model)
