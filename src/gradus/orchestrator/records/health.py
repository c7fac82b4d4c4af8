"""Alarms: numbers that show that a run goes wrong although nothing fails.

Each alarm measures one number from the records of the steps, per source or of the whole run, and
is on from the step at which the number crosses its threshold until it is well back. A number that
is missing or not finite in a record says nothing: the alarm stays as it is. Everything depends on
the records alone: a resumed run reads those that it has, and its alarms stand as before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gradus.config import AlarmConfig
from gradus.errors import AlarmedError
from gradus.orchestrator.records.numbers import mean
from gradus.run.records import Record
from gradus.run.settings import ALARM_THRESHOLDS

Numbers = Mapping[str, float]
Reader = Callable[[Numbers, str], float | None]
"""One step's number from its record; the second argument is `episode/<source>`, or empty."""

BEGINNING_STEPS = 10
"""The first steps with a number: what a drift is measured against."""
RELEASE = 0.8
"""An alarm is over when its number is this far on the good side of the threshold, as a factor."""
MAX_PARTS = 32
"""Parts of a source's reward that are watched, the first by name."""
PART_FALL = 0.25
"""Share of its mean at the beginning by which another part must have fallen, so that the part that
makes the differences is worth an alarm: alone, it may just be the goal."""
LEAST_FALL = 0.02
"""The same as a share of all parts together: a part this small is noise."""
_TINY = 1e-9
_LONG_ABSENT = 10
"""Steps after which a metric that never came is told of."""


class Gauge(Protocol):
    """Turns the records of one source into the number that an alarm compares."""

    said: str
    """What a person wants to know beside the number: which part, from what to what."""

    def add(self, record: Numbers, prefix: str) -> float | None:
        """The number after this record; None until there is one."""


class Level:
    """The mean of the last steps, once there are enough: the window is full, or at least `least`.

    >>> gauge = Level(lambda record, prefix: record.get("x"), window=2)
    >>> [gauge.add({"x": x}, "") for x in (1.0, 2.0, 4.0)]
    [None, 1.5, 3.0]
    """

    said = ""

    def __init__(self, read: Reader, *, window: int, least: int | None = None) -> None:
        self._read = read
        self._least = window if least is None else least
        self._last: deque[float] = deque(maxlen=window)

    def add(self, record: Numbers, prefix: str) -> float | None:
        """The mean of the window."""
        value = self._read(record, prefix)
        if value is not None and math.isfinite(value):
            self._last.append(value)
        return mean(self._last) if len(self._last) >= self._least else None


class MostOf(Level):
    """The same of a share that has reasons; says which of them is the most frequent."""

    def __init__(self, read: Reader, reasons: str, *, window: int) -> None:
        """Names of their shares begin with `reasons`, in which {} is the source."""
        super().__init__(read, window=window)
        self.said = ""
        self._reasons = reasons

    def add(self, record: Numbers, prefix: str) -> float | None:
        head = self._reasons.format(prefix.removeprefix("episode/"))
        shares = {
            name.removeprefix(head).removesuffix("/share"): it
            for name, it in record.items()
            if name.startswith(head) and name.endswith("/share") and name != f"{head}share"
        }
        if shares:
            self.said = f"most often {max(shares, key=lambda reason: shares[reason])}"
        return super().add(record, prefix)


class Drift:
    """The mean of the last steps over the mean of the first ones; absent when that is 0.

    >>> gauge = Drift(lambda record, prefix: record.get("x"), window=1)
    >>> [gauge.add({"x": x}, "") for x in [2.0] * BEGINNING_STEPS + [3.0]][-2:]
    [None, 1.5]
    """

    def __init__(self, read: Reader, *, window: int, is_two_sided: bool = False) -> None:
        """`is_two_sided`: a third counts as three times."""
        self.said = ""
        self._read = read
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=window)
        self._is_two_sided = is_two_sided

    def add(self, record: Numbers, prefix: str) -> float | None:
        """The ratio, from a full window after the beginning on."""
        value = self._read(record, prefix)
        if value is not None and math.isfinite(value):
            chosen = self._first if len(self._first) < BEGINNING_STEPS else self._last
            chosen.append(value)
        if len(self._last) < (self._last.maxlen or 0):
            return None
        first = mean(self._first)
        if first <= _TINY:
            return None
        ratio = mean(self._last) / first
        self.said = f"from {first:.3g} to {mean(self._last):.3g}"
        return max(ratio, 1 / max(ratio, 1e-3)) if self._is_two_sided else ratio


class RewardDrop:
    """How far a source's mean reward is below its best, as a share of it; nothing before the best
    is above 0."""

    def __init__(self, *, window: int) -> None:
        self.said = ""
        self._level = Level(named("reward/mean"), window=window)
        self._best = -math.inf

    def add(self, record: Numbers, prefix: str) -> float | None:
        """0 at the best, 1 where nothing is earned any more, from a full window on."""
        value = self._level.add(record, prefix)
        if value is None:
            return None
        self._best = max(self._best, value)
        self.said = f"from {self._best:.3g} to {value:.3g}"
        return None if self._best <= _TINY else (self._best - value) / self._best


class DominantPart:
    """The largest share that one part of the reward has in its variance, while another part falls.

    0 while none falls: one part may well make all differences, because it is the goal, or because
    the others are learned.
    """

    def __init__(self, *, window: int) -> None:
        self.said = ""
        self._window = window
        self._first: dict[str, list[float]] = {}
        self._last: dict[str, deque[float]] = {}
        self._shares: dict[str, deque[float]] = {}

    def add(self, record: Numbers, prefix: str) -> float | None:
        """The share of the dominant part; None until two parts have a beginning and a window."""
        head = f"{prefix}/reward/"
        for name in sorted(name for name in record if name.startswith(head)):
            part, _, kind = name.removeprefix(head).rpartition("/")
            if part and math.isfinite(record[name]):
                self._note(part, kind, record[name])
        shares = {p: mean(s) for p, s in self._shares.items() if len(s) == self._window}
        if len(shares) < 2:
            return None
        dominant = max(shares, key=lambda part: (shares[part], part))
        self.said = f"part {dominant!r}"
        return shares[dominant] if self._falls(set(shares) - {dominant}) else 0.0

    def _note(self, part: str, kind: str, value: float) -> None:
        if kind == "variance_share" and (part in self._shares or len(self._shares) < MAX_PARTS):
            self._shares.setdefault(part, deque(maxlen=self._window)).append(value)
        if kind == "mean" and (part in self._first or len(self._first) < MAX_PARTS):
            first = self._first.setdefault(part, [])
            last = self._last.setdefault(part, deque(maxlen=self._window))
            (first if len(first) < BEGINNING_STEPS else last).append(value)

    def _falls(self, parts: Iterable[str]) -> bool:
        together = sum(abs(mean(first)) for first in self._first.values())
        for part in parts:
            if len(self._last.get(part, ())) < self._window:
                continue
            before = mean(self._first[part])
            fall = before - mean(self._last[part])
            if fall >= max(PART_FALL * abs(before), LEAST_FALL * together, _TINY):
                return True
        return False


@dataclass(frozen=True)
class Alarm:
    """What an alarm measures, and what to do when it is on."""

    name: str
    """Its key in `ALARM_THRESHOLDS`, or what a user's is called."""
    measures: str
    """Its number in words."""
    advice: str
    """What to do, in one sentence."""
    gauge: Callable[[], Gauge]
    is_per_source: bool = True
    is_on_below: bool = False
    """Whether a small number is the bad one."""
    action: Literal["warn", "checkpoint", "stop"] = "warn"
    """What follows when it begins."""

    def is_on(self, value: float, threshold: float, *, was_on: bool) -> bool:
        """Whether the number is beyond the threshold, or not yet well back."""
        was_on = was_on and threshold > 0  # A fifth of what is 0 or less is no distance.
        if self.is_on_below:
            return value <= (threshold / RELEASE if was_on else threshold)
        return value >= (threshold * RELEASE if was_on else threshold)


def named(name: str) -> Reader:
    """Reads `<prefix>/<name>`."""
    return lambda record, prefix: record.get(f"{prefix}/{name}" if prefix else name)


def own_alarm(config: AlarmConfig) -> tuple[Alarm, float]:
    """What a user declared, with its threshold."""
    metric = config.metric
    threshold = config.below if config.above is None else config.above
    assert threshold is not None, "the config was checked"
    alarm = Alarm(
        config.name,
        f"{metric}, mean of {BEGINNING_STEPS} steps",
        _ACTED[config.action],
        lambda: Level(lambda record, _: record.get(metric), window=BEGINNING_STEPS),
        is_per_source=False,
        is_on_below=config.above is None,
        action=config.action,
    )
    return alarm, threshold


_ACTED = {
    "warn": "Declared in orchestrator.alarm.",
    "checkpoint": "A checkpoint follows this step.",
    "stop": "The run saves what it has and ends; --resume continues it.",
}


def echo_tokens(record: Numbers, prefix: str) -> float | None:
    """Tokens of a group that `echo` learns; numbers of groups have a prefix of their own."""
    return record.get(f"group/{prefix.removeprefix('episode/')}/echo_tokens/mean")


def unreadable_share(record: Numbers, prefix: str) -> float | None:
    """Replies per turn that could not be read, by whichever name the environment counts them."""
    turns = record.get(f"{prefix}/turns/mean")
    own_turns = record.get(f"{prefix}/metric/turns/mean")
    found = (
        record.get(f"{prefix}/quarantined/share"),
        _ratio(record.get(f"{prefix}/metric/parse_errors/mean"), own_turns),
        _ratio(record.get(f"{prefix}/metric/unreadable/mean"), turns),
        _ratio(record.get(f"{prefix}/metric/unreadable_turns/mean"), turns),
    )
    known = [share for share in found if share is not None and math.isfinite(share)]
    return max(known) if known else None


ALARMS: tuple[Alarm, ...] = (
    Alarm(
        "reward_part",
        "largest share of one part of the reward in its variance inside groups, mean of 10 steps; "
        "0 while no other part has fallen by a quarter since the first 10 steps",
        "Read episodes with a high reward: if they earn the part and miss the goal, lower its "
        "weight or make it count only where the goal is reached.",
        lambda: DominantPart(window=10),
    ),
    Alarm(
        "length_drift",
        "sampled tokens per episode, mean of 10 steps against the first 10 steps, as a factor "
        "in either direction",
        "Read the longest and shortest episodes: if length is not what the task asks for, look "
        "for a reward that pays for it, and at `truncated`.",
        lambda: Drift(named("length_tokens/mean"), window=10, is_two_sided=True),
    ),
    Alarm(
        "entropy_collapse",
        "entropy per token, mean of 10 steps over that of the first 10 steps",
        "Lower the learning rate, sample at temperature 1, or give harder tasks; a policy "
        "without entropy explores nothing.",
        lambda: Drift(named("loss/entropy/mean"), window=10),
        is_per_source=False,
        is_on_below=True,
    ),
    Alarm(
        "judge_flips",
        "share of judgements that change when the sides stand in the other order, mean of 20 steps "
        "that measured it",
        "Do not trust the reward: take a stronger judge, or ask it for reasons before its verdict.",
        lambda: Level(named("metric/episode/judge_flipped/mean"), window=20),
    ),
    Alarm(
        "unreadable",
        "share of the model's turns that the environment could not read or quarantined, mean of "
        "20 steps",
        "Read such replies in the episodes: show the format in the prompt, or warm the model up "
        "on it; quarantined turns do not train.",
        lambda: Level(unreadable_share, window=20),
    ),
    Alarm(
        "mismatch_kl",
        "KL between the engine's and the trainer's probabilities of the same tokens, nats per "
        "token, mean of 10 steps",
        "Lower `max_lag` or the learning rate; if it stays with `max_lag = 0`, engine and trainer "
        "compute different models: compare them in float32.",
        lambda: Level(named("loss/mismatch_kl/mean"), window=10),
        is_per_source=False,
    ),
    Alarm(
        "flat_groups",
        "share of the episodes in groups with equal rewards, mean of 20 steps",
        "Give tasks of another difficulty, or larger groups: no group algorithm learns from equal "
        "rewards.",
        lambda: Level(named("flat/share"), window=20),
    ),
    Alarm(
        "failing_episodes",
        "share of the episodes that end with an error and train nothing, mean of 10 steps",
        "Read the first failure of each kind in `notices.log` and the environment's log: what "
        "fails is missing from training, and mostly it is the same kind of task.",
        lambda: MostOf(named("error/share"), "episode/{}/error/", window=10),
    ),
    Alarm(
        "truncated",
        "share of the episodes that a limit cut short, mean of 20 steps",
        "Raise `sampling.max_completion_tokens` or `model.max_length_tokens`, or reward shorter "
        "replies.",
        lambda: Level(named("truncated/share"), window=20),
    ),
    Alarm(
        "reward_drop",
        "how far the mean reward of 10 steps fell from its best, as a share of that best",
        "Resume from the checkpoint before it with a third of the learning rate; read an episode "
        "of then and one of now.",
        lambda: RewardDrop(window=10),
    ),
    Alarm(
        "gradient_jump",
        "norm of the gradient before clipping, mean of 3 steps over that of the first 10 steps",
        "Read the episodes of these steps: one odd batch passes; if it stays, lower the learning "
        "rate.",
        lambda: Drift(named("optimizer/grad_norm"), window=3),
        is_per_source=False,
    ),
    Alarm(
        "dropped_episodes",
        "share of the episodes that ended well and train nothing, mean of 10 steps",
        "`sample/dropped/...` names why: filters that take too much, or episodes that end too old.",
        lambda: MostOf(named("dropped/share"), "sample/{}/dropped/", window=10),
    ),
    Alarm(
        "large_ratios",
        "95th percentile of the ratio of policy to sampling probability of a token, mean of 10 "
        "steps",
        "Lower `max_lag` or the learning rate; `gradus lab mismatch RUN` says whether it is "
        "staleness.",
        lambda: Level(named("loss/ratio/p95"), window=10),
        is_per_source=False,
    ),
    Alarm(
        "slow_tasks",
        "1 - share trained of the slowest quarter of tasks / share trained of all, over the last "
        "128 groups",
        "Raise `orchestrator.max_staleness`, lower `max_lag`, or shorten the episodes: slow tasks "
        "are started and rarely trained.",
        lambda: Level(named("slow_bias"), window=1),
    ),
    Alarm(
        "echo_tokens",
        "observed tokens of a group that `echo` learns, mean of the last 10 steps, from the first "
        "step on",
        "Compare `algo.roles`, `algo.tool_names` and `algo.filter` with the messages in the "
        "episodes: none that follows a sampled turn is chosen, or, with "
        '`normalize = "ratio"`, no token may train by rl.',
        lambda: Level(echo_tokens, window=10, least=1),
        is_on_below=True,
    ),
)
"""Every alarm, in the order of `ALARM_THRESHOLDS`."""


@dataclass
class _Watched:
    """One alarm of one source."""

    alarm: Alarm
    threshold: float
    source: str | None
    gauge: Gauge
    value: float | None = None
    is_on: bool = False
    metric_of_user: str = ""
    num_absent: int = 0
    """Records before the first with that metric; -1 once one came."""

    @property
    def metric(self) -> str:
        source = "" if self.source is None else f"{self.source}/"
        return f"alarm/{source}{self.alarm.name}"

    @property
    def title(self) -> str:
        of_source = "" if self.source is None else f" of source {self.source!r}"
        return f"alarm {self.alarm.name}{of_source}"


class Alarms:
    """Owns every alarm of a run.

    >>> alarms = Alarms(sources=["words"], tell=print)
    >>> sick = [alarms.add({"loss/mismatch_kl/mean": 0.5}, step=step) for step in range(10)][-1]
    ... # doctest: +ELLIPSIS
    alarm mismatch_kl at step 10: 0.5, threshold 0.1 (KL between ...
    >>> sick
    {'alarm/mismatch_kl': 1.0, 'alarm/mismatch_kl/value': 0.5}
    """

    def __init__(
        self,
        *,
        sources: Sequence[str],
        tell: Callable[[str], None],
        quiet: Collection[str] = (),
        own: Sequence[AlarmConfig] = (),
        save: Callable[[], None] = lambda: None,
    ) -> None:
        """`tell` shows a line to the user; `quiet` are built-in ones that measure nothing; `own`
        are the user's, for which `save` asks for a checkpoint."""
        self.end: AlarmedError | None = None
        """The alarm that ends the run, once one does."""
        self._tell = tell
        self._save = save
        self._own: list[_Watched] = []
        for config in own:
            mine, limit = own_alarm(config)
            watched = _Watched(mine, limit, None, mine.gauge(), metric_of_user=config.metric)
            self._own.append(watched)
        self._watched: list[_Watched] = []
        for alarm in ALARMS:
            if alarm.name in quiet:
                continue
            threshold = ALARM_THRESHOLDS[alarm.name]
            for source in sources if alarm.is_per_source else [None]:
                self._watched.append(_Watched(alarm, threshold, source, alarm.gauge()))

    def add(self, record: Numbers, *, step: int) -> dict[str, float]:
        """The alarms after a step, as metrics; tells when one begins and when it is over."""
        found: dict[str, float] = {}
        # The user's may look at what the others found.
        for some in (self._watched, self._own):
            for watched, line in _changes(some, {**record, **found}, step):
                self._tell(line)
                if watched.is_on:
                    self._act(watched.alarm, line)
            found |= _numbers_of(some)
        self._tell_of_absent({**record, **found})
        return found

    def _tell_of_absent(self, record: Numbers) -> None:
        """Once for a metric that never came: its name is probably misspelled."""
        for watched in self._own:
            if watched.metric_of_user in record:
                watched.num_absent = -1
            if watched.num_absent >= 0:
                watched.num_absent += 1
            if watched.num_absent == _LONG_ABSENT:
                self._tell(
                    f"{watched.title}: no record of the first {_LONG_ABSENT} steps has "
                    f"{watched.metric_of_user!r}; docs/metrics.md lists all names"
                )

    def _act(self, alarm: Alarm, line: str) -> None:
        if alarm.action == "checkpoint":
            self._save()
        if alarm.action == "stop" and self.end is None:
            self.end = AlarmedError(line)

    def catch_up(self, records: Iterable[Record], *, ended: int = -1) -> None:
        """Stand where the records of a run led that is resumed, without telling it again.

        `ended` is the step after which the run last ended: a stop that was asked for later was
        not carried out, and is.
        """
        for record in records:
            if record.is_evaluation:
                continue
            list(_changes(self._watched, record.numbers, record.step))
            numbers = {**record.numbers, **_numbers_of(self._watched)}
            for watched, line in _changes(self._own, numbers, record.step):
                if watched.is_on and watched.alarm.action == "stop" and record.step > ended:
                    self.end = self.end or AlarmedError(line)


def _numbers_of(some: Iterable[_Watched]) -> dict[str, float]:
    """What stands of them in a record."""
    found: dict[str, float] = {}
    for watched in some:
        if watched.value is not None:
            found[watched.metric] = float(watched.is_on)
            found[f"{watched.metric}/value"] = watched.value
    return found


def _changes(
    some: Iterable[_Watched], record: Numbers, step: int
) -> Iterator[tuple[_Watched, str]]:
    """A line about each alarm that begins or ends with this record."""
    for watched in some:
        prefix = "" if watched.source is None else f"episode/{watched.source}"
        value = watched.gauge.add(record, prefix)
        # The sum of huge numbers is not finite although each of them is.
        if value is None or not math.isfinite(value):
            continue
        alarm, was_on = watched.alarm, watched.is_on
        watched.value = value
        watched.is_on = alarm.is_on(value, watched.threshold, was_on=was_on)
        # The terminal counts steps from 1.
        place = f"{watched.title} at step {step + 1}"
        if watched.is_on and not was_on:
            said = f", {watched.gauge.said}" if watched.gauge.said else ""
            limit = f"{value:.3g}{said}, threshold {watched.threshold:g}"
            yield watched, f"{place}: {limit} ({alarm.measures}). {alarm.advice}"
        if was_on and not watched.is_on:
            yield watched, f"{place} is over: {value:.3g}"


def _ratio(count: float | None, turns: float | None) -> float | None:
    return None if count is None or not turns else count / turns
