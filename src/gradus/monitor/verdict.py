"""Whether a run learned: the verdict on its reward, from the records of its steps (pure).

The first and the last third of the steps are compared, at least ten each, with a 95 % interval
over blocks of steps (`statistics.py`). It is of this run alone and says nothing of another seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any

from gradus.monitor.catalogue import describe_metric
from gradus.monitor.statistics import MIN_STEPS, Difference, over_steps

_REWARD = "episode/reward/mean"
_NAMED_BY = {
    "episode/source/reward/part/mean": "part",
    "episode/source/agent/agent/reward/mean": "agent",
}
"""Family of a metric → the label that its trend is named by."""
_MAX_NAMES = 4
"""Parts or agents that are told: those that changed most."""
_MANY = 0.3
"""Share of the episodes that is enough to explain a reward that does not rise."""
_ENTROPY_FACTOR = 1.5
_WORSE = 1.02
"""Factor over its best by which a validation loss has clearly risen."""
_MANY_EPOCHS = 5
_NO_LOSS = 0.02
"""Nats per learned token, as of text that is known by heart."""
_LARGEST = 1e100
"""Squares of larger numbers are not numbers."""


class Word(StrEnum):
    """The verdict in one word."""

    GAMED = "gamed"
    RISING = "rising"
    FLAT = "flat"
    FALLING = "falling"
    MIXED = "mixed"
    SHORT = "too short to tell"
    OVERFITTED = "overfitted"
    MEMORISED = "memorised"


@dataclass(frozen=True)
class Trend:
    """How one number changed from the first steps to the last."""

    name: str
    change: Difference

    @property
    def word(self) -> Word:
        if not self.change.is_clear:
            return Word.FLAT
        return Word.RISING if self.change.value > 0 else Word.FALLING

    def __str__(self) -> str:
        low, high = self.change.low, self.change.high
        return f"{self.name} {self.change.value:+.3f} ({low:+.3f} to {high:+.3f})"


@dataclass(frozen=True)
class LearningVerdict:
    """One word, the numbers behind it, and what to do next."""

    word: Word
    trends: tuple[Trend, ...] = ()
    """Of the reward and its parts; of each agent that trains, where several do."""
    num_steps: int = 0
    """Steps at each end that were compared."""
    alarms: tuple[str, ...] = ()
    """Alarms that are on at the end."""
    advice: str = ""
    reason: str = ""
    """Why there are no numbers."""

    def __str__(self) -> str:
        if not self.trends:
            return f"{self.word}: {self.reason}" if self.reason else str(self.word)
        told = ", ".join(map(str, self.trends))
        ends = f"last {self.num_steps} steps against the first, with 95 % intervals"
        alarms = f"; alarms on: {', '.join(self.alarms)}" if self.alarms else ""
        return f"{self.word}: {told}, {ends}{alarms}"

    def as_json(self) -> dict[str, Any]:
        """As it stands in `summary.json`."""
        changes = {
            trend.name: {
                "value": trend.change.value,
                "interval": [trend.change.low, trend.change.high],
            }
            for trend in self.trends
        }
        return {
            "word": str(self.word),
            "changes": changes,
            "steps_compared": self.num_steps,
            "alarms": list(self.alarms),
            "advice": self.advice,
        }


def verdict_on(
    kind: str, outcome: str, steps: Sequence[Mapping[str, float]]
) -> LearningVerdict | None:
    """The verdict on a run of a kind, from the metrics of its steps; None where there is none.

    The outcome of a run that solved its tasks says it already.
    """
    if kind == "rl" and outcome != "solved":
        return judge_rewards(steps)
    return judge_supervised(steps) if kind == "sft" else None


def judge_rewards(steps: Sequence[Mapping[str, float]]) -> LearningVerdict | None:
    """The verdict on an RL run, from the metrics of its steps in their order; None without rewards.

    The reward decides, and where several agents train, whether all of theirs changed alike.
    `gamed` is a reward that rises while the alarm `reward_part` is on: one part makes all the
    differences, and another has fallen.
    """
    titles = _titles(steps)
    if not titles:
        return None
    if len(steps) < 2 * MIN_STEPS:
        few = f"{2 * MIN_STEPS} steps are needed to tell a trend from noise"
        return LearningVerdict(Word.SHORT, reason=few)
    size = max(MIN_STEPS, len(steps) // 3)
    ends = _Ends(steps[:size], steps[-size:])
    changes = {name: ends.change(name) for name in titles}
    trends = [Trend(titles[name], change) for name, change in changes.items() if change]
    trends = [trend for trend in trends if trend.change.low is not None]
    if not trends:
        return None
    alarms = tuple(
        name.removeprefix("alarm/")
        for name, value in steps[-1].items()
        if name.startswith("alarm/") and not name.endswith("/value") and value
    )
    word = _word(trends, alarms)
    head = 1 if trends[0].name == "reward" else 0
    told = sorted(trends[head:], key=lambda trend: -abs(trend.change.value))[:_MAX_NAMES]
    return LearningVerdict(word, (*trends[:head], *told), size, alarms, _advice(word, ends))


def judge_supervised(steps: Sequence[Mapping[str, float]]) -> LearningVerdict | None:
    """The verdict on a supervised run: what its training loss hides; None where that is nothing."""
    held_out = [
        metrics["validation/loss/mean"] for metrics in steps if "validation/loss/mean" in metrics
    ]
    best = min(held_out, default=0.0)
    if held_out and held_out[-1] > _WORSE * best:
        return LearningVerdict(
            Word.OVERFITTED,
            reason=f"the validation loss was {best:.3f} at its best and is {held_out[-1]:.3f}",
            advice="train for fewer steps, or with more data",
        )
    losses = [metrics["loss/total/mean"] for metrics in steps if "loss/total/mean" in metrics]
    epochs = steps[-1].get("batch/epoch", 0.0) if steps else 0.0
    if not held_out and losses and epochs >= _MANY_EPOCHS and fmean(losses[-3:]) <= _NO_LOSS:
        return LearningVerdict(
            Word.MEMORISED,
            reason=f"the same conversations were read {epochs:.0f} times, and none was held out",
            advice="set `validation.path`, or train for fewer steps",
        )
    return None


def _word(trends: Sequence[Trend], alarms: Sequence[str]) -> Word:
    decide = trends[:1] if trends[0].name == "reward" else trends
    words = {trend.word for trend in decide}
    word = words.pop() if len(words) == 1 else Word.MIXED
    is_gamed = word is Word.RISING and any(name.endswith("reward_part") for name in alarms)
    return Word.GAMED if is_gamed else word


def _titles(steps: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Metrics that the verdict is on → their names in it; the reward of all comes first."""
    names = dict.fromkeys(name for metrics in steps for name in metrics)
    titles = {_REWARD: "reward"} if _REWARD in names else {}
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        about = describe_metric(name) if "/reward/" in name else None
        label = None if about is None else _NAMED_BY.get(about.family)
        if about is None or label != ("part" if titles else "agent"):
            continue
        source = about.labels["source"]
        trains = f"episode/{source}/agent/{about.labels.get('agent')}/trained/share"
        if label == "part" or any(metrics.get(trains) for metrics in steps):
            found[name] = source, about.labels[label]
    if titles and len(found) == 1:
        return titles  # The only part is the reward.
    is_plain = len({title for _, title in found.values()}) == len(found)
    return titles | {
        name: title if is_plain else f"{source}/{title}" for name, (source, title) in found.items()
    }


@dataclass(frozen=True)
class _Ends:
    """The first and the last steps."""

    first: Sequence[Mapping[str, float]]
    last: Sequence[Mapping[str, float]]

    def change(self, name: str) -> Difference | None:
        before, after = self._values(name)
        return over_steps(before, after) if before and after else None

    def means(self, name: str) -> tuple[float, float]:
        """Of the first and the last steps; 0 where the metric is missing."""
        before, after = self._values(name)
        return fmean(before or [0.0]), fmean(after or [0.0])

    def _values(self, name: str) -> tuple[list[float], list[float]]:
        before, after = (
            [metrics[name] for metrics in steps if abs(metrics.get(name, math.inf)) < _LARGEST]
            for steps in (self.first, self.last)
        )
        return before, after


def _advice(word: Word, ends: _Ends) -> str:
    """The next thing to do about a reward that does not rise; empty for one that does."""
    if word is Word.GAMED:
        return (
            "read episodes with a high reward (`gradus report`): lower the weight of the part that "
            "they earn without reaching the goal"
        )
    if word not in (Word.FLAT, Word.FALLING):
        return ""
    truncated, failed = (ends.means(f"episode/{name}/share")[1] for name in ("truncated", "error"))
    flat = ends.means("episode/flat/share")[1]
    entropy_before, entropy = ends.means("loss/entropy/mean")
    if failed >= _MANY:
        return f"{failed:.0%} of the episodes fail: see the first lines of notices.log"
    if truncated >= _MANY:
        return (
            f"{truncated:.0%} of the episodes are cut off: raise "
            "`orchestrator.train.sampling.max_completion_tokens` or ask for shorter replies"
        )
    if word is Word.FALLING and entropy >= _ENTROPY_FACTOR * entropy_before > 0:
        return (
            f"entropy went from {entropy_before:.2f} to {entropy:.2f}, as it does when "
            "`trainer.optimizer.lr` is too high: divide it by 3"
        )
    if flat >= _MANY:
        return (
            f"{flat:.0%} of the episodes earn what all of their group earn, and teach nothing: "
            "take easier or harder tasks, or a larger `group_size`"
        )
    if word is Word.FALLING:
        return "divide `trainer.optimizer.lr` by 3"
    return "multiply `trainer.optimizer.lr` by 3, or train for more steps"
