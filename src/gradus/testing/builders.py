"""Samples and micro batches in one line, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradus.wire.micro_batch import MicroBatch
from gradus.wire.sample import Sample
from gradus.wire.versions import VersionSpan


def build_sample(
    length: int = 6,
    *,
    prompt_length: int = 2,
    seed: int = 0,
    advantage: float = 1.0,
    vocabulary: int = 32,
    id: str | None = None,
    versions: VersionSpan | None = None,
) -> Sample:
    """A valid sample of `length` tokens, the first `prompt_length` of them not sampled.

    >>> len(build_sample(length=5))
    5
    """
    random = np.random.default_rng(seed)
    sampled = np.arange(length) >= prompt_length
    logprobs = np.where(sampled, random.uniform(-3.0, -0.1, length), 0.0).astype(np.float32)
    return Sample(
        id=id or f"episode-{seed}/0/0",
        environment="words",
        group_id=f"group-{seed}",
        episode_id=f"episode-{seed}",
        reward=advantage,
        versions=versions or VersionSpan(oldest=0, newest=0),
        token_ids=random.integers(0, vocabulary, length).astype(np.int32),
        loss_mask=sampled,
        sampling_logprobs=logprobs,
        temperatures=np.ones(length, np.float32),
        advantages=np.where(sampled, advantage, 0.0).astype(np.float32),
        reference_logprobs=np.full(length, np.nan, np.float32),
        loss_weights={"rl": sampled.astype(np.float32)},
    )


def build_micro_batch(samples: Sequence[Sample] | None = None) -> MicroBatch:
    """The samples laid end to end, in the order given; by default one small sample."""
    chosen = list(samples) if samples is not None else [build_sample()]
    names = sorted({name for sample in chosen for name in sample.loss_weights})

    def joined(field: str) -> np.ndarray:
        return np.concatenate([getattr(sample, field) for sample in chosen])

    def joined_weights(name: str) -> np.ndarray:
        parts = [s.loss_weights.get(name, np.zeros(len(s), np.float32)) for s in chosen]
        return np.concatenate(parts)

    return MicroBatch(
        sample_ids=[sample.id for sample in chosen],
        sequence_lengths=[len(sample) for sample in chosen],
        token_ids=joined("token_ids"),
        position_ids=np.concatenate([np.arange(len(s), dtype=np.int32) for s in chosen]),
        loss_mask=joined("loss_mask"),
        sampling_logprobs=joined("sampling_logprobs"),
        temperatures=joined("temperatures"),
        advantages=joined("advantages"),
        reference_logprobs=joined("reference_logprobs"),
        loss_weights={name: joined_weights(name) for name in names},
    )
