"""Layers that carry state from token to token, run one sample at a time.

A mixer reads a row as one text, by transformers' reference code or by the kernels of
`flash-linear-attention` where a GPU has them. Here it gets the rectangles of padded attention, one
sample in each line: state flows forward only, so that padding behind a sample changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradus.trainer.model.cpu.attention import PaddedRows, to_rows, to_tokens
from gradus.trainer.model.cpu.scan import scan_by_products

MIXERS = frozenset(
    {
        *("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
        *("OlmoHybridGatedDeltaNet", "KimiLinearDeltaAttention"),
        *("Mamba2Mixer", "NemotronHMamba2Mixer", "FalconH1Mixer", "BambaMixer"),
        *("GraniteMoeHybridMambaLayer", "Lfm2ShortConv", "Lfm2MoeShortConv"),
    }
)
"""Classes of transformers whose first argument is [B, L, ·] and whose result has that shape."""

Forward = Callable[..., Any]


def state_mixers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The known parts of a model that mix tokens by a state or a convolution."""
    return [it for it in module.modules() if type(it).__name__ in MIXERS]


def separate_states(layers: Sequence[torch.nn.Module]) -> None:
    """Let each mixer read a packed row sample by sample, in place.

    A layer's forward tells its mixer how the row is packed, again when backward computes it again.
    """
    for layer in layers:
        for mixer in state_mixers(layer):
            row = _Row()
            scan_by_products(mixer)
            mixer.forward = partial(_by_sample, mixer.forward, row)
            layer.forward = partial(_in_row, layer.forward, row)


class _Row:
    """How the row is packed that a layer reads."""

    layout: Any = None


def _in_row(forward: Forward, row: _Row, *args: Any, **kwargs: Any) -> Any:
    row.layout = kwargs["packed_layout"]
    return forward(*args, **kwargs)


def _by_sample(forward: Forward, row: _Row, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """[1, T, H] → [1, T, H]; caches and masks are never set here."""
    padded: PaddedRows = row.layout.rows(hidden_states.dtype)
    sizes = [block.num_rows for block in padded.blocks]
    parts = []
    split = torch.split(to_rows(hidden_states[0], padded), sizes)
    for block, rows in zip(padded.blocks, split, strict=True):
        mixed: Tensor = forward(rows.view(block.samples, block.length, -1))
        parts.append(mixed.reshape(block.num_rows, -1))
    return to_tokens(torch.cat(parts), padded)[None]
