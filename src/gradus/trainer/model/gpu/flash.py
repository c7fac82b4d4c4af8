"""Flash attention on a GPU: the one inside torch, or a newer version where it is installed.

torch brings version 2 and needs no other package for it. Versions 3 (package `flash-attn-3`, Hopper
GPUs) and 4 (`flash-attn-4`, Hopper and Blackwell) replace torch's kernels in place, so that every
call of torch's attention uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.attention._fa4 import register_flash_attention_fa4
from torch.nn.attention.varlen import AuxRequest

from gradus.log import get_logger
from gradus.trainer.model.cpu.attention import ScoreRule, widened
from gradus.trainer.model.cpu.blocks import Blocks
from gradus.trainer.model.kernels import FlashVersion, Platform, flash_version

logger = get_logger(__name__)

_TRIAL_LENGTHS, _TRIAL_HEADS, _TRIAL_HEAD = (1, 130, 63), (8, 2, 2), 128
_LARGEST_DISTANCE = 0.02
"""Between two versions in bfloat16, of which each is 0.002 to 0.004 from float32 (on an H200)."""


def flash_attention(
    tokens: tuple[Tensor, Tensor, Tensor],
    boundaries: Tensor,
    longest: int,
    rule: ScoreRule,
    platform: Platform,
) -> Tensor:
    """[T, H, V], from queries [T, H, D], keys [T, K, D] and values [T, K, V], without any padding
    of samples; the kernel wants V = D, so narrower values are padded with zeros.

    `boundaries` are the starts of the samples, and T, in int32. Scores cannot be capped.
    """
    size = tokens[2].shape[-1]
    query, key, value = (widened(t, tokens[0].shape[-1]).contiguous() for t in tokens)
    call = _Call(
        boundaries,
        longest,
        rule.scale,
        (-1 if rule.window is None else rule.window - 1, 0),
        platform,
    )
    if rule.sinks is None:
        attended: Tensor = call.forward(query, key, value)
    else:
        attended = _SinkAttention.apply(query, key, value, rule.sinks, call)  # type: ignore[no-untyped-call]
    return attended[..., :size]


@dataclass(frozen=True)
class _Call:
    """What a kernel is told beside queries, keys and values."""

    boundaries: Tensor
    longest: int
    scale: float
    window_size: tuple[int, int]
    platform: Platform

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Any:
        starts, longest = self.boundaries, self.longest
        return self.platform.varlen(
            *(query, key, value, starts, starts, longest, longest),
            scale=self.scale,
            window_size=self.window_size,
            enable_gqa=query.shape[1] != key.shape[1],
            **more,
        )


class _SinkAttention(torch.autograd.Function):
    """A sink takes weight and gives no value: what the kernel gave is divided by a larger sum.

    The kernel's own way back computes weights from the logarithm of that sum, and what they share
    from its result; given the larger sum and the smaller result, its gradients are those of
    attention with sinks. Only the sinks' own is missing.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, call: _Call
    ) -> Tensor:
        attended, sums = call.forward(query, key, value, return_aux=AuxRequest(lse=True))
        larger = torch.logaddexp(sums, sinks.float()[:, None])  # [H, T]
        smaller: Tensor = (attended * (sums - larger).exp().T[..., None]).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, smaller, larger)
        ctx.call = call
        return smaller

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, attended, larger = ctx.saved_tensors
        call: _Call = ctx.call
        found = call.platform.varlen_backward(
            gradients[0],
            (query, key, value),
            (attended, larger),
            (call.boundaries, call.boundaries, call.longest, call.longest),
            call.scale,
            call.window_size,
        )
        taken = (sinks.float()[:, None] - larger).exp()
        lost = (gradients[0].float() * attended.float()).sum(-1).T
        return *found, -(taken * lost).sum(1).to(sinks.dtype), None


@dataclass(frozen=True)
class VarlenBlocks:
    """Attention of blocks of queries to blocks of keys, with the logarithms of their sums.

    Values must be as wide as keys; see `BlockKernel`.
    """

    scale: float
    platform: Platform

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks
    ) -> tuple[Tensor, Tensor]:
        # torch ignores a gradient of the sums: `backward` is called with those of all blocks.
        found: Any = self.platform.varlen(
            *(query.contiguous(), key.contiguous(), value.contiguous()),
            *(*blocks.starts, max(blocks.queries), max(blocks.keys)),
            scale=self.scale,
            window_size=_window(blocks),
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        return found[0], found[1]

    def backward(
        self,
        gradient: Tensor,
        tokens: tuple[Tensor, Tensor, Tensor],
        attended: tuple[Tensor, Tensor],
        blocks: Blocks,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (it.contiguous() for it in tokens)
        return self.platform.varlen_backward(
            gradient,
            (query, key, value),
            (attended[0].contiguous(), attended[1].contiguous()),
            (*blocks.starts, max(blocks.queries), max(blocks.keys)),
            self.scale,
            _window(blocks),
        )


def _window(blocks: Blocks) -> tuple[int, int]:
    """How far a query sees back and ahead of its place, counted from the last; -1 is all."""
    if not blocks.is_causal:
        return (-1, -1)
    return (-1 if blocks.window is None else blocks.window - 1, 0)


def _flash_attn_fwd(*args: Any, **kwargs: Any) -> Any:
    """flash-attn-4 with the results that torch takes, which has this module for its kernels.

    torch 2.13 unpacks a result and its sums forward, and three gradients backward; the package's
    4.0.0b36 gives five things and four.
    """
    return _version_4()._flash_attn_fwd(*args, **kwargs)[:2]


def _flash_attn_bwd(*args: Any, **kwargs: Any) -> Any:
    return _version_4()._flash_attn_bwd(*args, **kwargs)[:3]


def _version_4() -> Any:
    return import_module("flash_attn.cute.interface")


def _activate(version: str) -> None:
    """By torch's registry; version 4 through the functions above."""
    if version == "FA4":
        through = partial(register_flash_attention_fa4, __name__)
        register_flash_attention_impl(version, register_fn=through)
    activate_flash_attention_impl(version)


def choose_flash_attention(
    platform: Platform,
    activate: Callable[[str], None] = _activate,
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
    attended = flash_attention((query, key, value), starts, longest, ScoreRule(scale), platform)
    return [attended.detach(), *torch.autograd.grad(attended.float().square().sum(), leaves)]


def _distance(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||."""
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm())
