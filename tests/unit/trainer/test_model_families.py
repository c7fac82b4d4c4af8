"""Each family of models trains exactly what it computes by itself, or is refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gradus.config import ModelConfig
from gradus.errors import ConfigError
from gradus.testing.builders import build_sample
from gradus.trainer.distributed import World
from gradus.trainer.model.cpu.fused import fuse_layers
from gradus.trainer.model.load import load_model
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import shard_model
from gradus.trainer.publish import serving_tensors
from gradus.trainer.tensors import TrainTensors
from gradus.wire.micro_batch import MicroBatch

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
WINDOW = 5
LENGTHS = (13, 3, 21)
"""Shorter and longer than the window."""
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
PHI_LONG = {"rope_parameters": LONG, "original_max_position_embeddings": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3 positions": ("llama", {"rope_parameters": LLAMA3}),
    "yarn positions": ("llama", {"rope_parameters": YARN}),
    "attention dropout": ("llama", {"attention_dropout": 0.5}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "mistral with a window": ("mistral", {"sliding_window": WINDOW}),
    "qwen2 with windows": ("qwen2", {**MIXED, "use_sliding_window": True}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma3 with windows": ("gemma3_text", {**MIXED, "query_pre_attn_scalar": 16}),
    "olmo2": ("olmo2", {}),
    "olmo3 with windows": ("olmo3", MIXED),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "granite": ("granite", {"attention_multiplier": 0.1, "residual_multiplier": 0.3}),
    "gpt_neox": ("gpt_neox", {"attention_dropout": 0.3, "hidden_dropout": 0.3}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "scale_attn_weights": False}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "mixtral": ("mixtral", {**EXPERTS, "sliding_window": WINDOW}),
    "qwen2 experts without windows": ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
}

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
    "an encoder": ("bert", {"max_position_embeddings": 2048}, "leaves out"),
    "values of another size": ("deepseek_v3", MLA, "cannot read packed samples"),
    "positions that change with length": ("phi3", PHI_LONG, "max_length_tokens = 2048"),
    "too few learned positions": ("gpt2", {}, "learned 64 positions; lower model.max_length_to"),
}


def build(directory: Path, family: str, options: dict[str, Any]) -> PreTrainedModel:
    """A model of the family with large random weights, saved to the directory."""
    torch.manual_seed(0)
    defaults = AutoConfig.for_model(family)
    shape = {name: value for name, value in SHAPE.items() if hasattr(defaults, name)}
    config = AutoConfig.for_model(family, **(shape | options))
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.ndim > 1 else 0.05
            parameter.add_(spread * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model.train(False)


def config_of(directory: Path) -> ModelConfig:
    """For samples as long as every model of this shape can read."""
    return ModelConfig(name=str(directory), max_length_tokens=SHAPE["max_position_embeddings"])


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


@pytest.mark.parametrize("case", EXACT)
def test_packed_logprobs_and_gradients_are_those_of_each_sample_alone(
    tmp_path: Path, case: str
) -> None:
    plain = build(tmp_path, *EXACT[case])
    policy = PolicyModel(load_model(config_of(tmp_path), CPU))
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


@pytest.mark.parametrize("case", EXACT)
def test_bfloat16_is_near_float32(tmp_path: Path, world: World, case: str) -> None:
    """Some families compute rotations or norms in float32 inside."""
    build(tmp_path, *EXACT[case])
    tensors = TrainTensors.build(MicroBatch.join([build_sample(9), build_sample(14, seed=1)]), CPU)
    scores = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(config_of(tmp_path), CPU)
        scores.append(shard_model(PolicyModel(model), world.mesh, dtype)(tensors).logprobs)
    scores[1].sum().backward()
    torch.testing.assert_close(scores[0].mean(), scores[1].mean(), rtol=0, atol=0.05)


def test_a_buffer_is_published_as_the_trainer_computes_with_it(tmp_path: Path) -> None:
    """GLM-4.5 chooses experts with a float32 bias, which bfloat16 would round."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    groups = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    build(tmp_path, "glm4_moe", experts | groups)
    model = load_model(ModelConfig(name=str(tmp_path)), CPU)
    published = dict(serving_tensors(model, torch.bfloat16))
    dtypes = {name.rpartition(".")[2]: tensor.dtype for name, tensor in published.items()}
    assert dtypes == {"weight": torch.bfloat16, "e_score_correction_bias": torch.float32}


def test_positions_that_change_beyond_a_length_are_exact_up_to_it(tmp_path: Path) -> None:
    build(tmp_path, "phi3", PHI_LONG)
    load_model(ModelConfig(name=str(tmp_path), max_length_tokens=16), CPU)


def test_a_window_that_a_model_keeps_to_its_mask_is_refused_for_longer_samples(
    tmp_path: Path,
) -> None:
    build(tmp_path, "phimoe", {**EXPERTS, "sliding_window": 12})
    policy = PolicyModel(load_model(ModelConfig(name=str(tmp_path)), CPU))
    policy(TrainTensors.build(MicroBatch.join([build_sample(12)]), CPU))
    with pytest.raises(ConfigError, match="window of 12 tokens"):
        policy(TrainTensors.build(MicroBatch.join([build_sample(13)]), CPU))


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_packing_would_change_is_refused(tmp_path: Path, case: str) -> None:
    family, options, reason = REFUSED[case]
    build(tmp_path, family, options)
    with pytest.raises(ConfigError, match=reason):
        PolicyModel(load_model(ModelConfig(name=str(tmp_path)), CPU))
