"""Samples and micro batches in one line, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradus.wire.micro_batch import MicroBatch
from gradus.wire.sample import Sample
from gradus.wire.tokens import TokenArrays
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
    logprobs = np.where(sampled, random.uniform(-3.0, -0.1, length), 0.0)
    return Sample(
        id=id or f"episode-{seed}/0/0",
        environment="words",
        group_id=f"group-{seed}",
        episode_id=f"episode-{seed}",
        reward=advantage,
        versions=versions or VersionSpan(oldest=0, newest=0),
        arrays=TokenArrays.build(
            random.integers(0, vocabulary, length),
            {"rl": sampled.astype(np.float32)},
            sampling_logprobs=logprobs,
            advantages=np.where(sampled, advantage, 0.0),
        ),
    )


def build_micro_batch(samples: Sequence[Sample] | None = None) -> MicroBatch:
    """The samples laid end to end, in the order given; by default one small sample."""
    return MicroBatch.join([build_sample()] if samples is None else samples)
