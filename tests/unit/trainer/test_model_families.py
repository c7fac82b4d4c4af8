"""The contract of a family: each that is trained keeps all of it, or is refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import build_sample
from checkpoints import new_run
from model_families import (
    FAMILIES,
    LENGTHS,
    LOCAL_EXPERTS,
    PHI_LONG,
    adapted,
    build_family,
    distance,
    family_config,
    family_folder,
    gradients,
    mean_distance,
    metered,
    our_policy,
    own_logprobs,
    packed_logprobs,
    plain_model,
    samples,
    unpublished,
)
from models_page import ON_GPUS
from ranked_families import told
from transformers import AutoConfig, AutoModelForCausalLM

from gradus.config import AdamWConfig, ModelConfig, TrainerConfig, families, learning
from gradus.errors import ConfigError
from gradus.files import DurableFiles
from gradus.run.checkpoints import CheckpointStore
from gradus.trainer.checkpoint.saving import resume
from gradus.trainer.checkpoint.training_state import Origin, TrainingState
from gradus.trainer.distributed import ContextGroup, World, whole_tensor
from gradus.trainer.images.pixels import pixels_of
from gradus.trainer.images.tower import tower_parameters
from gradus.trainer.losses import Dppo
from gradus.trainer.model.build import build_policy
from gradus.trainer.model.layers import Recompute, decoder_layers, recompute_layers
from gradus.trainer.model.load import load_model
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.optimizer.optimizer import PolicyOptimizer
from gradus.trainer.publish import serving_tensors
from gradus.trainer.step import GradientStep
from gradus.trainer.tensors import TrainTensors
from gradus.trainer.throughput import ModelFlops
from gradus.weights.filesystem import FilesystemWeights
from gradus.wire.micro_batch import MicroBatch
from gradus.wire.packing import pack

pytestmark = pytest.mark.torch

IN_CONTEXT: dict[str, Any] = {"context_parallel_size": 2}
IN_RING = {**IN_CONTEXT, "context_parallel_style": "ring"}
SPLIT = {"expert_parallel_size": 2}
CPU = torch.device("cpu")
KINDS = (
    *("llama", "gemma2 with caps", "cohere2 with windows", "qwen3_moe", "gpt_oss", "deepseek_v3"),
    *("qwen3_5", "kimi_linear", "mamba2", "nemotron_h", "falcon_h1", "lfm2"),
    *("gemma4", "gemma4 with its tower", "llama4"),
)
"""Families that differ in what their layers compute; scripts/models asks all of them."""
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a recurrence": (
        "recurrent_gemma",
        {"block_types": ["recurrent", "attention"], "lru_width": 32, "logits_soft_cap": 1.0},
        "leaves out",
    ),
    "another recurrence": ("jamba", {"num_experts": 2}, "does not take its attention"),
    "a head of several layers": ("modernbert-decoder", {}, "leaves out"),
    "an encoder": ("bert", {"max_position_embeddings": 2048}, "cannot read packed samples"),
    "positions that change with length": ("phi3", PHI_LONG, "max_length_tokens = 2048"),
    "too few learned positions": ("gpt2", {}, "positions; lower model.max_length_tokens = 2048"),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_packed_logprobs_and_gradients_are_those_of_each_sample_alone(case: str) -> None:
    plain, policy, found = plain_model(case), our_policy(case), samples()
    ours, own = packed_logprobs(policy, found), own_logprobs(plain, found)
    assert [len(it) + 1 for it in ours] == list(LENGTHS)
    allowed = 2e-6
    if distance(ours, own) > allowed:
        exact = plain_model(case).double()
        exact.set_experts_implementation("eager")  # the grouped product has no float64
        with torch.no_grad():
            wide = own_logprobs(exact, found)
        allowed = max(allowed, 2 * distance(wide, own))
    assert distance(ours, own) <= allowed
    by_ours, by_own = gradients(policy.model, ours), gradients(plain, own)
    assert by_ours.keys() == by_own.keys()
    for name, gradient in by_own.items():
        torch.testing.assert_close(by_ours[name], gradient, rtol=0, atol=allowed)


@pytest.mark.parametrize("case", KINDS)
@torch.no_grad()
def test_in_bfloat16_packing_is_no_further_from_float32_than_the_model_itself(case: str) -> None:
    found = samples()
    exact = own_logprobs(plain_model(case), found)
    own = own_logprobs(plain_model(case, torch.bfloat16), found)
    ours = packed_logprobs(our_policy(case, torch.bfloat16), found)
    assert mean_distance(ours, exact) <= 1.2 * mean_distance(own, exact)


@pytest.mark.parametrize("case", FAMILIES)
def test_what_is_published_is_bit_by_bit_what_transformers_reads(case: str) -> None:
    assert unpublished(case) == []


@pytest.mark.parametrize("case", KINDS)
def test_operations_are_those_that_torch_counts(case: str) -> None:
    assert metered(case) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("case", KINDS)
def test_adapters_compute_what_the_merged_model_computes(case: str) -> None:
    found, leaves = adapted(case)
    assert found <= 1e-5
    assert leaves
    # Of a router that has other parts.
    assert "proj" not in leaves


def test_a_gpu_trains_the_families_that_were_as_near_to_float32_there_as_on_cpus() -> None:
    """By what `benchmarks/gpu_families.py` found, compiled or not."""
    noted = json.loads(ON_GPUS.read_text())["cases"]
    passing, failing = set(), set()
    for case, ways in noted.items():
        kept = all(way.get("passes") for way in ways.values())
        assert ways.keys() == {"plain", "compiled"}
        (passing if kept else failing).add(FAMILIES[case][0])
    # The whole of Qwen 3.5's mixtures goes by its part for text.
    assert failing == families.TRAINED_ON_CPUS - {"qwen3_5_moe"}
    # The others attend as llama does; their kernels are those of its row, and those of Qwen 3.5
    # with images are those of its part for text.
    text = families.CARRIES_STATE.keys() - {"qwen3_5", "qwen3_5_moe"}
    asked = text | {"gpt_oss", "gemma2", "minicpm3"}
    assert asked <= passing | failing


def test_a_buffer_is_published_as_the_trainer_computes_with_it() -> None:
    """GLM-4.5 chooses experts with a float32 bias, which bfloat16 would round."""
    model = load_model(family_config(family_folder("glm4_moe")), CPU)
    published = dict(serving_tensors(model, torch.bfloat16))
    dtypes = {name.rpartition(".")[2]: tensor.dtype for name, tensor in published.items()}
    assert dtypes == {"weight": torch.bfloat16, "e_score_correction_bias": torch.float32}


def test_positions_that_change_beyond_a_length_are_exact_up_to_it(tmp_path: Path) -> None:
    build_family(tmp_path, "phi3", PHI_LONG)
    load_model(ModelConfig(name=str(tmp_path), max_length_tokens=16), CPU)


def test_a_window_that_a_model_keeps_to_its_mask_is_refused_for_longer_samples(
    tmp_path: Path,
) -> None:
    build_family(tmp_path, "phimoe", {**LOCAL_EXPERTS, "sliding_window": 12})
    policy = PolicyModel(load_model(ModelConfig(name=str(tmp_path)), CPU))
    policy(TrainTensors.build(MicroBatch.join([build_sample(12)]), CPU))
    with pytest.raises(ConfigError, match="window of 12 tokens"):
        policy(TrainTensors.build(MicroBatch.join([build_sample(13)]), CPU))


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_packing_would_change_is_refused(
    tmp_path: Path, world: World, case: str
) -> None:
    family, options, reason = REFUSED[case]
    build_family(tmp_path, family, options)
    with pytest.raises(ConfigError, match=reason):
        build_policy(ModelConfig(name=str(tmp_path)), TrainerConfig(), world, torch.float32)


@pytest.mark.parametrize(
    ("case", "ways"),
    [
        ("gpt_oss", [{}, IN_CONTEXT, SPLIT]),
        ("deepseek_v3", [IN_CONTEXT, SPLIT]),
        ("nemotron_h", [SPLIT, IN_CONTEXT]),
        ("falcon_h1", [{}, IN_RING]),
        ("gemma4", [{}, IN_CONTEXT]),
        ("gemma4 with its tower", [{}, SPLIT]),
        ("llama4", [{}, IN_CONTEXT, SPLIT]),
    ],
)
def test_two_ranks_give_the_gradient_of_one(
    ranks: Any, world: World, case: str, ways: list[dict[str, Any]]
) -> None:
    """Windows, sinks and experts, narrow values, no gate, a recurrence; scripts/models asks all."""
    batch = [told(it) for it in samples((65, 9, 40, 17))]
    policy = build_policy(family_config(family_folder(case)), TrainerConfig(), world, torch.float32)
    (micro_batches,) = pack(batch, max_tokens=128, num_ranks=1)
    GradientStep(policy, Dppo(learning.DppoConfig()), world).run(micro_batches)
    trained = [it for it in policy.model.named_parameters() if it[1].requires_grad]
    grads = {name: whole_tensor(p.grad) for name, p in trained}  # type: ignore[arg-type]
    norm = torch.stack([it.norm() for it in grads.values()]).norm().item()
    for parallel in ways:
        _, found = ranks.run([batch], max_tokens=128, model=family_folder(case), **parallel)
        assert found.keys() == grads.keys()
        for name, gradient in grads.items():
            assert abs(found[name] - gradient.numpy()).max() <= 1e-6 * norm, name


@pytest.mark.parametrize("is_ring", [False, True])
@pytest.mark.parametrize(
    ("case", "words"),
    [("qwen3_5", "2 linear_num_value_heads"), ("mamba2", "8 num_heads"), ("lfm2", "128 hidden_s")],
)
def test_heads_with_state_that_cannot_be_shared_are_refused(
    case: str, words: str, is_ring: bool
) -> None:
    model = load_model(family_config(family_folder(case)), CPU)
    with pytest.raises(ConfigError, match=f"context_parallel_size = 3: the model's {words}"):
        PolicyModel(model, ContextGroup(0, 3, None, is_ring))  # type: ignore[arg-type]


def test_configs_say_how_many_heads_layers_with_state_have() -> None:
    for family, names in families.CARRIES_STATE.items():
        config = AutoConfig.for_model(family).get_text_config().to_dict()
        assert set(names) <= config.keys(), family


@torch.no_grad()
def test_a_tower_that_is_not_used_is_frozen_published_and_takes_no_image(world: World) -> None:
    """Whatever a run says of towers; and a sampled placeholder is a token like any other."""
    base, settings = family_config(family_folder("gemma4 with its tower")), TrainerConfig()
    settings = settings.model_copy(update={"train_vision": True})
    policy = build_policy(base, settings, world, torch.float32)
    tower = {id(it) for it in tower_parameters(policy.model)}
    trained = {id(it) for it in policy.model.parameters() if it.requires_grad}
    assert tower
    assert tower & trained == set()
    assert pixels_of(policy.model, base, Path("nowhere"), torch.float32) is None
    assert len(decoder_layers(policy.model)) == 4
    found = samples((65,))
    before = packed_logprobs(policy, found)
    policy.model.config.image_token_id = int(found[0].arrays.token_ids[9])
    assert torch.equal(packed_logprobs(policy, found)[0], before[0])


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("case", ["gemma4", "llama4"])
def test_layers_that_are_computed_again_find_keys_that_they_share_and_chunks(
    case: str, mode: Recompute
) -> None:
    found, again, plain = samples((65, 9)), our_policy(case), our_policy(case)
    recompute_layers(decoder_layers(again.model), mode)
    own = gradients(plain.model, packed_logprobs(plain, found))
    ours = gradients(again.model, packed_logprobs(again, found))
    assert [name for name in own if not torch.equal(ours[name], own[name])] == []


def test_a_token_sees_nothing_of_the_chunk_before_its_own(world: World) -> None:
    """Where all layers attend in chunks; and ranks do not pass chunks around in a ring."""
    model = our_policy("llama4").model
    for layer in model.model.layers:
        layer.self_attn.chunk_tokens = 32
    embeddings: list[torch.Tensor] = []
    model.model.embed_tokens.register_forward_hook(lambda *it: embeddings.append(it[2]))
    (sample,) = samples((65,))
    tensors = TrainTensors.build(MicroBatch.join([sample]), CPU)
    logprob = PolicyModel(model)(tensors).logprobs[40]  # read off the state of token 39
    (seen,) = torch.autograd.grad(logprob, embeddings)
    assert ModelFlops.of(model).chunks == (64, 64, 64, None)
    assert seen[0].abs().sum(-1).nonzero().flatten().tolist() == [*range(32, 40)]
    with pytest.raises(ConfigError, match=r"attends in chunks.*write 'heads'"):
        PolicyModel(model, ContextGroup(0, 2, None, is_ring=True))  # type: ignore[arg-type]


def test_ranks_do_not_share_heads_that_some_layers_have_too_few_of(tmp_path: Path) -> None:
    family, options = FAMILIES["gemma4 with keys as values"]
    key_heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    build_family(tmp_path, family, options | key_heads | {"num_global_key_value_heads": 3})
    model = load_model(family_config(tmp_path), CPU)
    with pytest.raises(ConfigError, match="the model's 3 key heads"):
        PolicyModel(model, ContextGroup(0, 2, None))  # type: ignore[arg-type]


def learned(state: TrainingState, step: int) -> None:
    """One step on samples that depend on it."""
    batch = [told(build_sample(n, seed=100 * step + n, vocabulary=90)) for n in (65, 9)]
    (micro_batches,) = pack(batch, max_tokens=128, num_ranks=1)
    GradientStep(state.policy, Dppo(learning.DppoConfig()), state.world).run(micro_batches)
    state.optimizer.step(step)


def state_of(case: str, world: World, *, is_resumed: bool = False) -> TrainingState:
    base = family_config(family_folder(case))
    policy = build_policy(base, TrainerConfig(), world, torch.float32, is_resumed=is_resumed)
    rule = PolicyOptimizer(
        policy, AdamWConfig(lr=1e-3), max_steps=10, max_skipped_steps=1, world=world
    )
    return TrainingState(policy, rule, world, Origin(model={"name": case}, compute_dtype="float32"))


@pytest.mark.parametrize("case", ["nemotron_h", "qwen3_5_moe"])
def test_ten_versions_in_a_row_are_the_weights_and_training_goes_on_bit_by_bit(
    tmp_path: Path, world: World, case: str
) -> None:
    """Families with both states and experts."""
    run_dir = new_run(tmp_path)
    files = {"config.json": (family_folder(case) / "config.json").read_bytes()}
    versions = FilesystemWeights(run_dir, term=1, extra_files=files)
    checkpoints, state = CheckpointStore(run_dir, 1), state_of(case, world)
    for step in range(10):
        if step == 6:
            state.snapshot(step, {}).write(checkpoints.staging(step), 0, DurableFiles())
            checkpoints.commit(step, ["trainer"])
        learned(state, step)
        weights = {name: whole_tensor(p) for name, p in state.policy.model.named_parameters()}
        tensors = serving_tensors(state.policy.model, torch.float32)
        published = versions.publish_version(step + 1, tensors).directory
        loaded = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
        read = dict(loaded.named_parameters())
        assert read.keys() == weights.keys()
        assert [name for name in read if not torch.equal(read[name], weights[name])] == []
    again = state_of(case, world, is_resumed=True)
    resume(again, CheckpointStore(run_dir, 2), 6)
    for step in range(6, 10):
        learned(again, step)
    found = {name: whole_tensor(p) for name, p in again.policy.model.named_parameters()}
    assert [name for name in weights if not torch.equal(found[name], weights[name])] == []
