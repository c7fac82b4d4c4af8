"""Llama 4 in packed rows: attention in chunks, queries by position, weighted inputs of experts.

transformers puts chunks into a mask, counts positions along the row, and lets every expert compute
every token. Shapes: T tokens, k experts of a token, E experts, H hidden size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama4.modeling_llama4 import (
    Llama4ForCausalLM,
    Llama4TextAttention,
    Llama4TextExperts,
    Llama4TextMoe,
)

from gradus.trainer.model.attention import ATTENTION_NAME, packed_attention
from gradus.trainer.model.experts.products import grouped_experts, with_whole_weights


class WeightedInputExperts(Llama4TextExperts):
    """Experts that read a token times its score; as transformers' interface of experts wants it."""

    has_gate, has_bias, is_transposed = True, False, True
    is_turned_in_peft = True
    """PEFT knows transformers' class alone, which does not say how its weights lie."""

    def forward(
        self, hidden: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """[T, H], from the experts chosen for hidden states [T, k] and their scores [T, k]; without
        them transformers' own form [E · T, H], of experts that all compute all."""
        if chosen is None or weights is None:
            return with_whole_weights(self, super().forward, hidden)
        rows = (hidden[:, None] * weights[..., None]).flatten(0, 1)
        alone = chosen.reshape(-1, 1)
        said = grouped_experts(self, rows, alone, torch.ones_like(alone, dtype=rows.dtype))
        return said.view(*chosen.shape, -1).sum(dim=1)

    def _apply_gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        gated: Tensor = up * self.act_fn(gate)
        return gated


def is_llama4(model: torch.nn.Module) -> bool:
    return isinstance(model, Llama4ForCausalLM)


def read_in_chunks(model: PreTrainedModel) -> None:
    """Prepare a Llama 4 for packed rows, in place; nothing of another model."""
    if not isinstance(model, Llama4ForCausalLM):
        return
    # Its class names a part that only the whole model with its tower has.
    model.base_model_prefix = "model"
    inner: Any = model.model
    inner.forward = partial(_with_positions, inner.forward)
    for number, kind in enumerate(model.config.layer_types or ()):
        attention = inner.layers[number].self_attn
        if kind == "chunked_attention":
            attention.chunk_tokens = model.config.attention_chunk_size
        if attention.attn_temperature_tuning and not attention.use_rope:
            attention.forward = partial(_attend_by_position, attention)
    mixtures: list[Any] = [it for it in model.modules() if isinstance(it, Llama4TextMoe)]
    for mixture in mixtures:
        mixture.experts.__class__ = WeightedInputExperts
        mixture.forward = partial(_mix, mixture)


def _with_positions(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs, token_positions=kwargs["position_ids"])


def _attend_by_position(
    attention: Llama4TextAttention,
    hidden_states: Tensor,
    *,
    token_positions: Tensor,
    packed_layout: Any,
    **_: Any,
) -> tuple[Tensor, None]:
    """Layers without rotation, whose queries grow with the position in their own sample."""
    shape = (*hidden_states.shape[:-1], -1, attention.head_dim)
    query, key, value = (
        layer(hidden_states).view(shape).transpose(1, 2)
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    steps = torch.floor((token_positions.float() + 1.0) / attention.floor_scale)
    factors = torch.log1p(steps) * attention.attn_scale + 1.0
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(ATTENTION_NAME, packed_attention)
    attended, _weights = attend(
        attention,
        (query * factors[:, None, :, None]).to(query.dtype),
        key,
        value,
        None,
        scaling=attention.scaling,
        packed_layout=packed_layout,
    )
    return attention.o_proj(attended.flatten(2)), None


def _mix(mixture: Llama4TextMoe, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """The experts that were chosen, and the one that all tokens share."""
    hidden = hidden_states.reshape(-1, mixture.hidden_dim)
    scores, logits = mixture.router(hidden)
    weights, chosen = scores.topk(mixture.top_k, dim=1)
    return mixture.shared_expert(hidden) + mixture.experts(hidden, chosen, weights), logits
