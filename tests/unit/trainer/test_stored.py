"""A model read piece by piece into its shards is, bit by bit, the one that transformers loads."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import FAMILIES, build_family, family_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from gradus.config import LoraConfig, ModelConfig, ParallelConfig, TrainerConfig
from gradus.errors import ConfigError, CorruptStateError
from gradus.trainer.distributed import World
from gradus.trainer.model import stored
from gradus.trainer.model.attention import ATTENTION_NAME
from gradus.trainer.model.build import build_policy
from gradus.trainer.model.load import load_model, outline_model
from gradus.trainer.model.lora import add_adapters
from gradus.trainer.model.probe import refuse_inexact

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
ON_RANKS = ("llama", "tied", "gemma3 with windows", "qwen3", "gpt2", "gpt_neox", "mixtral")
"""Families that differ in names, ties, buffers or experts."""


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=ATTENTION_NAME
    )


def tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, also those that are never saved."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **model.state_dict()}


def assert_same(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    ours, theirs = tensors(model), tensors(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def change_files(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file, metadata={"format": "pt"})


@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_is_the_one_that_transformers_loads(tmp_path: Path, case: str) -> None:
    build_family(tmp_path, *FAMILIES[case])
    model, expected = load_model(family_config(tmp_path), CPU), plain(tmp_path)
    assert_same(model, expected)
    assert type(model) is type(expected)
    assert model.config.to_dict() == expected.config.to_dict()
    assert model.generation_config == expected.generation_config
    assert len(model._weight_conversions) == len(expected._weight_conversions)


def test_no_parameter_has_memory_before_it_is_filled(tmp_path: Path) -> None:
    build_family(tmp_path, *FAMILIES["mixtral"])
    state = torch.get_rng_state()
    outline = outline_model(family_config(tmp_path), CPU)
    assert all(it.is_meta for it in outline.model.parameters())
    assert not any(it.is_meta for it in outline.model.buffers())
    outline.fill(outline.model, CPU)
    assert torch.equal(torch.get_rng_state(), state)


WORKER = """
import sys
from pathlib import Path
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from gradus.config import LoraConfig, ModelConfig, ParallelConfig, TrainerConfig
from gradus.trainer.distributed import CPU, join_world, build_world
from gradus.trainer.model.build import build_policy

folder, copies = Path(sys.argv[1]), int(sys.argv[2])
parallel = ParallelConfig(replicate_size=copies)
with join_world(CPU, parallel=parallel) as world:
    for model in sorted(folder.iterdir()):
        base = ModelConfig(name=str(model), max_length_tokens=64)
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        # GPT-2 has no linear layers to adapt.
        for lora in (None, LoraConfig(rank=2))[: 1 if model.name == "gpt2" else 2]:
            settings = TrainerConfig.model_validate(
                {"parallel": parallel, "lora": None if lora is None else lora.model_dump()}
            )
            dtype = torch.float32 if lora is None else torch.bfloat16
            policy = build_policy(base, settings, world, dtype)
            expected = dict(plain.named_parameters()) | dict(plain.named_buffers())
            found = dict(policy.model.named_parameters()) | dict(policy.model.named_buffers())
            for name, tensor in expected.items():
                whole = found[name]
                if isinstance(whole, DTensor):
                    assert whole.to_local().numel() <= -(-tensor.shape[0] * copies // world.size) \\
                        * tensor[0].numel(), name
                    whole, tensor = whole.full_tensor(), tensor.to(whole.dtype)
                assert torch.equal(whole, tensor), (model.name, name)
    print("same")
"""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_hold_their_rows_of_the_same_values(
    tmp_path: Path, run_ranks: Callable[..., str], num_ranks: int
) -> None:
    for case in ON_RANKS:
        build_family(tmp_path / "models" / case.replace(" ", "_"), *FAMILIES[case])
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    assert "same" in run_ranks(worker, tmp_path / "models", 1, num_ranks=num_ranks)


def test_copies_of_the_model_hold_the_same_values(
    tmp_path: Path, run_ranks: Callable[..., str]
) -> None:
    build_family(tmp_path / "models" / "qwen3", *FAMILIES["qwen3"])
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    assert "same" in run_ranks(worker, tmp_path / "models", 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_files_of_any_precision_become_float32_masters(tmp_path: Path, dtype: torch.dtype) -> None:
    build_family(tmp_path, *FAMILIES["qwen3"]).to(dtype).save_pretrained(tmp_path)
    assert_same(load_model(family_config(tmp_path), CPU), plain(tmp_path))


def test_a_model_in_many_files_is_the_same(tmp_path: Path) -> None:
    model = build_family(tmp_path, *FAMILIES["mixtral"])
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(load_model(family_config(tmp_path), CPU), plain(tmp_path))


def test_a_missing_file_of_many_is_named(tmp_path: Path) -> None:
    model = build_family(tmp_path, *FAMILIES["llama"])
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(family_config(tmp_path), CPU)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    build_family(tmp_path, *FAMILIES["llama"])
    change_files(tmp_path, lambda state: state.pop("model.norm.weight"))
    with pytest.raises(CorruptStateError, match=r"lacks 1 tensors.*'model.norm.weight'"):
        load_model(family_config(tmp_path), CPU)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    build_family(tmp_path, *FAMILIES["mixtral"])
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    change_files(tmp_path, lambda state: state.pop(name))
    with pytest.raises(CorruptStateError, match=r"layers.1.mlp.experts.down_proj.*has shape \[7,"):
        load_model(family_config(tmp_path), CPU)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    build_family(tmp_path, *FAMILIES["llama"])

    def widen(state: dict[str, Tensor]) -> None:
        state["model.norm.weight"] = torch.ones(33)

    change_files(tmp_path, widen)
    with pytest.raises(CorruptStateError, match=r"'model.norm.weight' has shape \[33\] .*\[128\]"):
        load_model(family_config(tmp_path), CPU)


def test_experts_of_different_shapes_are_named(tmp_path: Path) -> None:
    build_family(tmp_path, *FAMILIES["mixtral"])
    name = "model.layers.0.block_sparse_moe.experts.0.w2.weight"
    change_files(tmp_path, lambda state: state.update({name: torch.ones(3, 3)}))
    with pytest.raises(CorruptStateError, match=r"experts.down_proj.*do not fit together"):
        load_model(family_config(tmp_path), CPU)


def test_a_tensor_without_a_place_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_family(tmp_path, *FAMILIES["llama"])
    more = {"model.mtp.weight": torch.ones(2), "model.layers.0.rotary_emb.inv_freq": torch.ones(4)}
    change_files(tmp_path, lambda state: state.update(more))
    with caplog.at_level(logging.WARNING):
        load_model(family_config(tmp_path), CPU)
    assert "hold 1 tensors that the model has no place for, the first is 'model.mtp" in caplog.text


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    build_family(tmp_path, *FAMILIES["llama"])
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CorruptStateError, match="damaged"):
        load_model(family_config(tmp_path), CPU)


def test_a_tied_tensor_may_be_stored_under_either_name(tmp_path: Path) -> None:
    build_family(tmp_path, *FAMILIES["tied"])
    expected = plain(tmp_path)

    def rename(state: dict[str, Tensor]) -> None:
        state["lm_head.weight"] = state.pop("model.embed_tokens.weight")

    change_files(tmp_path, rename)
    model = load_model(family_config(tmp_path), CPU)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(model, expected)


@pytest.mark.parametrize("is_equal", [True, False])
def test_ties_hold_where_both_stored_tensors_agree(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_equal: bool
) -> None:
    build_family(tmp_path, *FAMILIES["tied"])

    def double(state: dict[str, Tensor]) -> None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"] + (0 if is_equal else 1)

    change_files(tmp_path, double)
    with caplog.at_level(logging.WARNING):
        model = load_model(family_config(tmp_path), CPU)
    assert_same(model, plain(tmp_path))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_equal
    assert ("is loaded whole" in caplog.text) != is_equal


def test_weights_of_torch_are_loaded_whole_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_family(tmp_path, *FAMILIES["llama"])
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    with caplog.at_level(logging.WARNING):
        model = load_model(family_config(tmp_path), CPU)
    assert "because its weights are not safetensors files" in caplog.text
    assert_same(model, plain(tmp_path))


def test_names_of_a_bare_backbone_are_found(tmp_path: Path) -> None:
    """Files saved from a model without head, as GPT-2's are."""
    build_family(tmp_path, *FAMILIES["gpt2"])
    expected = plain(tmp_path)

    def strip(state: dict[str, Tensor]) -> None:
        for name in list(state):
            state[name.removeprefix("transformer.")] = state.pop(name)

    change_files(tmp_path, strip)
    assert_same(load_model(family_config(tmp_path), CPU), expected)


def test_adapters_start_as_they_do_beside_a_whole_model(tmp_path: Path, world: World) -> None:
    build_family(tmp_path, *FAMILIES["qwen3"])
    lora = LoraConfig(rank=2)
    settings = TrainerConfig.model_validate({"lora": lora.model_dump()})
    torch.manual_seed(5)
    whole = plain(tmp_path)
    add_adapters(whole, lora, torch.bfloat16)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    policy = build_policy(family_config(tmp_path), settings, world, torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), after)
    found = {name: it.full_tensor() for name, it in policy.model.named_parameters()}
    for name, parameter in whole.named_parameters():
        assert torch.equal(found[name], parameter), name


def test_what_a_checkpoint_will_bring_is_not_read_and_cannot_be_trained_unread(
    tmp_path: Path, world: World
) -> None:
    build_family(tmp_path, *FAMILIES["qwen3"])
    arguments = (family_config(tmp_path), TrainerConfig(), world, torch.float32)
    policy = build_policy(*arguments, is_resumed=True)
    values = policy.model.model.norm.weight.full_tensor()
    assert values.isnan().all()
    with pytest.raises(ConfigError, match="logprobs that are not numbers"):
        refuse_inexact(policy, world)


def test_a_resumed_adapter_run_reads_what_is_frozen(tmp_path: Path, world: World) -> None:
    build_family(tmp_path, *FAMILIES["qwen3"])
    settings = TrainerConfig.model_validate({"lora": {"rank": 2}})
    policy = build_policy(family_config(tmp_path), settings, world, torch.float32, is_resumed=True)
    expected = dict(plain(tmp_path).named_parameters())
    for name, parameter in policy.model.named_parameters():
        if name in expected:
            assert torch.equal(parameter.full_tensor(), expected[name]), name
    refuse_inexact(policy, world)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_the_probe_leaves_the_policy_as_it_was(tmp_path: Path, world: World, mode: Any) -> None:
    build_family(tmp_path, *FAMILIES["qwen3"])
    settings = TrainerConfig(parallel=ParallelConfig(activation_checkpointing=mode))
    policy = build_policy(family_config(tmp_path), settings, world, torch.float32)
    before = [module.__dict__.get("forward") for module in policy.modules()]
    refuse_inexact(policy, world)
    assert [module.__dict__.get("forward") for module in policy.modules()] == before
    assert any(before)
    assert policy.model.config._attn_implementation == ATTENTION_NAME


def test_a_wrong_kernel_is_refused_where_it_trains(tmp_path: Path, world: World) -> None:
    """A layer whose replaced forward computes something else, in the dtype of training."""
    build_family(tmp_path, *FAMILIES["qwen3"])
    for dtype in (torch.float32, torch.bfloat16):
        policy = build_policy(family_config(tmp_path), TrainerConfig(), world, dtype)
        norm = policy.model.model.norm
        forward = norm.forward
        norm.forward = lambda hidden, forward=forward: 1.2 * forward(hidden)
        with pytest.raises(ConfigError, match="leaves out: logprobs differ by"):
            refuse_inexact(policy, world)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(ModelConfig(name=str(tmp_path)), CPU)


def test_a_model_whose_published_names_would_not_be_read_again_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if transformers could load the experts of a family, but not take them apart again."""
    build_family(tmp_path, *FAMILIES["mixtral"])
    shapes = {"model.layers.0.mlp.experts.gate_up_proj": torch.empty(4, 96, 31, device="meta")}
    monkeypatch.setattr(stored, "revert_weight_conversion", lambda model, state: state | shapes)
    with pytest.raises(ConfigError, match="cannot be published: under the names"):
        load_model(family_config(tmp_path), CPU)
