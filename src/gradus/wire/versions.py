"""Policy versions: version v = batches trained, v0 = the initial weights.

Step v trains version v on batch v and publishes version v + 1. This module is the only place
that computes staleness.

New weights may come while a reply is sampled: `VersionRuns` says which version sampled which of
its tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

VersionRuns = list[tuple[int, int]]
"""A version and how many tokens in a row it sampled, in the order of the tokens."""
NOT_SAMPLED = -1
"""The version of tokens that no policy sampled, among those of a whole sample."""


class VersionSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The oldest and newest policy version that sampled tokens of one sample."""

    oldest: int
    newest: int

    def __post_init__(self) -> None:
        if not 0 <= self.oldest <= self.newest:
            raise ValueError(
                f"version span {self.oldest}..{self.newest} must satisfy 0 <= oldest <= newest"
            )

    def within(self, versions: NDArray[np.int32]) -> VersionSpan:
        """What the versions of the tokens leave of the span; all of it where they say nothing.

        Never more: a version that nobody heard of yet counts as the newest that was heard of.

        >>> VersionSpan(7, 9).within(np.array([NOT_SAMPLED, 8, 8, 10]))
        VersionSpan(oldest=8, newest=9)
        """
        known = versions[versions != NOT_SAMPLED].clip(self.oldest, self.newest)
        return VersionSpan(int(known.min()), int(known.max())) if len(known) else self

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


def add_run(runs: VersionRuns, version: int, count: int) -> None:
    """`count` more tokens of `version` at the end.

    >>> runs = [(3, 2)]
    >>> add_run(runs, 3, 1)
    >>> runs
    [(3, 3)]
    """
    if runs and runs[-1][0] == version:
        count += runs.pop()[1]
    if count > 0:
        runs.append((version, count))


def runs_of(versions: NDArray[np.int32]) -> VersionRuns:
    """
    >>> runs_of(np.array([3, 3, 4]))
    [(3, 2), (4, 1)]
    """
    starts = np.flatnonzero(np.diff(versions, prepend=NOT_SAMPLED - 1))
    counts = np.diff(starts, append=len(versions))
    return list(zip(versions[starts].tolist(), counts.tolist(), strict=True))


def by_token(runs: VersionRuns) -> NDArray[np.int32]:
    """The version of each token, [T]."""
    versions, counts = zip(*runs, strict=True) if runs else ((), ())
    return np.repeat(np.array(versions, np.int32), np.array(counts, np.int64))


def read_runs(value: Any, num_tokens: int) -> VersionRuns | None:
    """The runs of a reply of `num_tokens` tokens that another program noted; None when they are
    none."""
    try:
        runs = msgspec.convert(value, VersionRuns)
    except msgspec.ValidationError:
        return None
    is_whole = sum(count for _, count in runs) == num_tokens
    is_valid = all(0 <= version < 1 << 31 and count > 0 for version, count in runs)
    return runs if is_whole and is_valid else None
