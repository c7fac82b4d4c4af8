"""Floating-point operations that a step of a model needs, for MFU; the formula of docs/training.md.

Counted is what the mathematics needs, not what a way of computing it adds: no recomputation, no
padding, and the output layer only for the tokens whose logprob is trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PreTrainedModel

from gradus.trainer.model.policy_model import output_head
from gradus.trainer.tensors import count_targets
from gradus.wire.micro_batch import MicroBatch

_TRAINED, _FROZEN = 6, 4
"""Per weight and token: 2 in the forward, 2 for the gradient of the input, 2 for that of the
weight unless it is frozen."""
_ATTENTION = 12
"""Per query-key pair, head and channel: 2 for scores and 2 for values, three times over."""

PEAK_TERAFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A10": 125.0,
}
"""Part of a GPU's name → dense bfloat16 TFLOP/s from its data sheet; the first match counts."""


@dataclass(frozen=True)
class ModelFlops:
    """Operations of forward and backward, by what they depend on."""

    per_token: float
    """Layers, without attention's scores; of experts only the chosen ones."""
    per_target: float
    """Output layer."""
    per_pair: float
    """Attention of one layer, for one query-key pair."""
    windows: tuple[int | None, ...]
    """Of each layer, how many tokens back it sees; None means all."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFlops:
        """Counts weights; also of a sharded model."""
        config = model.config.get_text_config()
        head = output_head(model)
        head_size = getattr(config, "head_dim", None)
        size = head_size or config.hidden_size // config.num_attention_heads
        return cls(
            per_token=_layer_flops(model),
            per_target=float(head.weight.numel()) * _per_weight(head.weight.requires_grad),
            per_pair=float(_ATTENTION * config.num_attention_heads * size),
            windows=_windows(config),
        )

    def of_step(self, micro_batches: Iterable[MicroBatch]) -> float:
        """Operations of one step's micro batches; dummies need none."""
        total = 0.0
        for micro_batch in micro_batches:
            if micro_batch.is_dummy:
                continue
            pairs = sum(
                causal_pairs(length, window)
                for window in self.windows
                for length in micro_batch.sequence_lengths
            )
            total += self.per_token * len(micro_batch) + self.per_pair * pairs
            total += self.per_target * count_targets(micro_batch)
        return total


def causal_pairs(length: int, window: int | None) -> int:
    """Query-key pairs of a sample when each token sees itself and those before it.

    >>> causal_pairs(3, None), causal_pairs(3, 2)
    (6, 5)
    """
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def peak_teraflops(device_name: str) -> float | None:
    """What one device can do at best in bfloat16; None when it is not in the table."""
    return next((peak for part, peak in PEAK_TERAFLOPS.items() if part in device_name), None)


def _layer_flops(model: PreTrainedModel) -> float:
    config = model.config.get_text_config()
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    ends = {id(output_head(model).weight), id(model.get_input_embeddings().weight)}
    total = 0.0
    for parameter in model.parameters():
        if id(parameter) in ends or parameter.ndim < 2:
            continue
        used = chosen / experts if parameter.ndim == 3 and experts else 1.0
        total += parameter.numel() * used * _per_weight(parameter.requires_grad)
    return total


def _per_weight(is_trained: bool) -> int:
    return _TRAINED if is_trained else _FROZEN


def _windows(config: object) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    num_layers = int(getattr(config, "num_hidden_layers", 0))
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
