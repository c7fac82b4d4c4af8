#!/usr/bin/env python3
"""Write the tables of docs/gpu.md: what fits where, by the formula of the trainer's memory.

Nothing in them was measured. A test computes them again and compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradus.config import LoraConfig, ParallelConfig, ServedLoraConfig, TrainerConfig
from gradus.plan.memory.prediction import GIB, Footprint, footprint_of
from gradus.plan.memory.shape import ModelShape, shape_of_config
from gradus.plan.memory.sharing import ASLEEP_BYTES, resting_bytes

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gpu.md"
BEGIN, END = "<!-- computed by scripts/gpu_tables.py -->\n", "<!-- end of what is computed -->\n"
MODELS = {  # hidden, intermediate, layers, heads, key heads, tied
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8, True),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, True),
    "Qwen3-8B": (4096, 12288, 36, 32, 8, False),
    "Qwen3-14B": (5120, 17408, 40, 40, 8, False),
    "Qwen3-32B": (5120, 25600, 64, 64, 8, False),
}
GPUS = {"L4": 22.5, "L40S": 45.0, "A100, H100 80 GB": 79.6, "H200": 140.4}
"""GiB as nvidia-smi tells them."""
USABLE = 0.95
"""Share of a GPU that is filled at most, since the formula estimates."""
COUNTS = (1, 2, 4, 8)
RECOMPUTE = ("none", "selective", "full")
LEAST_KV_GIB = 4.0
"""Cache that an engine gets at least."""


def shape(model: str) -> ModelShape:
    hidden, middle, layers, heads, key_heads, tied = MODELS[model]
    return shape_of_config(
        {
            "hidden_size": hidden,
            "intermediate_size": middle,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": key_heads,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": tied,
        }
    )


def footprint(model: str, *, ranks: int = 1, lora: bool = False, **parallel: Any) -> Footprint:
    settings = TrainerConfig(
        num_processes=ranks,
        lora=ServedLoraConfig(**LoraConfig(rank=16).model_dump()) if lora else None,
        parallel=ParallelConfig(gradient_sync="each", **parallel),
    )
    return footprint_of(shape(model), settings, on_gpu=True)


def ways() -> Iterator[tuple[str, dict[str, Any]]]:
    """Settings from the fastest to the smallest."""
    for recompute in RECOMPUTE:
        yield recompute, {"activation_checkpointing": recompute}
    offload = {"activation_checkpointing": "full", "offload_optimizer": True}
    yield "full, offload", offload


def fewest(model: str, gib: float, *, lora: bool = False) -> str:
    """The fewest GPUs of a trainer that keeps all on them, and the fastest settings that fit."""
    kept = [way for way in ways() if "offload_optimizer" not in way[1]]
    for ranks in COUNTS:
        for name, parallel in kept:
            found = footprint(model, ranks=ranks, lora=lora, **parallel)
            if found.device_bytes <= USABLE * gib * GIB:
                return f"{ranks}: {name} ({found.device_bytes / GIB:.0f})"
    return "more than 8"


def main_memory(found: Footprint, parallel: dict[str, Any]) -> str:
    """What offloading costs, where it is chosen."""
    if "offload_optimizer" not in parallel:
        return ""
    return f", {found.host_bytes / GIB:.0f} GiB of main memory"


def turns(model: str, gib: float) -> str:
    """The settings of one GPU that engine and trainer share by turns."""
    weights = 2 * shape(model).num_parameters
    for name, parallel in ways():
        found = footprint(model, **parallel)
        left = USABLE * gib * GIB - resting_bytes(found)
        fits = found.device_bytes + ASLEEP_BYTES <= USABLE * gib * GIB
        if fits and left >= weights + (1 + LEAST_KV_GIB) * GIB:
            share = int(100 * min(0.9, left / (gib * GIB))) / 100
            return f"{name}, {share:g}{main_memory(found, parallel)}"
    return "no"


def parts(model: str) -> str:
    """One row: what a rank that trains alone holds."""
    plain = footprint(model, activation_checkpointing="none")
    states = sum(plain.states[name] for name in ("weights", "gradients", "optimizer"))
    kept = [
        footprint(model, activation_checkpointing=way).working["activations"] for way in RECOMPUTE
    ]
    size = shape(model)
    per_token = 2 * 2 * size.num_layers * size.key_size
    cells = [f"{value / GIB:.1f}" for value in (2 * size.num_parameters, states, *kept)]
    return row([model, f"{size.num_parameters / 1e9:.2f}", *cells, f"{GIB // per_token:,}"])


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def table(title: list[str], rows: list[str]) -> str:
    return row(title) + row(["---"] * len(title)) + "".join(rows)


def tables() -> str:
    """All that is computed, as it stands in the page."""
    names = list(GPUS)
    parts_title = ["model", "10^9 weights", "in the engine", "masters, gradients, moments"]
    parts_title += [f"activations: {way}" for way in RECOMPUTE] + ["tokens per GiB of KV cache"]
    full = [row([m, *(fewest(m, gib) for gib in GPUS.values())]) for m in MODELS]
    lora = [row([m, *(fewest(m, gib, lora=True) for gib in GPUS.values())]) for m in MODELS]
    shared = [row([m, *(turns(m, gib) for gib in GPUS.values())]) for m in MODELS]
    return "\n".join(
        [
            "What the parts need, in GiB, one trainer process, micro batches of 8,192 tokens:\n",
            table(parts_title, [parts(m) for m in MODELS]),
            "GPUs of the trainer, beside those of the engine, without `offload_optimizer`: "
            "`fewest: activation_checkpointing` (GiB on each):\n",
            table(["all weights", *names], full),
            table(["LoRA, rank 16", *names], lora),
            'One GPU for both, `inference.gpu_sharing = "turns"`: `activation_checkpointing, '
            "gpu_memory_utilization`:\n",
            table(["all weights", *names], shared),
        ]
    )


def with_tables(page: str) -> str:
    """The page with what is computed in its place."""
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{tables()}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
