"""What the first groups of a run say of its tasks, before most of the time is spent (pure).

They are groups that train anyway, so that the probe costs nothing and changes nothing
(docs/decisions.md). It speaks once: after 32 groups, or with the first batch if there are 8, or
after 8 in which every reply earned the same, and neither 0 nor 1. And once for each source of which
nearly all of the first 16 episodes, or of all since, failed: no record comes for long then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from gradus.orchestrator.algorithms.credit import are_equal
from gradus.orchestrator.play.curriculum import TaskResult
from gradus.orchestrator.types import EpisodeOutcome, Group
from gradus.run.settings import ALARM_THRESHOLDS

MOST_GROUPS = 32
FEWEST_GROUPS = 8
FEWEST_EPISODES = 16
_FAILING = ALARM_THRESHOLDS["failing_episodes"]
_MANY = 0.3
"""Share that is worth a word."""
_HARD = 0.2
"""Best rewards below it: hardly a group ever earns anything."""


@dataclass(frozen=True)
class _Probed:
    rewards: tuple[float, ...]
    num_truncated: int
    num_failed: int
    newest_version: int
    is_flat: bool
    """Its rewards are equal, and it has nothing to train for that."""


class StartProbe:
    """Owns the results of the first groups until they are told.

    >>> probe = StartProbe(print)
    >>> for reward in [0.0] * 20 + [1.0] * 12:
    ...     probe.add_result(TaskResult(rewards=(0.0, reward)), version=0)
    probe     32 groups of 2 by version 0: pass@1 0.19, pass@2 0.38
              20 of them are flat and teach nothing: 20 earn 0 throughout
    next      play tasks of medium difficulty: curriculum.type = "difficulty"
    """

    def __init__(
        self,
        tell: Callable[[str], None],
        *,
        is_over: bool = False,
        is_quiet: bool = False,
    ) -> None:
        """`is_over` for a run that continues: its first groups were told of; `is_quiet` where
        the alarm failing_episodes is."""
        self._tell = tell
        self._is_quiet = is_quiet
        self._ended: Counter[tuple[str, EpisodeOutcome]] = Counter()
        self._told: set[str] = set()
        self._is_over = is_over
        self._probed: list[_Probed] = []

    def ended(self, source: str, outcome: EpisodeOutcome) -> None:
        """An episode ended for good; told before any record comes."""
        if self._is_over or self._is_quiet or source in self._told:
            return
        self._ended[source, outcome] += 1
        failed = self._ended[source, EpisodeOutcome.FAILED]
        number = failed + self._ended[source, EpisodeOutcome.FINISHED]
        if number >= FEWEST_EPISODES and failed >= _FAILING * number:
            self._told.add(source)
            self._tell(
                f"alarm failing_episodes of source {source!r} before the first step: {failed} of "
                f"{number} episodes failed, threshold {_FAILING:g}. The first failure of each "
                "kind stands above, and in notices.log."
            )

    def add(self, group: Group, result: TaskResult) -> None:
        """A group is graded; one of several agents has no reward of its own and does not count."""
        agents = {name for p in group.played if p.numbers is not None for name in p.numbers.agents}
        if len(agents) <= 1:
            newest = max((played.versions.newest for played in group.played), default=0)
            self.add_result(result, version=newest, trains=bool(group.samples))

    def add_result(self, result: TaskResult, *, version: int, trains: bool = False) -> None:
        """What became of a group that `version` was the newest to play; does any of it train?"""
        if self._is_over or len(result.rewards) < 2:
            return
        is_flat = are_equal(result.rewards) and not trains
        failed = len(result.failures)
        self._probed.append(_Probed(result.rewards, result.num_truncated, failed, version, is_flat))
        is_constant = len(self._probed) >= FEWEST_GROUPS and self._constant is not None
        if is_constant or len(self._probed) >= MOST_GROUPS:
            self._speak()

    @property
    def _constant(self) -> float | None:
        """What every reply earned, neither right nor wrong; None where they differ."""
        rewards = [reward for group in self._probed for reward in group.rewards]
        is_flat = all(group.is_flat for group in self._probed) and are_equal(rewards)
        is_plain = any(are_equal([rewards[0], usual]) for usual in (0.0, 1.0))
        return rewards[0] if is_flat and not is_plain else None

    def shipped(self) -> None:
        """A batch is full."""
        self._is_quiet = True  # The records say it from here on.
        if not self._is_over and len(self._probed) >= FEWEST_GROUPS:
            self._speak()

    def _speak(self) -> None:
        self._is_over = True
        for line in self._lines():
            self._tell(line)

    def _lines(self) -> list[str]:
        groups = self._probed
        rewards = [reward for group in groups for reward in group.rewards]
        size = max(len(group.rewards) for group in groups)
        mean, best = fmean(rewards), fmean(max(group.rewards) for group in groups)
        newest = max(group.newest_version for group in groups)
        played_by = "version 0" if not newest else f"versions 0 to {newest}"
        if self._constant is not None:
            return [
                f"probe     {len(groups)} groups of {size} by {played_by}: every reply earned "
                f"{self._constant:.3g}",
                "warning   a reward that is the same for every reply teaches nothing: see what",
                "          it gives a right reply and a wrong one; `gradus check` tries both",
            ]
        names = ("mean reward", "best of each")
        if all(are_equal([it, 0.0]) or are_equal([it, 1.0]) for it in rewards):
            names = ("pass@1", f"pass@{size}")
        lines = [
            f"probe     {len(groups)} groups of {size} by {played_by}: {names[0]} {mean:.2f}, "
            f"{names[1]} {best:.2f}"
        ]
        flat = [group.rewards[0] for group in groups if group.is_flat]
        if flat:
            counts = {value: flat.count(value) for value in sorted(set(flat))[:3]}
            told = ", ".join(f"{count} earn {value:.3g}" for value, count in counts.items())
            told += ", …" * (len(flat) > sum(counts.values()))
            lines.append(
                f"          {len(flat)} of them are flat and teach nothing: {told} throughout"
            )
        advice = self._advice(flat, best)
        return [*lines, *([f"next      {advice}"] if advice else [])]

    def _advice(self, flat: list[float], best: float) -> str:
        """What to change first; empty where nothing stands out."""
        groups = self._probed
        ended = sum(len(group.rewards) + group.num_failed for group in groups)
        failed = sum(group.num_failed for group in groups) / ended
        finished = sum(len(group.rewards) for group in groups)
        truncated = sum(group.num_truncated for group in groups) / finished
        if failed >= _MANY:
            return f"{failed:.0%} of the episodes fail: see the first lines of notices.log"
        if truncated >= _MANY:
            return (
                f"{truncated:.0%} of the replies are cut off: raise sampling.max_completion_tokens"
            )
        if best < _HARD:
            return "too hard: easier tasks, a larger group_size, or `gradus sft` first"
        if len(flat) < _MANY * len(groups):
            return ""
        highest = max(max(group.rewards) for group in groups)
        at_best = sum(are_equal([value, highest]) for value in flat)
        if at_best > len(groups) / 2 and highest < 1.0 and not are_equal([highest, 1.0]):
            return "nothing told these replies apart: a finer reward, or other tasks"
        if at_best > len(groups) / 2:
            return "too easy: take harder tasks"
        return 'play tasks of medium difficulty: curriculum.type = "difficulty"'
