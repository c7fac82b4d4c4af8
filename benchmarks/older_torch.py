"""Lets gradus compute with torch 2.11, which some machines have; nothing changes on newer ones.

There `varlen_attn` takes fewer key heads without being told, and the calls of flash-attn-4 hand on
a window of -1 and refuse all windows backward, causal ones too. Call `mend` before gradus comes.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.attention._fa4 as version_4
import torch.nn.attention.varlen as varlen


def _kernels() -> Any:
    assert version_4._FA4_MODULE_PATH is not None
    return version_4._fa4_import_module(version_4._FA4_MODULE_PATH)


def _options(scale: float, is_causal: bool, window: tuple[int, int], starts: Any) -> dict[str, Any]:
    left, right = (None if side == -1 else side for side in window)
    return {
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size_left": left,
        "window_size_right": right,
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
    }


def _forward(
    *call: Any, scale: Any, window_size_left: int, window_size_right: int, **_: Any
) -> Any:
    query, key, value, starts, _, longest, _, _, is_causal, _ = call
    window = (window_size_left, window_size_right)
    attended, sums = _kernels()._flash_attn_fwd(
        *(query, key, value),
        **_options(scale, is_causal, window, starts),
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        return_lse=True,
    )
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return attended, sums.contiguous(), seed, seed[0], query.new_empty(0)


def _backward(*call: Any, scale: Any, window_size_left: int, window_size_right: int) -> Any:
    gradient, query, key, value, attended, sums, starts, _, _, _, _, is_causal, _, _ = call
    window = (window_size_left, window_size_right)
    return _kernels()._flash_attn_bwd(
        *(query, key, value, attended, gradient, sums.contiguous()),
        **_options(scale, is_causal, window, starts),
    )


def mend() -> None:
    plain: Any = varlen.varlen_attn
    if "enable_gqa" in inspect.signature(plain).parameters:
        return

    def varlen_attn(*call: Any, enable_gqa: bool = False, **options: Any) -> Any:
        del enable_gqa
        return plain(*call, **options)

    varlen.varlen_attn = varlen_attn
    for name, ours in (("forward", _forward), ("backward", _backward)):
        setattr(version_4, f"_fa4_flash_attention_{name}_impl", ours)
