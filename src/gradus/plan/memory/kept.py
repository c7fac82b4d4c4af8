"""What a decoder layer keeps of each token until its backward, by a table that was measured.

`kept.json` was made by running the trainer's own layers on a CPU in many sizes: for each family and
kind of layer it tells how many bytes are kept for one unit of each width of the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

_ATTENTION = {"q_proj", "qkv_proj", "q_b_proj", "query_key_value", "c_attn", "kv_b_proj"}
_SHORT_TOKENS = 256
"""Up to this length a CPU attends by products in 16 bits."""
_STACKS = frozenset({"experts", "input_linear"})
WAYS = tuple(
    f"{way}{trained}" for trained in ("", ", adapters") for way in ("none", "selective", "back")
)
"""Rows of the table: what is kept of a layer in which none or some is computed again, and the most
that its way back adds to all that is kept of it; for all weights and for adapters. The largest of
sums between bars counts."""
_SISTERS = {
    **dict.fromkeys(("granite", "mistral", "qwen2", "smollm3", "qwen2_5_vl_text"), "llama"),
    **dict.fromkeys(("deepseek_v2", "glm4_moe_lite"), "deepseek_v3"),
    **{"olmo3": "olmo2", "cohere": "cohere2", "lfm2": "lfm2_moe"},
    **{"qwen3_5_moe_text": "qwen3_next", "gemma4": "gemma4_text"},
    **{"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"},
}
"""Families whose layers are those of another."""
_USUAL = ("qwen3", "qwen3_moe", "qwen3_next", "nemotron_h", "kimi_linear")
"""Whose layers stand for those of families that were not measured."""


def layer_kind(names: Iterable[str]) -> str:
    """Of what a layer consists, by the names of its tensors.

    >>> layer_kind(["self_attn.q_proj.weight", "mlp.experts.0.up_proj.weight"])
    'attention experts'
    """
    parts = {part for name in names for part in name.split(".")}
    found = {
        "attention": parts & _ATTENTION,
        "state": parts & {"A_log", "conv"},
        "experts": "experts" in parts or ("block_sparse_moe" in parts and parts & _STACKS),
        "inputs": "per_layer_input_gate" in parts,
    }
    return " ".join(kind for kind, has in found.items() if has) or "dense"


def widths(own: Mapping[str, Any]) -> dict[str, float]:
    """Numbers that a token has in a layer, by short names, from the config.json of a text model."""
    if isinstance(part := own.get("linear_attn_config"), Mapping):  # Kimi Linear's own form.
        own = {f"linear_{name}": value for name, value in part.items()} | dict(own)

    def first(*names: str, default: int = 0) -> int:
        found = next((own[name] for name in names if own.get(name) is not None), default)
        if type(found) is not int:
            raise TypeError(f"{names[0]} is no whole number")
        return found

    hidden = first("hidden_size", "n_embd")
    dense = first("intermediate_size_mlp", "n_inner", "intermediate_size", default=4 * hidden)
    if own.get("use_double_wide_mlp"):
        layers = first("num_hidden_layers")
        dense = dense * (layers + first("num_kv_shared_layers")) // layers
    mamba = own.get("model_type") == "mamba2"
    heads = 0 if mamba else first("num_attention_heads", "n_head")
    if not hidden or not (heads or mamba):
        raise ValueError("a model has hidden numbers, and heads")
    size = first("head_dim", default=hidden // heads if heads else 0)
    chosen = first("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
    unit = first("moe_intermediate_size", "intermediate_size", default=dense)
    always = own.get("model_type") == "llama4_text"
    shared = first(
        *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        "shared_intermediate_size",
        default=first("n_shared_experts", "num_shared_experts", default=int(always)) * unit,
    )
    found = {
        "hidden": hidden,
        "units": dense,
        "heads": heads,
        "queries": heads * size,
        "keys": first("num_key_value_heads", default=heads) * size,
        "layer inputs": first("hidden_size_per_layer_input"),
        "experts": first("num_experts", "num_local_experts", "n_routed_experts"),
        "chosen hidden": chosen * hidden,
        "chosen units": chosen * unit,
        "shared units": shared,
    }
    if first("kv_lora_rank"):
        plain, turned = first("qk_nope_head_dim"), first("qk_rope_head_dim")
        found |= {
            "queries": heads * (plain + turned),
            "keys": heads * plain,
            "values": heads * first("v_head_dim"),
            "low queries": first("q_lora_rank"),
            "low keys": first("kv_lora_rank"),
            "turned": turned,
        }
    return found | _state_widths(own, first, mamba=mamba)


def patch_widths(vision: Mapping[str, Any]) -> dict[str, float]:
    """Of a patch, from the config of a tower: its colours, and what is kept where the tower trains,
    as Qwen3-VL's was measured to."""
    if "patch_size" not in vision:
        return {}
    depth = vision.get("depth") or vision["num_hidden_layers"]
    merged = 3.5 * (1 + len(vision.get("deepstack_visual_indexes") or ()))
    pixels = 3 * vision.get("temporal_patch_size", 1) * vision["patch_size"] ** 2
    layers = depth * (11 * vision["hidden_size"] + 2 * vision["intermediate_size"])
    return {"pixels": pixels, "kept": pixels + layers + merged * vision["hidden_size"]}


def _state_widths(
    own: Mapping[str, Any], first: Callable[..., int], *, mamba: bool
) -> dict[str, float]:
    """Of layers that carry state; a delta net reads chunks of 64 tokens."""
    if "linear_num_value_heads" in own or "linear_num_heads" in own:
        heads = first("linear_num_value_heads", "linear_num_heads")
        size = first("linear_value_head_dim", "linear_head_dim")
        key = first("linear_key_head_dim", "linear_head_dim")
        return {
            "state heads": heads,
            "state values": heads * size,
            "state keys": heads * key,
            "own keys": first("linear_num_key_heads", "linear_num_heads") * key,
            "states": heads * size * key / 64,
        }
    names = ("mamba_n_heads", "mamba_num_heads", *(["num_heads"] * mamba))
    if not (heads := first(*names)):
        return {}
    size = first("mamba_d_head", "mamba_head_dim", "head_dim")
    state = first("mamba_d_state", "ssm_state_size", "state_size")
    chunk = first("mamba_chunk_size", "chunk_size")
    return {
        "state heads": heads,
        "state values": heads * size,
        "state keys": first("mamba_n_groups", "n_groups") * state,
        "own keys": heads * state,
        "chunks": heads * chunk,
        "states": heads * size * state / chunk,
    }


@dataclass(frozen=True)
class KeptScores:
    """Where scores of attention, [heads, length] of each token, are kept: not by fused kernels."""

    has_caps: bool
    """Which keep scores once more."""
    has_sinks: bool
    window: int | None
    windowed: Sequence[bool] | None
    """By layer; None means all."""

    @classmethod
    def of(cls, own: Mapping[str, Any]) -> KeptScores:
        kinds, window = own.get("layer_types"), own.get("sliding_window")
        is_used = type(window) is int and own.get("use_sliding_window", True)
        return cls(
            has_caps=bool(own.get("attn_logit_softcapping")),
            has_sinks=own.get("model_type") == "gpt_oss",
            window=window if is_used else None,
            windowed=[it == "sliding_attention" for it in kinds] if type(kinds) is list else None,
        )

    def are_kept(self, layer: int, length: int, *, itemsize: int, on_gpu: bool) -> bool:
        """Whether a layer that attends keeps scores of samples of this length; on GPUs with caps
        alone, on CPUs also with sinks, with a window and, in 16 bits, of short samples."""
        if on_gpu or self.has_caps or self.has_sinks:
            return self.has_caps or not on_gpu
        is_short = itemsize == 2 and length <= _SHORT_TOKENS
        is_cut = self.window is not None and self.window < length
        has_window = self.windowed is None or any(self.windowed[layer : layer + 1])
        return is_short or (is_cut and has_window)


@cache
def _table() -> dict[str, dict[str, list[str]]]:
    text = (files("gradus.plan.memory") / "kept.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, list[str]]] = json.loads(text)
    return table


def stand_in(family: str, kind: str) -> str:
    """The family whose layers count for this one's; itself where it was measured."""
    found = (_SISTERS.get(family, family), *_USUAL)
    return next((it for it in found if kind in _table().get(it, {})), "qwen3")


def measured_families() -> frozenset[str]:
    return frozenset(_table()) | frozenset(_SISTERS)


def kept_bytes(
    family: str, kind: str, way: str, sizes: Mapping[str, float], *, is_wide: bool
) -> float:
    """Of one token in one layer. `is_wide` says that it computes in float32."""
    if kind not in _table().get(family, {}):
        kind = kind.removesuffix(" inputs")
    kinds = _table()[stand_in(family, kind)]
    row = kinds[kind if kind in kinds else "attention"][WAYS.index(way)]

    def summed(terms: str) -> float:
        total = 0.0
        for term in terms.split(", "):
            name, _, both = term.rpartition(" ")
            wide, _, narrow = both.partition("/")
            total += float(wide if is_wide else narrow) * sizes.get(name, 0)
        return total

    return max(0, *map(summed, row.split(" | ")))
