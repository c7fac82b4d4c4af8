"""Which flash attention a GPU runs: the one inside torch, or version 3 where it is installed.

torch brings version 2 and needs no other package for it. Version 3 (package `flash-attn-3`, Hopper
GPUs) replaces torch's kernels in place, so that whoever calls torch's attention gets it.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch.backends.cuda import is_flash_attention_available
from torch.nn.attention import activate_flash_attention_impl

from gradus.log import get_logger

logger = get_logger(__name__)

_OLDEST = (8, 0)
"""Compute capability of Ampere; torch's kernel runs on nothing older."""
_HOPPER = 9
_VERSION_3 = "flash_attn_interface"


def has_flash_attention(device: torch.device) -> bool:
    """Whether torch's attention for samples of different lengths runs on this device."""
    return device.type == "cuda" and _has_kernel(device)


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
