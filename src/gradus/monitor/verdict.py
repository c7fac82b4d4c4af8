"""Whether a run learned: the verdict on its reward, from the records of its steps (pure).

The first and the last third of the steps that have a number are compared, at least ten each, with
a 95 % interval over blocks of steps (`statistics.py`). It is of this run alone and says nothing of
another seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean
from typing import Any

from gradus.monitor.catalogue import describe_metric
from gradus.monitor.console import first_and_last
from gradus.monitor.statistics import MIN_STEPS, Difference, over_steps
from gradus.run.records import Record

_REWARD = "episode/reward/mean"
_LOSS = "loss/total/mean"
_BEFORE, _HELD_OUT = "validation/loss/before", "validation/loss/mean"
_OF_SOURCE = "episode/source/reward/mean"
_OF_PART = "episode/source/reward/part/mean"
_OF_AGENT = "episode/source/agent/agent/reward/mean"
"""Families of metrics."""
_GAMED = "reward_part"
"""The alarm of one part of a reward that makes all the differences while another falls."""
_MAX_NAMES = 4
"""Parts that are told: those that changed most."""
_MANY = 0.3
"""Share of the episodes that is enough to explain a reward that does not rise."""
_CEILING = 0.95
"""Share of the highest reward from which on there is little left to learn."""
_ENTROPY_FACTOR = 1.5
_WORSE = 1.02
"""Factor over its best by which a validation loss has clearly risen."""
_SKIPPED = "sample/skipped/share"
_MANY_SKIPPED = 0.1
_MANY_EPOCHS = 5
_NO_LOSS = 0.02
"""Nats per learned token, as of text that is known by heart."""
_LARGEST = 1e100
"""Squares of larger numbers are no numbers."""

Steps = Sequence[Mapping[str, float]]


class Word(StrEnum):
    """The verdict in one word."""

    GAMED = "gamed"
    RISING = "rising"
    FLAT = "flat"
    FALLING = "falling"
    MIXED = "mixed"
    SHORT = "too short to tell"
    LEARNED = "learned"
    WORSE = "worse"
    UNTESTED = "not measured"
    OVERFITTED = "overfitted"
    UNSTEADY = "unsteady"
    MEMORISED = "memorised"


@dataclass(frozen=True)
class Trend:
    """How one number changed from the first steps to the last."""

    metric: str
    name: str
    """What it is called in a line."""
    change: Difference
    num_steps: int
    """Steps at each end that were compared."""

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
    """One word, the numbers that it rests on, and what to do next."""

    word: Word
    trends: tuple[Trend, ...] = ()
    """Of the reward, of each source's where there are several, or of each agent that trains where
    several do; then of parts of the reward."""
    alarms: tuple[str, ...] = ()
    """Alarms that are on at the end."""
    advice: str = ""
    reason: str = ""
    """Why there are no numbers."""

    def __str__(self) -> str:
        alarms = f"; alarms on: {', '.join(self.alarms)}" if self.alarms else ""
        if not self.trends:
            return f"{self.word}{f': {self.reason}' if self.reason else ''}{alarms}"
        told = ", ".join(map(str, self.trends))
        steps = self.trends[0].num_steps
        ends = f"last {steps} steps against the first, with 95 % intervals"
        return f"{self.word}: {told}, {ends}{alarms}"

    def as_json(self) -> dict[str, Any]:
        """As it stands in `summary.json`."""
        changes = {
            trend.metric: {
                "value": trend.change.value,
                "interval": [trend.change.low, trend.change.high],
                "steps_compared": trend.num_steps,
            }
            for trend in self.trends
        }
        return {
            "word": str(self.word),
            "changes": changes,
            "alarms": list(self.alarms),
            "advice": self.advice,
        }


def verdict_on(kind: str, outcome: str, records: Sequence[Record]) -> LearningVerdict | None:
    """The verdict on a run of a kind, from its steps or a sample of them; None where there is none.

    The outcome of a run that solved its tasks says it already.
    """
    steps = [record.numbers for record in records]
    if kind == "rl" and outcome != "solved":
        return judge_rewards(steps)
    places = [record.step + 1 for record in records]
    return judge_supervised(steps, places) if kind == "sft" else None


def judge_rewards(steps: Steps) -> LearningVerdict | None:
    """The verdict on an RL run, from the metrics of its steps in their order; None without rewards.

    The reward decides. Where several sources or several agents train, all of theirs must have
    changed alike: their mean moves with how often each was played. `gamed` is a reward that rises
    while the alarm `reward_part` of its source is on.
    """
    rewards, parts = deciding_rewards(steps), _parts(steps)
    if not rewards:
        return None
    trends = [trend for metric, name in rewards.items() if (trend := _trend(steps, metric, name))]
    if not trends:
        few = f"{2 * MIN_STEPS} steps with a reward are needed to tell a trend from noise"
        return LearningVerdict(Word.SHORT, alarms=tuple(alarms_on(steps[-1])), reason=few)
    words = {trend.word for trend in trends}
    word = words.pop() if len(words) == 1 else Word.MIXED
    alarms = tuple(alarms_on(steps[-1]))
    gamed = {name.rpartition("/")[0] for name in alarms if name.rpartition("/")[2] == _GAMED}
    rising = [trend for trend in trends if trend.word is Word.RISING]
    if any(it.metric == _REWARD or it.metric.split("/")[1] in gamed for it in rising) and gamed:
        word = Word.GAMED
    shown = [it for metric, name in parts.items() if (it := _trend(steps, metric, name))]
    shown.sort(key=lambda trend: -abs(trend.change.value))
    told = (*trends, *shown[:_MAX_NAMES])
    return LearningVerdict(word, told, alarms, _advice(word, steps))


def judge_supervised(steps: Steps, places: Sequence[int] = ()) -> LearningVerdict | None:
    """The verdict on a supervised run, by its loss on what it never learned; None without steps.

    `places` counts the steps from 1, where they are a sample. Rows that were left out are told from
    a tenth on.
    """
    found = _by_losses(steps, places)
    share = steps[-1].get(_SKIPPED, 0.0) if steps else 0.0
    if found is None or share < _MANY_SKIPPED:
        return found
    left_out = f"{share:.0%} of the rows were left out, too long or without anything to learn"
    return replace(found, reason=f"{found.reason}; {left_out}")


def _by_losses(steps: Steps, places: Sequence[int]) -> LearningVerdict | None:
    losses = first_and_last([metrics[_LOSS] for metrics in steps if _LOSS in metrics])
    if losses is None:
        return None
    versions = {0: steps[0][_BEFORE]} if _BEFORE in steps[0] else {}
    numbered = zip(places or range(1, len(steps) + 1), steps, strict=True)
    versions |= {step: it[_HELD_OUT] for step, it in numbered if _HELD_OUT in it}
    if not versions:
        return _without_validation(steps, losses)
    held_out = list(versions.values())
    first, last = held_out[0], held_out[-1]
    since = "before the first step" if 0 in versions else "when first measured"
    told = f"validation loss {first:.3f} {since}, {last:.3f} at the end"
    best = min(versions, key=lambda step: (math.isnan(versions[step]), versions[step]))
    slower = "divide `optimizer.lr` by 3"
    if not last <= max(_WORSE * versions[best], _NO_LOSS):
        epochs = steps[-1].get("batch/epoch", 1.0)
        if not losses[1] < losses[0] or (epochs < 1 and not best):
            return LearningVerdict(Word.WORSE, reason=told, advice=slower)
        rose = f"the validation loss was {versions[best]:.3f} after step {best} and is {last:.3f}"
        if epochs < 1:
            reason = f"{rose}, though no row was learned twice ({epochs:.2f} epochs)"
            calmer = f'{slower}, or train for more steps with `optimizer.schedule = "cosine"`'
            return LearningVerdict(Word.UNSTEADY, reason=reason, advice=calmer)
        fewer = f"train for {best} steps, or with more data" if best else f"{slower}, or add data"
        reason = f"{rose}, while the training loss fell from {losses[0]:.3f} to {losses[1]:.3f}"
        return LearningVerdict(Word.OVERFITTED, reason=reason, advice=fewer)
    if not first > _WORSE * last:
        more = "multiply `optimizer.lr` by 3, or train for more steps"
        return LearningVerdict(Word.FLAT, reason=told, advice=more if last > _NO_LOSS else "")
    is_falling = len(held_out) > 2 and held_out[-2] > _WORSE * last > _NO_LOSS
    more = "it was still falling: more steps may teach more" if is_falling else ""
    return LearningVerdict(Word.LEARNED, reason=told, advice=more)


def _without_validation(steps: Steps, losses: tuple[float, float]) -> LearningVerdict:
    """What is left to say of a run that held nothing out."""
    epochs, last = steps[-1].get("batch/epoch", 0.0), losses[1]
    if epochs >= _MANY_EPOCHS and last <= _NO_LOSS:
        return LearningVerdict(
            Word.MEMORISED,
            reason=f"the same conversations were read {epochs:.0f} times, and none was held out",
            advice="set `validation.path`, or train for fewer steps",
        )
    told = f"the training loss went from {losses[0]:.3f} to {last:.3f}, and nothing was held out"
    return LearningVerdict(Word.UNTESTED, reason=told, advice="set `validation.path`")


def deciding_rewards(steps: Steps) -> dict[str, str]:
    """The metrics that decide → their names in a line."""
    found = _of_families(steps, _OF_SOURCE, _OF_AGENT)
    sources = {name: labels["source"] for name, labels in found if "agent" not in labels}
    if len(sources) > 1:
        return sources
    if any(_REWARD in metrics for metrics in steps):
        return {_REWARD: "reward"}
    agents = {}
    for name, labels in found:
        trains = name.removesuffix("reward/mean") + "trained/share"
        if "agent" in labels and any(metrics.get(trains) for metrics in steps):
            agents[name] = labels
    names = [labels["agent"] for labels in agents.values()]
    is_plain = len(set(names)) == len(names)
    return {
        name: labels["agent"] if is_plain else f"{labels['source']}/{labels['agent']}"
        for name, labels in agents.items()
    }


def _parts(steps: Steps) -> dict[str, str]:
    """Parts of the reward → their names in a line; none where the only part is the reward."""
    found = _of_families(steps, _OF_PART)
    names = [labels["part"] for _, labels in found]
    is_plain = len(set(names)) == len(names) and "reward" not in names
    if len(found) < 2:
        return {}
    return {
        name: labels["part"] if is_plain else f"{labels['source']}/{labels['part']}"
        for name, labels in found
    }


def _of_families(steps: Steps, *families: str) -> list[tuple[str, Mapping[str, str]]]:
    """Metrics of the families, with their labels."""
    names = dict.fromkeys(name for metrics in steps for name in metrics if "/reward/" in name)
    found = ((name, describe_metric(name)) for name in names)
    return [(name, about.labels) for name, about in found if about and about.family in families]


def alarm_states(metrics: Mapping[str, float]) -> dict[str, bool]:
    """Alarm, below its source → whether it was on in a step.

    >>> alarm_states({"alarm/words/truncated": 1.0, "alarm/words/truncated/value": 0.5})
    {'words/truncated': True}
    """
    return {
        name.removeprefix("alarm/"): value > 0
        for name, value in metrics.items()
        if name.startswith("alarm/") and not name.endswith("/value")
    }


def alarms_on(metrics: Mapping[str, float]) -> list[str]:
    return [name for name, is_on in alarm_states(metrics).items() if is_on]


def _ends(steps: Steps, metric: str) -> tuple[list[float], list[float]]:
    """The first and the last third of a metric's numbers; empty where there are too few."""
    values = [m[metric] for m in steps if metric in m and abs(m[metric]) < _LARGEST]
    if len(values) < 2 * MIN_STEPS:
        return [], []
    size = max(MIN_STEPS, len(values) // 3)
    return values[:size], values[-size:]


def _trend(steps: Steps, metric: str, name: str) -> Trend | None:
    before, after = _ends(steps, metric)
    return Trend(metric, name, over_steps(before, after), len(before)) if before else None


def _advice(word: Word, steps: Steps) -> str:
    """The next thing to do about a reward that does not rise; empty for one that does."""
    if word is Word.GAMED:
        return (
            "read episodes with a high reward (`gradus view`): lower the weight of the part that "
            "they earn without reaching the goal"
        )
    if word not in (Word.FLAT, Word.FALLING):
        return ""
    shares = (f"episode/{name}/share" for name in ("error", "truncated", "flat"))
    failed, truncated, flat = (fmean(_ends(steps, share)[1] or [0.0]) for share in shares)
    entropies = _ends(steps, "loss/entropy/mean")
    entropy_before, entropy = (fmean(values or [0.0]) for values in entropies)
    highest = max((m["episode/reward/p95"] for m in steps if "episode/reward/p95" in m), default=0)
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
    if word is Word.FLAT and fmean(_ends(steps, _REWARD)[1] or [0.0]) >= _CEILING * highest > 0:
        return "nearly all is earned that ever was: take harder tasks, or stop here"
    if flat >= _MANY:
        return (
            f"{flat:.0%} of the episodes earn what all of their group earn, and teach nothing: "
            "take easier or harder tasks, or a larger `group_size`"
        )
    if word is Word.FALLING:
        return "divide `trainer.optimizer.lr` by 3"
    return "multiply `trainer.optimizer.lr` by 3, or train for more steps"
