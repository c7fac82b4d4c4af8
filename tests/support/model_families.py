"""A small model of each family that is trained, with random weights, and what must hold for it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from builders import build_sample
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gradus.config import LoraConfig, ModelConfig
from gradus.trainer.model.cpu.fused import fuse_layers
from gradus.trainer.model.experts.llama4 import is_llama4
from gradus.trainer.model.load import load_model
from gradus.trainer.model.lora import adapted_layers, add_adapters
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.publish import serving_tensors
from gradus.trainer.tensors import TrainTensors
from gradus.trainer.throughput import ModelFlops
from gradus.wire.micro_batch import MicroBatch
from gradus.wire.sample import Sample

CPU = torch.device("cpu")
VOCABULARY = 96
WINDOW = 5
METERED = (128, 448)
"""Whole chunks of linear attention and Mamba."""
LENGTHS = (65, 1, 300, 63, 2, 64)
"""Around the chunks of linear attention, and longer than a window."""
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
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
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
PHI_LONG = {"rope_parameters": LONG, "original_max_position_embeddings": 16}
CHOSEN = {"num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 8, **CHOSEN}
EXPERTS = {"num_experts": 8, **CHOSEN, "moe_intermediate_size": 64}
ROUTED = {
    **CHOSEN,
    "n_routed_experts": 8,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "head_dim": 16,
    "num_key_value_heads": 4,
}
DELTA = {"linear_num_value_heads": 2, "linear_num_key_heads": 1}
DELTA_HEADS = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
SHARED = {"shared_expert_intermediate_size": 64}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_chunk_size": 64,
}
KIMI = {
    "linear_head_dim": 64,
    "linear_num_heads": 2,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "mlp_layer_types": ["dense", *["sparse"] * 3],
}
NEMOTRON = {
    "moe_shared_expert_intermediate_size": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "ssm_state_size": 32,
    "chunk_size": 64,
}
GPT2 = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 512, "scale_attn_weights": False}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0}
GEMMA4 = {
    **MIXED,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 1.0,
}
INPUTS_OF_LAYERS = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 32}
SHARED_KEYS = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
BESIDE_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
}
WITH_TOWER = {
    "text_config": {
        **{**SHAPE, **GEMMA4, **INPUTS_OF_LAYERS, **KEYS_AS_VALUES, **BESIDE_EXPERTS},
        "use_bidirectional_attention": "vision",
    },
    "vision_config": {
        **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 64},
    },
    "audio_config": {
        **{"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"subsampling_conv_channels": [8, 4], "output_proj_dims": 64},
    },
}
LLAMA4 = {
    **{"num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size_mlp": 256},
    **{"attention_chunk_size": 64, "floor_scale": 16, "interleave_moe_layer_step": 2},
}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv", "conv"], "conv_dim": 128}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
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
    "gemma2 with caps": (
        "gemma2",
        {**MIXED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0},
    ),
    "gemma3 with windows": ("gemma3_text", {**MIXED, "query_pre_attn_scalar": 16}),
    "gemma4": ("gemma4_text", {**GEMMA4, **INPUTS_OF_LAYERS, **SHARED_KEYS}),
    "gemma4 with keys as values": ("gemma4_text", {**GEMMA4, **KEYS_AS_VALUES}),
    "gemma4 with experts": ("gemma4_text", {**GEMMA4, **KEYS_AS_VALUES, **BESIDE_EXPERTS}),
    "gemma4 with its tower": ("gemma4", WITH_TOWER),
    "olmo2": ("olmo2", {}),
    "olmo3 with windows": ("olmo3", MIXED),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "cohere2 with windows": ("cohere2", {"logit_scale": 0.25, **MIXED}),
    "granite": (
        "granite",
        {"attention_multiplier": 0.1, "residual_multiplier": 0.3, "logits_scaling": 2.0},
    ),
    "gpt_neox": ("gpt_neox", {"attention_dropout": 0.3, "hidden_dropout": 0.3}),
    "gpt2": ("gpt2", GPT2),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
    "glm4": ("glm4", {}),
    "mixtral": ("mixtral", {**LOCAL_EXPERTS, "sliding_window": WINDOW}),
    "qwen2 experts without windows": ("qwen2_moe", {**EXPERTS, **SHARED}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "glm4_moe": ("glm4_moe", ROUTED),
    "minimax_m2": ("minimax_m2", {**LOCAL_EXPERTS, "rotary_dim": 16}),
    "granitemoe": ("granitemoe", {**LOCAL_EXPERTS, "logits_scaling": 2.0}),
    "gpt_oss": ("gpt_oss", {**MIXED, **LOCAL_EXPERTS, "rope_parameters": YARN}),
    "deepseek_v2": ("deepseek_v2", {**LATENT, **ROUTED}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, **ROUTED, "topk_method": "noaux_tc"}),
    "glm4_moe_lite": ("glm4_moe_lite", {**LATENT, **ROUTED, "topk_method": "noaux_tc"}),
    "minicpm3": ("minicpm3", {**LATENT, "scale_emb": 1, "dim_model_base": 32}),
    "qwen3_next": (
        "qwen3_next",
        {**EXPERTS, **SHARED, **DELTA, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    ),
    "qwen3_5": ("qwen3_5_text", {**DELTA, **DELTA_HEADS}),
    "qwen3_5 with two key heads": (
        "qwen3_5_text",
        {
            **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
            **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
        },
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**EXPERTS, **SHARED, **DELTA, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        {
            **DELTA,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 64,
        },
    ),
    "kimi_linear": ("kimi_linear", {**LATENT, **EXPERTS, **KIMI}),
    "mamba2": (
        "mamba2",
        {"num_heads": 8, "head_dim": 32, "n_groups": 1, "state_size": 32, "chunk_size": 64},
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **NEMOTRON,
            **CHOSEN,
            "layers_block_type": ["mamba", "attention", "moe", "mlp"],
            **{name: ROUTED[name] for name in ("n_routed_experts", "moe_intermediate_size")},
        },
    ),
    "nemotron_h without experts": (
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["mamba", "attention", "mamba", "mlp"]},
    ),
    "falcon_h1": (
        "falcon_h1",
        {**MAMBA, "mamba_d_ssm": 256, "lm_head_multiplier": 0.5, "ssm_out_multiplier": 0.7},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **MAMBA,
            **LOCAL_EXPERTS,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "shared_intermediate_size": 64,
            "logits_scaling": 2.0,
        },
    ),
    "bamba": ("bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "lfm2": ("lfm2", {**CONVOLUTIONS, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2_moe", {**CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1}),
    "llama4": ("llama4_text", LLAMA4),
    "llama4 of experts alone": (
        "llama4_text",
        {
            **{**LLAMA4, "interleave_moe_layer_step": 1, "num_experts_per_tok": 2},
            **{"use_qk_norm": False, "no_rope_layers": [0, 1, 0, 1], "attention_chunk_size": 32},
        },
    ),
}


def build_family(
    directory: Path, family: str, options: dict[str, Any], *, seed: int = 0, noise: float = 0.04
) -> PreTrainedModel:
    """A model of the family with random weights, saved to the directory; `noise` is added to
    those that its code begins with."""
    torch.manual_seed(seed)
    defaults = AutoConfig.for_model(family)
    # Asked for its names alone, of which layers may have values of their own.
    defaults.allow_global_per_layer_attribute_access = True
    shape = {name: value for name, value in SHAPE.items() if hasattr(defaults, name)}
    config = AutoConfig.for_model(family, **(shape | options))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
        if family.startswith("gemma4"):
            as_if_learned(model, noise)
    model.save_pretrained(directory)
    model.train(False)
    return model


def as_if_learned(model: PreTrainedModel, noise: float) -> None:
    """What Gemma 4 keeps in files and begins as ones: factors of layers, which are stored in
    bfloat16, and the scale of scores, which its code does not divide by the size of a head. And
    what its tower keeps beside its weights: bounds, and a shift and a scale of embeddings."""
    for name, weight in model.state_dict().items():
        if name.endswith(("put_min", "put_max")):
            weight.copy_(torch.full_like(weight, -1.5 if name.endswith("min") else 2.0))
        if name.endswith(("std_bias", "std_scale")):
            weight.copy_(0.5 + noise * torch.randn_like(weight))
        if name.endswith("layer_scalar"):
            weight.add_(10 * noise * torch.randn_like(weight)).copy_(weight.bfloat16())
        if name.endswith("q_norm.weight"):
            weight.mul_(len(weight) ** -0.5)


def family_config(directory: Path) -> ModelConfig:
    """For samples as long as every model of this shape can read."""
    return ModelConfig(name=str(directory), max_length_tokens=SHAPE["max_position_embeddings"])


@cache
def family_folder(case: str) -> Path:
    """Files of a model of the family, for all tests of this process."""
    folder = Path(tempfile.mkdtemp(prefix="gradus_family_"))
    build_family(folder, *FAMILIES[case])
    return folder


def has_experts(case: str) -> bool:
    """Whether layers of the case choose experts."""
    options = FAMILIES[case][1] if case in FAMILIES else {}
    options = options.get("text_config", options)
    return any(name in options for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def plain_model(case: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """As transformers computes it, eagerly; buffers keep their dtype."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        family_folder(case), dtype=torch.float32, attn_implementation="eager"
    )
    return rounded(model, dtype).train(False)


def our_policy(case: str | Path, dtype: torch.dtype = torch.float32) -> PolicyModel:
    """The trainer's, of a case or of a folder."""
    folder = family_folder(case) if isinstance(case, str) else case
    policy = PolicyModel(rounded(load_model(family_config(folder), CPU), dtype))
    fuse_layers(policy.model)
    return policy


def rounded(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Parameters in a dtype, as FSDP casts them for a forward."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def samples(lengths: Iterable[int] = LENGTHS) -> list[Sample]:
    return [build_sample(n, prompt_length=1, seed=n, vocabulary=VOCABULARY) for n in lengths]


def packed_logprobs(
    policy: PolicyModel, found: list[Sample], device: torch.device = CPU
) -> list[Tensor]:
    """Of each sample of one row, without its first token."""
    scores = policy(TrainTensors.build(MicroBatch.join(found), device))
    return [it[1:] for it in torch.split(scores.logprobs, [len(sample) for sample in found])]


def own_logprobs(model: PreTrainedModel, found: list[Sample]) -> list[Tensor]:
    """The same by transformers alone, sample by sample."""
    alone = []
    for sample in found:
        token_ids = torch.tensor(sample.arrays.token_ids, dtype=torch.int64)
        logits = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1]
        wide = logits.double() if logits.dtype == torch.float64 else logits.float()
        alone.append(torch.log_softmax(wide, -1).gather(1, token_ids[1:, None])[:, 0])
    return alone


def gradients(model: PreTrainedModel, logprobs: list[Tensor]) -> dict[str, Tensor]:
    """Of a sum in which every token has another weight, relative to the norm of all."""
    together = torch.cat(logprobs)
    weights = torch.linspace(-1, 1, len(together), dtype=together.dtype, device=together.device)
    (together * weights).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([gradient.norm() for gradient in found.values()]).norm()
    return {name: gradient / norm for name, gradient in found.items()}


def distance(ones: list[Tensor], others: list[Tensor]) -> float:
    """Nats between logprobs of the token that differs most; infinite for NaN."""
    found = (torch.cat(ones).double() - torch.cat(others).double()).abs().max().item()
    return found if math.isfinite(found) else math.inf


def mean_distance(ones: list[Tensor], others: list[Tensor]) -> float:
    return (torch.cat(ones).double() - torch.cat(others).double()).abs().mean().item()


def unpublished(case: str | Path) -> list[str]:
    """Tensors that are published under another name, or not bit by bit as they were read."""
    folder = family_folder(case) if isinstance(case, str) else case
    stored = load_file(folder / "model.safetensors")
    published = dict(serving_tensors(our_policy(case).model, torch.float32))
    return sorted(stored.keys() ^ published.keys()) + [
        name
        for name in stored.keys() & published.keys()
        if stored[name].dtype != published[name].dtype
        or not torch.equal(stored[name], published[name])
    ]


def adapted(case: str, targets: list[str] | None = None) -> tuple[float, list[str]]:
    """How far packed logprobs with adapters are from those of the merged model alone, and the
    names of the layers that have one."""
    policy = our_policy(case)
    add_adapters(policy.model, LoraConfig(rank=2, target_modules=targets), torch.float32)
    for layer in adapted_layers(policy.model).values():
        torch.nn.init.normal_(layer.lora_B, std=0.02)
    model = plain_model(case)
    model.set_experts_implementation("eager")
    weights = dict(model.named_parameters())
    for name, layer in adapted_layers(policy.model).items():
        weight = weights[name if name in weights else f"{name}.weight"]
        weight.data = layer.merged(weight.data)
    leaves = {name.rpartition(".")[2] for name in adapted_layers(policy.model)}
    found = samples((9, 70))
    with torch.no_grad():
        ours, own = packed_logprobs(policy, found), own_logprobs(model, found)
    return distance(ours, own), sorted(leaves)


def metered(case: str) -> float:
    """Operations by the meter over those that torch counts of the model's own forward and backward.

    Between two lengths, so that the first and last chunk of a scan do not count. The reference form
    attends to all pairs, and has the scan of Mamba without matrix products. Of a convolution's way
    back torch counts products between all channels, whatever its groups: here twice the forward.
    """
    model = plain_model(case)
    model.set_experts_implementation("eager")
    flops, counted = ModelFlops.of(model), []
    for length in METERED:
        with FlopCounterMode(display=False) as counter:
            own_logprobs(model, samples([length]))[0].sum().backward()
        by_operator = {str(name): n for name, n in counter.get_flop_counts()["Global"].items()}
        by_operator["aten.convolution_backward"] = 2 * by_operator.get("aten.convolution", 0)
        counted.append(sum(by_operator.values()))
    tokens = METERED[1] - METERED[0]
    pairs = METERED[1] ** 2 - METERED[0] ** 2
    per_token = flops.per_token - flops.uncounted + flops.per_target
    if is_llama4(model):
        # Its experts all compute all.
        unused = 1 - model.config.num_experts_per_tok / model.config.num_local_experts
        per_token += 6 * unused * sum(p.numel() for p in model.parameters() if p.ndim == 3)
    ours = per_token * tokens + sum(flops.per_pair) * pairs
    return ours / (counted[1] - counted[0])
