"""Flash attention on a GPU: the one inside torch, or version 3 where it is installed.

torch brings version 2 and needs no other package for it. Version 3 (package `flash-attn-3`, Hopper
GPUs) replaces torch's kernels in place, so that every call of torch's attention uses it.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.backends.cuda import is_flash_attention_available
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from gradus.log import get_logger

logger = get_logger(__name__)

_OLDEST = (8, 0)
"""Compute capability of Ampere; torch's kernel runs on nothing older."""
_HOPPER = 9
_VERSION_3 = "flash_attn_interface"
_LARGEST_HEAD = 256
"""Flash attention knows heads up to this size, in steps of 8."""


def has_flash_attention(device: torch.device) -> bool:
    """Whether torch's attention for samples of different lengths runs on this device."""
    return device.type == "cuda" and _has_kernel(device)


def takes_dtype(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it runs there in this dtype."""
    return dtype in (torch.bfloat16, torch.float16) and has_flash_attention(device)


def takes_head(head_size: int) -> bool:
    """Whether it knows heads of this size."""
    return head_size <= _LARGEST_HEAD and head_size % 8 == 0


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """[T, H, D], from queries [T, H, D] and keys and values [T, K, D], without any padding.

    `boundaries` are the starts of the samples, and T, in int32.
    """
    attended = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended, Tensor)
    return attended


def choose_flash_attention(device: torch.device) -> str:
    """Let torch run version 3 where it can; names what runs.

    An installation that does not fit this torch is reported, and version 2 stays.
    """
    if not has_flash_attention(device):
        return "none"
    major, _ = torch.cuda.get_device_capability(device)
    if major != _HOPPER or find_spec(_VERSION_3) is None:
        return "FA2"
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, ValueError) as error:
        logger.warning("flash attention 3 is installed and cannot be used: %s", error)
        return "FA2"
    logger.info("attention by flash attention 3")
    return "FA3"


@lru_cache(maxsize=16)
def _has_kernel(device: torch.device) -> bool:
    capability: tuple[int, int] = torch.cuda.get_device_capability(device)
    return is_flash_attention_available() and capability >= _OLDEST
