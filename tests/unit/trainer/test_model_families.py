"""Each family of models trains exactly what it computes by itself, or is refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import build_sample
from model_families import (
    EXPERTS,
    FAMILIES,
    MIXED,
    PHI_LONG,
    build_family,
    family_config,
)
from torch import Tensor
from transformers import PreTrainedModel

from gradus.config import ModelConfig, TrainerConfig
from gradus.errors import ConfigError
from gradus.trainer.distributed import World
from gradus.trainer.model.build import build_policy
from gradus.trainer.model.cpu.fused import fuse_layers
from gradus.trainer.model.load import load_model
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import shard_model
from gradus.trainer.publish import serving_tensors
from gradus.trainer.tensors import TrainTensors
from gradus.wire.micro_batch import MicroBatch

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
LENGTHS = (13, 3, 21)
"""Shorter and longer than the window."""
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
RECURRENT = {"block_types": ["recurrent", "attention"], "lru_width": 32, "logits_soft_cap": 1.0}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma2": ("gemma2", MIXED, "final_logit_softcapping"),
    "capped attention": ("gemma2", {"final_logit_softcapping": None}, "softcap"),
    "cohere": ("cohere", {}, "logit_scale"),
    "granite with scaled logits": ("granite", {"logits_scaling": 8.0}, "logits_scaling"),
    "a recurrence": ("recurrent_gemma", RECURRENT, "leaves out"),
    "a head of several layers": ("modernbert-decoder", {}, "leaves out"),
    "an encoder": ("bert", {"max_position_embeddings": 2048}, "cannot read packed samples"),
    "values of another size": ("deepseek_v3", MLA, "cannot read packed samples"),
    "positions that change with length": ("phi3", PHI_LONG, "max_length_tokens = 2048"),
    "too few learned positions": ("gpt2", {}, "learned 64 positions; lower model.max_length_to"),
}


def own_logprobs(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    logits = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, token_ids[1:, None])[:, 0]


def gradients(model: PreTrainedModel, logprobs: list[Tensor]) -> dict[str, Tensor]:
    """Of a sum in which every token has another weight, relative to the norm of all."""
    together = torch.cat(logprobs)
    (together * torch.linspace(-1, 1, len(together))).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([gradient.norm() for gradient in found.values()]).norm()
    return {name: gradient / norm for name, gradient in found.items()}


@pytest.mark.parametrize("case", FAMILIES)
def test_packed_logprobs_and_gradients_are_those_of_each_sample_alone(
    tmp_path: Path, case: str
) -> None:
    plain = build_family(tmp_path, *FAMILIES[case])
    policy = PolicyModel(load_model(family_config(tmp_path), CPU))
    fuse_layers(policy.model)
    samples = [build_sample(n, prompt_length=1, seed=n, vocabulary=96) for n in LENGTHS]
    scores = policy(TrainTensors.build(MicroBatch.join(samples), CPU))
    found = [logprobs[1:] for logprobs in torch.split(scores.logprobs, list(LENGTHS))]
    alone = [
        own_logprobs(plain, torch.tensor(s.arrays.token_ids, dtype=torch.int64)) for s in samples
    ]
    for ours, theirs in zip(found, alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    ours_by_name, theirs_by_name = gradients(policy.model, found), gradients(plain, alone)
    assert ours_by_name.keys() == theirs_by_name.keys()
    for name, gradient in theirs_by_name.items():
        torch.testing.assert_close(ours_by_name[name], gradient, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", FAMILIES)
def test_bfloat16_is_near_float32(tmp_path: Path, world: World, case: str) -> None:
    """Some families compute rotations or norms in float32 inside."""
    build_family(tmp_path, *FAMILIES[case])
    tensors = TrainTensors.build(MicroBatch.join([build_sample(9), build_sample(14, seed=1)]), CPU)
    scores = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(family_config(tmp_path), CPU)
        scores.append(shard_model(PolicyModel(model), world.mesh, dtype)(tensors).logprobs)
    scores[1].sum().backward()
    torch.testing.assert_close(scores[0].mean(), scores[1].mean(), rtol=0, atol=0.05)


def test_a_buffer_is_published_as_the_trainer_computes_with_it(tmp_path: Path) -> None:
    """GLM-4.5 chooses experts with a float32 bias, which bfloat16 would round."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    groups = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    build_family(tmp_path, "glm4_moe", experts | groups)
    model = load_model(ModelConfig(name=str(tmp_path)), CPU)
    published = dict(serving_tensors(model, torch.bfloat16))
    dtypes = {name.rpartition(".")[2]: tensor.dtype for name, tensor in published.items()}
    assert dtypes == {"weight": torch.bfloat16, "e_score_correction_bias": torch.float32}


def test_positions_that_change_beyond_a_length_are_exact_up_to_it(tmp_path: Path) -> None:
    build_family(tmp_path, "phi3", PHI_LONG)
    load_model(ModelConfig(name=str(tmp_path), max_length_tokens=16), CPU)


def test_a_window_that_a_model_keeps_to_its_mask_is_refused_for_longer_samples(
    tmp_path: Path,
) -> None:
    build_family(tmp_path, "phimoe", {**EXPERTS, "sliding_window": 12})
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
