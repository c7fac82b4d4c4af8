"""Whether slow tasks train as often as they are started: the bias of asynchronous training (pure).

Slow episodes end too old more often and are abandoned or dropped, so the policy learns from short
episodes only. Rewards do not show it. Two views per source, over its last groups:

- distributions: latency and length of all episodes that were started, beside those that trained;
- bias: of all tasks that trained, or would have if they had been quicker, which share trained among
  the slowest quarter, against the share of all. 0: slow tasks train as often as others; 1: never.

A task that trained nothing for another reason (equal rewards, errors) says nothing about slowness
and is left out of the bias. A task is as slow as its slowest episode, because a group waits for it;
an abandoned one took at least as long as it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gradus.orchestrator.records.numbers import percentiles
from gradus.orchestrator.types import ABANDONED, STALE, Group, GroupOutcome

WINDOW_GROUPS = 128
"""Groups of a source that count."""
LEAST_GROUPS = 20
"""With fewer groups, chance decides."""
LEAST_LOST = 3
"""With fewer slow tasks lost, chance decides too."""
SLOW_SHARE = 0.25


@dataclass(frozen=True)
class PlayTime:
    """One started episode."""

    seconds: float
    length_tokens: int | None
    """Sampled tokens; None when it did not finish."""
    is_trained: bool


@dataclass(frozen=True)
class GroupTime:
    """One group that is final."""

    outcome: GroupOutcome
    episodes: tuple[PlayTime, ...]

    @property
    def seconds(self) -> float:
        """Of its slowest episode."""
        return max(episode.seconds for episode in self.episodes)


def group_time(group: Group) -> GroupTime:
    """How long the episodes of a final group took, and whether that kept it from training."""
    kept = {sample.episode_id for sample in group.samples if sample.id not in group.dropped}
    outcome = GroupOutcome.TRAINED if kept else GroupOutcome.OTHER
    if not kept and not {ABANDONED, STALE}.isdisjoint(group.dropped.values()):
        outcome = GroupOutcome.TOO_SLOW
    return GroupTime(
        outcome,
        tuple(
            PlayTime(
                played.seconds,
                None if played.numbers is None else played.numbers.length_tokens,
                played.id in kept,
            )
            for played in group.played
        ),
    )


def slow_bias(groups: Sequence[GroupTime]) -> float:
    """1 - share of the slowest quarter that trained / share of all; 0 with too few groups, and
    at most 0 while fewer slow ones are lost than chance may take.

    >>> quick = [GroupTime(GroupOutcome.TRAINED, (PlayTime(1.0, 8, True),))] * 15
    >>> slow = [GroupTime(GroupOutcome.TOO_SLOW, (PlayTime(9.0, None, False),))] * 5
    >>> slow_bias(quick + slow)
    1.0
    """
    counted = [group for group in groups if group.outcome is not GroupOutcome.OTHER]
    if len(counted) < LEAST_GROUPS:
        return 0.0
    slowest, share = _slowest(counted), _trained_share(counted)
    lost = sum(group.outcome is GroupOutcome.TOO_SLOW for group in slowest)
    if not share:
        return 0.0
    bias = 1 - _trained_share(slowest) / share
    return min(bias, 0.0) if lost < LEAST_LOST else bias


class LastGroups(msgspec.Struct):
    """The last groups of every source."""

    of_sources: dict[str, list[GroupTime]] = {}


class Starvation:
    """Owns the last groups of every source.

    >>> Starvation().metrics()
    {}
    """

    def __init__(self) -> None:
        self.state = LastGroups()

    def add(self, source: str, group: GroupTime) -> None:
        """A group with at least one started episode is final."""
        if group.episodes:
            window = self.state.of_sources.setdefault(source, [])
            window.append(group)
            del window[:-WINDOW_GROUPS]

    def metrics(self) -> dict[str, float]:
        """Per source: quantiles of started and trained episodes, and the bias."""
        found: dict[str, float] = {}
        for source, window in self.state.of_sources.items():
            prefix = f"episode/{source}"
            episodes = [episode for group in window for episode in group.episodes]
            trained = [episode for episode in episodes if episode.is_trained]
            found |= _distribution(f"{prefix}/started", episodes)
            found |= _distribution(f"{prefix}/trained", trained)
            found[f"{prefix}/slow_bias"] = slow_bias(window)
        return found


def _slowest(groups: Sequence[GroupTime]) -> list[GroupTime]:
    """The slowest quarter, quickest first."""
    ordered = sorted(groups, key=lambda group: group.seconds)
    return ordered[len(ordered) - max(1, int(len(ordered) * SLOW_SHARE)) :]


def _trained_share(groups: Sequence[GroupTime]) -> float:
    return sum(group.outcome is GroupOutcome.TRAINED for group in groups) / len(groups)


def _distribution(prefix: str, episodes: Sequence[PlayTime]) -> dict[str, float]:
    """Median and 95 % quantile of latency and length; absent without episodes."""
    seconds = [episode.seconds for episode in episodes]
    lengths = [float(e.length_tokens) for e in episodes if e.length_tokens is not None]
    found: dict[str, float] = {}
    for name, values in (("seconds", seconds), ("length_tokens", lengths)):
        found |= percentiles(f"{prefix}_{name}", values, (50, 95))
    return found
