"""A sample is one branch of a trace as aligned per-token arrays, ready to train."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from gradus.errors import ProtocolError
from gradus.wire.images import ImageSpan, check_spans
from gradus.wire.tokens import TokenArrays
from gradus.wire.versions import VersionRuns, VersionSpan


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One branch: where it comes from, and its tokens."""

    id: str
    """`<episode id>/<trace index>/<branch index>`; unique in a run."""
    environment: str
    group_id: str
    episode_id: str
    reward: float
    """Reward of the trace, for metrics; credit is in `arrays.advantages`."""
    versions: VersionSpan
    arrays: TokenArrays
    token_versions: VersionRuns = []
    """Of all tokens, NOT_SAMPLED for those that were given; empty where nobody knows."""
    images: list[ImageSpan] = []
    """In the order of the tokens; no placeholder is ever a target."""

    @property
    def trace_id(self) -> str:
        """What all branches of one trace have in common."""
        return self.id.rpartition("/")[0] or self.id

    def __len__(self) -> int:
        return len(self.arrays)

    def with_arrays(self, **changes: Any) -> Sample:
        return msgspec.structs.replace(self, arrays=msgspec.structs.replace(self.arrays, **changes))

    def frozen(self) -> Sample:
        return msgspec.structs.replace(self, arrays=self.arrays.frozen())

    def check(self) -> None:
        """Refuse ragged, negative or non-finite content; the ProtocolError names the field."""
        if len(self) == 0:
            raise ProtocolError(f"sample {self.id}: has no tokens")
        if not math.isfinite(self.reward):
            raise ProtocolError(f"sample {self.id}: reward is {self.reward}")
        self.arrays.check(f"sample {self.id}")
        if bool((self.arrays.token_ids < 0).any()):
            raise ProtocolError(f"sample {self.id}: token_ids holds a negative id")
        check_spans(self.images, self.arrays.loss_mask, f"sample {self.id}")


def group_of(sample_id: str) -> str:
    """The group of a sample, by the form of its id.

    >>> group_of("g000007.2/0/1")
    'g000007'
    """
    episode = sample_id.partition("/")[0]
    return episode.rpartition(".")[0] or episode
