#!/usr/bin/env python3
"""Write src/gradus/plan/memory/kept.json: what each kind of layer keeps, in sizes by chance.

    scripts/kept_activations.py CASE ...     of tests/support/model_families.py; each 10 s of CPU

The trainer's layers run on a CPU; torch's record of its allocator says what is still there behind
each of them, and what each holds at most on the way back. A fit over the widths of many sizes then
gives the bytes of each width.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import numpy as np
import torch
from builders import build_sample
from held_memory import held_by_layer
from model_families import (
    CPU,
    FAMILIES,
    SHAPE,
    VOCABULARY,
    build_family,
    family_config,
    has_experts,
    rounded,
)

from gradus.config import LoraConfig
from gradus.config.families import CARRIES_STATE
from gradus.plan.memory.kept import WAYS, KeptScores, layer_kind, widths
from gradus.trainer.model.cpu.fused import fuse_layers
from gradus.trainer.model.layers import decoder_layers, recompute_layers
from gradus.trainer.model.load import load_model
from gradus.trainer.model.lora import add_adapters
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.tensors import TrainTensors
from gradus.wire.micro_batch import MicroBatch

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "src" / "gradus" / "plan" / "memory" / "kept.json"
LENGTHS = (320, 320)
"""Samples in whole chunks, alike, and long enough for the fused kernel of attention in 16 bits."""
WINDOWS = ("layer_types", "sliding_window", "use_sliding_window")
SHARES: dict[str, tuple[float, ...]] = {
    "intermediate_size": (1.5, 2, 3, 4),
    "n_inner": (2, 3, 4),
    "moe_intermediate_size": (0.25, 0.5, 0.75),
    **dict.fromkeys(
        (
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
        ),
        (0.5, 1, 1.5),
    ),
}
"""Of the hidden size, as models have them."""
EXPERT_SHARES = (0.5, 1, 2, 3)
"""The same of what is called the intermediate size, and is that of experts."""
CHOICES: dict[str, tuple[int, ...]] = {
    "hidden_size": (64, 96, 128, 192),
    "hidden_size_per_layer_input": (16, 32, 64),
    "n_shared_experts": (1, 2),
    "num_shared_experts": (1, 2),
    "num_attention_heads": (2, 4, 8),
    "num_key_value_heads": (1, 2),
    "head_dim": (16, 32, 48),
    "num_experts": (8, 16),
    "num_local_experts": (8, 16),
    "n_routed_experts": (8, 16),
    "num_experts_per_tok": (2, 3, 4),
    "top_k_experts": (2, 3, 4),
    "q_lora_rank": (32, 48, 96),
    "kv_lora_rank": (32, 64),
    "qk_nope_head_dim": (16, 32, 48),
    "qk_rope_head_dim": (16, 32),
    "v_head_dim": (16, 32),
    "linear_num_value_heads": (2, 4),
    "linear_num_key_heads": (1, 2),
    "linear_key_head_dim": (32, 64),
    "linear_value_head_dim": (32, 64, 96),
    "linear_head_dim": (32, 48, 64),
    "linear_num_heads": (2, 3, 4),
    "mamba_d_head": (16, 32, 64),
    "mamba_head_dim": (16, 32, 64),
    "mamba_num_heads": (2, 4, 8),
    "mamba_n_heads": (4, 8),
    "mamba_n_groups": (1, 2),
    "n_groups": (1, 2),
    "mamba_d_state": (16, 32, 64),
    "ssm_state_size": (16, 32, 64),
    "state_size": (16, 32, 64),
    "mamba_chunk_size": (32, 64),
    "chunk_size": (32, 64),
}
PARTS = {
    "attention": ("heads", "queries", "keys", "values", "low queries", "low keys", "turned"),
    "state": ("state heads", "state values", "state keys", "own keys", "chunks", "states"),
    "experts": ("experts", "chosen hidden", "chosen units", "shared units"),
}
"""Widths of what only some kinds of layers have."""
COUNTS = ("heads", "experts", "rank", "state heads")
"""Widths that are no widest one."""
DELTA_LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
FEWER_LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA_LAYERS,
    "qwen3_5_text": DELTA_LAYERS,
    "olmo_hybrid": DELTA_LAYERS,
    "kimi_linear": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
    },
}
"""One of each kind."""
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "kimi_linear")


def drawn(case: str, chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A config of the case in other sizes, without windows, that fit each other."""
    family, options = FAMILIES[case]
    if "sliding_attention" in options.get("layer_types", ()) or "sliding_window" in options:
        options = {name: it for name, it in options.items() if name not in WINDOWS}
        options |= {"use_sliding_window": False} if family == "qwen2" else {}
        options |= {"layer_types": ["full_attention"] * 2}
    options = {name: it for name, it in options.items() if "softcapping" not in name}
    named = {**SHAPE, **options}
    if family == "gpt2":  # which are other names of what SHAPE has
        options = {name: it for name, it in options.items() if name not in ("n_embd", "n_head")}
        named["n_inner"] = 0
    if family == "nemotron_h":
        named["moe_shared_expert_intermediate_size"] = 0
    has = {name for name, it in named.items() if it != 0}
    new = {name: chance.choice(CHOICES[name]) for name in named if name in CHOICES.keys() & has}
    hidden = new["hidden_size"]
    for name in sorted(named.keys() & SHARES.keys()):
        is_experts = "num_local_experts" in named and name == "intermediate_size"
        new[name] = int(hidden * chance.choice(EXPERT_SHARES if is_experts else SHARES[name]))
    if family == "gpt_oss":  # whose scores would be all that counts
        new |= {"num_attention_heads": chance.choice((2, 4))}
    if family in LATENT:
        new |= {"num_key_value_heads": new["num_attention_heads"]}
        new |= {"head_dim": new["qk_rope_head_dim"]}
    if family == "mamba2":
        size = chance.choice((16, 32))
        new |= {"head_dim": size, "num_heads": 2 * hidden // size, "n_groups": 1}
    if family in ("granitemoehybrid", "bamba"):
        new |= {"mamba_d_head": 2 * hidden // new["mamba_n_heads"]}
    if family == "falcon_h1":
        new |= {"mamba_d_ssm": new["mamba_d_head"] * new["mamba_n_heads"]}
    if family == "gemma4_text":
        new |= {"global_head_dim": new["head_dim"], "num_kv_shared_layers": 0}
        new |= {"num_global_key_value_heads": new["num_key_value_heads"]}
    if family in ("lfm2", "lfm2_moe"):
        new |= {"conv_dim": hidden}
    if family == "minimax_m2":
        new |= {"rotary_dim": 16}
    if family == "olmo_hybrid":
        new |= {"linear_num_key_heads": new["linear_num_value_heads"]}
    if family not in ("nemotron_h", "mamba2"):
        new |= {"num_hidden_layers": 2, **FEWER_LAYERS.get(family, {})}
        options.pop("no_rope_layers", None)
    return family, {**options, **new}


@dataclass(frozen=True)
class Row:
    kind: str
    way: str
    itemsize: int
    sizes: dict[str, float]
    value: float
    """Bytes of a token."""
    scale: float
    """Of what a fit may be off by a share."""


def measured(case: str, chance: random.Random) -> list[Row]:
    """Of each kind of layer, in sizes by chance."""
    found = []
    family, options = drawn(case, chance)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_family(folder, family, options)
        own = json.loads((folder / "config.json").read_text())
        model = load_model(family_config(folder), CPU)
    policy = PolicyModel(model)
    fuse_layers(model)
    layers = decoder_layers(model)
    kinds = [layer_kind(n for n, _ in layer.named_parameters()) for layer in layers]
    samples = [build_sample(n, prompt_length=1, vocabulary=VOCABULARY) for n in LENGTHS]
    tensors = TrainTensors.build(MicroBatch.join(samples), CPU)
    sizes, rule = widths(own), KeptScores.of(own)
    for way in WAYS:
        mode, _, has_adapters = way.partition(", ")
        if mode == "back" or (has_adapters and family == "gpt2"):  # no layer of it takes any
            continue
        if has_adapters and "rank" not in sizes:
            sizes["rank"] = chance.choice((4, 8, 16))
            add_adapters(model, LoraConfig(rank=int(sizes["rank"])), torch.float32)
        plain = [layer.forward for layer in layers]
        recompute_layers(layers, mode)
        for dtype in (torch.float32, torch.bfloat16):
            rounded(model, dtype)
            held = held_by_layer(policy, layers, tensors)
            for number, (kind, it) in enumerate(zip(kinds, held, strict=True)):
                if not number and kinds.count(kind) > 1:
                    continue
                has_scores = "attention" in kind and rule.are_kept(
                    number, LENGTHS[0], itemsize=dtype.itemsize, on_gpu=False
                )
                scores = dtype.itemsize * sizes["heads"] * LENGTHS[0]
                scores *= (1 + rule.has_caps) * has_scores
                each = it.kept / sum(LENGTHS) - scores * (mode == "none")
                found.append(Row(kind, way, dtype.itemsize, dict(sizes), each, each))
                if mode == "none":
                    back = (it.peak - it.kept) / sum(LENGTHS)
                    way_back = way.replace("none", "back")
                    found.append(
                        Row(kind, way_back, dtype.itemsize, dict(sizes), back, back + each)
                    )
        for layer, forward in zip(layers, plain, strict=True):
            layer.forward = forward
    return found


def draws(case: str) -> int:
    """More for kinds with more widths."""
    options = FAMILIES[case][1]
    is_mixed = has_experts(case) or "kv_lora_rank" in options or carries_state(case)
    return 11 if is_mixed else 8


def carries_state(case: str) -> bool:
    return FAMILIES[case][0] in CARRIES_STATE


def columns(kind: str, sizes: dict[str, float]) -> list[str]:
    """The widths that a kind of layer can have anything to do with."""
    others = {name for part, names in PARTS.items() if part not in kind.split() for name in names}
    return sorted(name for name, size in sizes.items() if size and name not in others)


def positive(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """No number below 0, and products near the target: the most negative one is left out, and
    again."""
    answer, used = np.zeros(matrix.shape[1]), list(range(matrix.shape[1]))
    while used:
        part = matrix[:, used]
        scale = np.linalg.norm(part, axis=0)
        found = np.linalg.lstsq(part / scale, target, rcond=1e-8)[0] / scale
        if found.min() >= 0:
            answer[used] = found
            break
        used.pop(int(np.argmin(found * scale)))
    return answer


def largest(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The largest numbers of which no product is above the target."""
    return np.asarray((target[:, None] / matrix).min(axis=0))


def signed(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    scale = np.linalg.norm(matrix, axis=0)
    return np.asarray(np.linalg.lstsq(matrix / scale, target, rcond=1e-8)[0] / scale)


FORMS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "kept": positive,
    ", ": signed,
    " | ": largest,
}
"""What is kept is a sum; what the way back adds is one, or the largest of its terms."""


def fitted(kind: str, points: list[Row], form: str) -> tuple[dict[str, float], float]:
    """Bytes of each width, of as few as will do, and by how much they are off at most."""
    names = columns(kind, points[0].sizes)
    if form != "kept":
        names = [it for it in names if it not in COUNTS]
    scale = np.array([it.scale for it in points])
    matrix = np.array([[it.sizes[name] for name in names] for it in points], float)
    matrix /= scale[:, None]
    target = np.array([it.value for it in points]) / scale

    def solve(chosen: list[int]) -> tuple[np.ndarray, float]:
        part = matrix[:, chosen]
        answer = FORMS[form](part, target)
        found = (part * answer).max(axis=1) if form == " | " else part @ answer
        return answer, float(np.abs(found - target).max())

    chosen = list(range(len(names)))
    allowed = max(1.2 * solve(chosen)[1], 0.005 if form == "kept" else 0.02)
    while len(chosen) > 1:
        error, out = min((solve([c for c in chosen if c != out])[1], out) for out in chosen)
        if error > allowed:
            break
        chosen.remove(out)
    answer, error = solve(chosen)
    return {names[c]: round(float(a), 1) for c, a in zip(chosen, answer, strict=True)}, error


def fitted_row(kind: str, wide: list[Row], narrow: list[Row]) -> tuple[str, float]:
    """As kept.json has it, in float32 and in 16 bits."""
    found = []
    for form in (", ", " | ") if wide[0].way.startswith("back") else ("kept",):
        (first, off), (second, other_off) = (fitted(kind, it, form) for it in (wide, narrow))
        terms = [f"{it} {first.get(it, 0):g}/{second.get(it, 0):g}" for it in first | second]
        # A sum with numbers below 0 says less of other sizes.
        worst = max(off, other_off) * (2 if form == ", " else 1)
        found.append((worst, form.replace("kept", ", ").join(terms)))
    off, row = min(found)
    return row, off


def main(cases: list[str]) -> None:
    torch.set_num_threads(1)
    table = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
    for case in cases:
        chance, family = random.Random(case), FAMILIES[case][0]
        points: defaultdict[tuple[str, str, int], list[Row]] = defaultdict(list)
        for _ in range(draws(case)):
            for row in measured(case, chance):
                points[row.kind, row.way, row.itemsize].append(row)
        for kind in sorted({kind for kind, _, _ in points}):
            found = []
            for way in WAYS:
                has_any = (kind, way, 4) in points
                at = way if has_any else way.removesuffix(", adapters")
                found.append(fitted_row(kind, points[kind, at, 4], points[kind, at, 2]))
            table.setdefault(family, {})[kind] = [row for row, _ in found]
            off = " ".join(f"{error:.3f}" for _, error in found)
            print(f"{case}: {kind}: off by {off}; {found[0][0]}", flush=True)
        TABLE.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
