"""Policy versions: version v = batches trained, v0 = the initial weights.

Step v trains version v on batch v and publishes version v + 1. This module is the only place
that computes staleness.
"""

from __future__ import annotations

import msgspec


class VersionSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The oldest and newest policy version that sampled tokens of one sample."""

    oldest: int
    newest: int

    def __post_init__(self) -> None:
        if not 0 <= self.oldest <= self.newest:
            raise ValueError(
                f"version span {self.oldest}..{self.newest} must satisfy 0 <= oldest <= newest"
            )

    def merge(self, other: VersionSpan) -> VersionSpan:
        return VersionSpan(min(self.oldest, other.oldest), max(self.newest, other.newest))


def staleness(version: int, versions: VersionSpan) -> int:
    """How many updates the trained version is ahead of the oldest sampling version; never negative.

    >>> staleness(3, VersionSpan(oldest=1, newest=2))
    2
    """
    if version < versions.newest:
        raise ValueError(
            f"version {version} cannot train tokens sampled by newer version {versions.newest}"
        )
    return version - versions.oldest
