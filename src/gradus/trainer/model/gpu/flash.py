"""Flash attention on a GPU: the one inside torch, or a newer version where it is installed.

torch brings version 2 and needs no other package for it. Versions 3 (package `flash-attn-3`, Hopper
GPUs) and 4 (`flash-attn-4`, Blackwell) replace torch's kernels in place, so that every call of
torch's attention uses them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl

from gradus.log import get_logger
from gradus.trainer.model.kernels import FlashVersion, Platform, flash_version

logger = get_logger(__name__)


def flash_attention(
    tokens: tuple[Tensor, Tensor, Tensor],
    boundaries: Tensor,
    longest: int,
    scale: float,
    window: int | None,
    platform: Platform,
) -> Tensor:
    """[T, H, D], from queries [T, H, D] and keys and values [T, K, D], without any padding.

    `boundaries` are the starts of the samples, and T, in int32.
    """
    query, key, value = (t.contiguous() for t in tokens)
    return platform.varlen(
        query,
        key,
        value,
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )


def choose_flash_attention(
    platform: Platform, activate: Callable[[str], None] = activate_flash_attention_impl
) -> FlashVersion:
    """Let torch run a newer version where there is one; names what runs.

    An installation that does not fit this torch is reported, and version 2 stays.
    """
    version = flash_version(platform.facts)
    if version in ("none", "FA2"):
        return version
    try:
        activate(version)
    except (ImportError, RuntimeError, ValueError) as error:
        logger.warning("%s is installed and cannot be used: %s", version, error)
        return "FA2"
    logger.info("attention by %s", version)
    return version
