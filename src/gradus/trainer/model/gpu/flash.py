"""Flash attention on a GPU: the one inside torch, or a newer version where it is installed.

torch brings version 2 and needs no other package for it. Versions 3 (package `flash-attn-3`, Hopper
GPUs) and 4 (`flash-attn-4`, Hopper and Blackwell) replace torch's kernels in place, so that every
call of torch's attention uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from gradus.log import get_logger
from gradus.trainer.model.kernels import FlashVersion, Platform, flash_version

logger = get_logger(__name__)

_TRIAL_LENGTHS, _TRIAL_HEADS, _TRIAL_HEAD = (1, 130, 63), (8, 2, 2), 128
_LARGEST_DISTANCE = 0.02
"""Between two versions in bfloat16, of which each is 0.002 to 0.004 from float32 (on an H200)."""


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
    platform: Platform,
    activate: Callable[[str], None] = activate_flash_attention_impl,
    restore: Callable[[], None] = restore_flash_attention_impl,
    attend: Callable[[Platform], list[Tensor]] | None = None,
) -> FlashVersion:
    """Let torch run a newer version where there is one that computes as version 2; names what runs.

    An installation that does not fit this torch or GPU is reported, and version 2 stays.
    """
    attend = attend or _attend_trial
    version = flash_version(platform.facts)
    if version in ("none", "FA2"):
        return version
    expected = attend(platform)
    try:
        activate(version)
        # A tensor, whose max is NaN where one of them is.
        far = float(torch.tensor([*map(_distance, attend(platform), expected)]).max())
    except Exception as error:  # Packages of others: the first call builds and loads kernels.
        logger.warning("%s is installed and cannot be used: %s", version, error)
        restore()
        return "FA2"
    if not far <= _LARGEST_DISTANCE:
        message = "%s is installed and not used: its results are %.2g away from those of version 2"
        logger.warning(message, version, far)
        restore()
        return "FA2"
    logger.info("attention by %s", version)
    return version


def _attend_trial(platform: Platform) -> list[Tensor]:
    """Attention inside a few made-up samples, and its gradients by queries, keys and values."""
    device, draw = torch.device("cuda"), torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(sum(_TRIAL_LENGTHS), heads, _TRIAL_HEAD, generator=draw)
        .to(device, torch.bfloat16)
        .requires_grad_()
        for heads in _TRIAL_HEADS
    ]
    starts = torch.tensor([0, *accumulate(_TRIAL_LENGTHS)], dtype=torch.int32, device=device)
    query, key, value = leaves
    longest, scale = max(_TRIAL_LENGTHS), _TRIAL_HEAD**-0.5
    attended = flash_attention((query, key, value), starts, longest, scale, None, platform)
    return [attended.detach(), *torch.autograd.grad(attended.float().square().sum(), leaves)]


def _distance(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||."""
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm())
