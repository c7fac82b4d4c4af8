"""The episodes of one group become credited, filtered samples; nothing is lost without a reason."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from verifiers.v1.episode import WireEpisode
from verifiers.v1.trace import WireTrace

from gradus.errors import CreditError
from gradus.orchestrator.algorithms.base import (
    Algorithm,
    CreditContext,
    forget_credit,
    keep_credit,
    num_sampled_tokens,
    settle_credit,
    trainable_traces,
)
from gradus.orchestrator.algorithms.rounding import are_equal
from gradus.orchestrator.failures import (
    ALGORITHM_FAILED,
    EpisodeFailed,
    ErrorPolicy,
    Failure,
    ask_policy,
    blaming,
    scored_within,
)
from gradus.orchestrator.groups.batcher import ERROR_PREFIX
from gradus.orchestrator.groups.filters import (
    ActiveFilter,
    FilterContext,
    Verdict,
    dropped_by,
    judge,
)
from gradus.orchestrator.groups.samples import SampleOrigin, build_samples
from gradus.orchestrator.groups.slots import EpisodeOutcome
from gradus.orchestrator.play.episode_check import cut_bytes, is_truncated
from gradus.orchestrator.play.task_socket import Task
from gradus.orchestrator.play.tasks import TaskPointer
from gradus.wire.sample import Sample
from gradus.wire.versions import VersionSpan

STAGES = ("boot", "setup", "agent", "finalize", "scoring")
"""Stages of an episode whose time verifiers measures, in their order."""
NO_TOKENS = "no_trainable_tokens"
"""Reason for a finished episode without a sample, e.g. cut before its first sampled token."""


@dataclass(frozen=True)
class EpisodeNumbers:
    """What is counted of the trainable traces of a finished episode."""

    rewards: tuple[float, ...]
    """One per trace."""
    length_tokens: int
    """Sampled tokens."""
    num_turns: int
    """Model turns."""
    is_truncated: bool
    """Whether a limit cut a trace short."""
    agents: tuple[str, ...]
    """Who played each trace."""
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By name, one per trace that has it: parts of the reward, metrics of the environment, and
    seconds of each stage."""


@dataclass(frozen=True)
class PlayedEpisode:
    """How one started episode ended: with an episode, a failure, or neither (cancelled)."""

    id: str
    group_id: str
    versions: VersionSpan
    episode: WireEpisode | None = None
    failure: Failure | None = None
    seconds: float = 0.0
    """From its start to its end, retries included."""

    @property
    def number(self) -> int:
        """Which episode of its group this is, in the order of their starts, from 0."""
        return int(self.id.rpartition(".")[2])

    @property
    def outcome(self) -> EpisodeOutcome:
        """Exactly one of the three."""
        if self.failure is not None:
            return EpisodeOutcome.FAILED
        return EpisodeOutcome.CANCELLED if self.episode is None else EpisodeOutcome.FINISHED

    @cached_property
    def numbers(self) -> EpisodeNumbers | None:
        """None unless it finished. Counted once, because verifiers walks every branch for it."""
        if self.episode is None or self.failure is not None:
            return None
        traces = trainable_traces([self.episode])
        return EpisodeNumbers(
            rewards=tuple(trace.reward for trace in traces),
            length_tokens=sum(map(num_sampled_tokens, traces)),
            num_turns=sum(trace.num_turns for trace in traces),
            is_truncated=any(is_truncated(trace) for trace in traces),
            agents=tuple(trace.agent.name for trace in traces),
            values=named_values(traces),
        )


@dataclass
class Group:
    """One task and its episodes, from the first start to the last record."""

    id: str
    pointer: TaskPointer
    task: Task
    played: list[PlayedEpisode] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    """Samples that may train."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Reason per id of a sample, or of an episode that gave none."""
    verdicts: dict[str, dict[str, Verdict]] = field(default_factory=dict)
    """Per id of a sample, what each filter said of it."""
    numbers: dict[str, float] = field(default_factory=dict)
    """What the algorithm recorded about this group."""
    failure: Failure | None = None
    """Why the whole group could not be scored."""
    failures: dict[str, Failure] = field(default_factory=dict)
    """Per id of a finished episode, why a plug-in made it train nothing."""

    @property
    def source(self) -> str:
        """Name of the source."""
        return self.pointer.source

    @property
    def finished(self) -> list[tuple[PlayedEpisode, WireEpisode]]:
        """The episodes that count for credit."""
        return [(p, p.episode) for p in self.played if p.episode is not None and p.failure is None]

    @property
    def credit_context(self) -> CreditContext:
        """What an algorithm may know of this group beside its finished episodes."""
        came_back = [(p.episode, p.failure) for p in self.played if p.episode is not None]
        failed = [episode for episode, failure in came_back if failure is not None]
        played = [episode for episode, _ in came_back]
        return CreditContext(self.source, self.task.key, failed, self.numbers, played)

    @property
    def reasons(self) -> Counter[str]:
        """How often each reason kept something of this group from training."""
        return Counter(self.dropped.values())


@dataclass(frozen=True)
class SourceGrader:
    """How the groups of one source are credited and filtered."""

    algorithm: Algorithm
    filters: Sequence[ActiveFilter]
    temperature: float
    max_length_tokens: int
    untrained_agents: Collection[str] = ()
    """Agents whose traces never train."""
    has_one_baseline: bool = False
    """Whether all traces of a group are compared, whoever they are of."""
    timeout_seconds: float = 900.0
    """For one call of the algorithm."""

    @property
    def awaits_groups(self) -> bool:
        """Whether groups are scored by `async def score_group`."""
        return inspect.iscoroutinefunction(self.algorithm.score_group)


def grade(group: Group, grading: SourceGrader) -> None:
    """Score a group by an algorithm that needs no wait, and fill its samples.

    The credit of one that is awaited lies on the episodes already: this is a replay.
    """
    _sort(group)
    if not grading.awaits_groups:
        with _scoring(group, grading):
            _refuse_awaitable(grading.algorithm.score_group(_finished(group), group.credit_context))
            _settle(group)
    fill(group, grading)


async def score_awaited(group: Group, grading: SourceGrader, errors: ErrorPolicy) -> None:
    """Let an algorithm with `async def score_group` score a group, again where the policy says so.

    Each time it finds the credit of `score_episode`, and nothing of its own. `group.failure` says
    why it could not.
    """
    _sort(group)
    algorithm, where, retry = grading.algorithm, _place(group), 0
    put_back, numbers = keep_credit(_finished(group)), dict(group.numbers)
    while True:
        group.failure = None
        with _scoring(group, grading):
            async with scored_within(grading.timeout_seconds, algorithm, where):
                scoring = algorithm.score_group(_finished(group), group.credit_context)
                if scoring is not None:
                    await scoring
            _settle(group)
        if group.failure is None:
            return
        try:
            wait = ask_policy(errors, group.failure, retry=retry, where=where)
        except EpisodeFailed as failed:
            group.failure = failed.failure
            return
        if wait is None:
            return
        await asyncio.sleep(wait)
        put_back()
        group.numbers.clear()
        group.numbers.update(numbers)
        retry += 1


def fill(group: Group, grading: SourceGrader) -> None:
    """Fill `samples` and `dropped` of a scored group."""
    for played in group.played:
        if played.failure is not None:
            group.dropped[played.id] = f"{ERROR_PREFIX}{played.failure.kind}"
    if group.failure is not None:
        fail(group, group.failure)
        return
    for played, episode in group.finished:
        try:
            _filter_samples(
                group, played, build_samples(episode, _origin(group, played, grading)), grading
            )
        except EpisodeFailed as failed:
            _drop_episode(group, played, failed.failure)


def fail(group: Group, failure: Failure) -> None:
    """The whole group trains nothing because a plug-in could not deal with it."""
    group.failure = group.failure or failure
    for played, episode in group.finished:
        forget_credit(episode)
        _drop_episode(group, played, failure)


def _filter_samples(
    group: Group, played: PlayedEpisode, samples: Sequence[Sample], grading: SourceGrader
) -> None:
    if not samples:
        group.dropped[played.id] = NO_TOKENS
    for sample in samples:
        context = _filter_context(group, played, sample)
        verdicts = group.verdicts[sample.id] = judge(grading.filters, sample, context)
        reason = dropped_by(verdicts)
        if reason is None:
            group.samples.append(sample)
        else:
            group.dropped[sample.id] = reason


def _filter_context(group: Group, played: PlayedEpisode, sample: Sample) -> FilterContext:
    assert played.episode is not None
    trace = played.episode.traces[int(sample.id.split("/")[1])]
    credit = group.credit_context
    return FilterContext(
        trace,
        is_truncated=is_truncated(trace),
        task_key=group.task.key,
        episodes=_finished(group),
        failed=credit.failed,
    )


def _drop_episode(group: Group, played: PlayedEpisode, failure: Failure) -> None:
    group.samples[:] = [s for s in group.samples if s.episode_id != played.id]
    group.dropped[played.id] = f"{ERROR_PREFIX}{failure.kind}"
    group.failures[played.id] = failure


def _sort(group: Group) -> None:
    """In the order of their starts: which episode ended first must not change the credit."""
    group.played.sort(key=lambda played: played.number)


def _finished(group: Group) -> list[WireEpisode]:
    return [episode for _, episode in group.finished]


def _place(group: Group) -> str:
    return f"source {group.source!r}, group {group.id}"


def _settle(group: Group) -> None:
    """CreditError that names the episode."""
    for played, episode in group.finished:
        try:
            settle_credit(episode)
        except CreditError as error:
            raise CreditError(f"episode {played.id}, {error}") from error


def _refuse_awaitable(result: object) -> None:
    if inspect.iscoroutine(result):
        result.close()
    if inspect.isawaitable(result):
        raise TypeError("score_group gives an awaitable; write it as `async def score_group`")


@contextmanager
def _scoring(group: Group, grading: SourceGrader) -> Iterator[None]:
    """What the algorithm does wrong is kept as the group's failure."""
    try:
        with blaming("algorithm", grading.algorithm, _place(group), failure=ALGORITHM_FAILED):
            yield
    except EpisodeFailed as failed:
        group.failure = failed.failure


def episode_rewards(group: Group) -> list[float]:
    """Per finished episode, the mean reward of its trainable traces."""
    finished = [played.numbers for played in group.played if played.numbers is not None]
    return [sum(numbers.rewards) / len(numbers.rewards) for numbers in finished]


def is_flat(group: Group) -> bool:
    """Whether its finished episodes, two or more, cannot be told apart by their rewards.

    Agents are compared each with itself: in a zero-sum game the mean of all is always 0.
    """
    rewards = [p.numbers.rewards for p in group.played if p.numbers is not None]
    if len(rewards) < 2 or len({len(of_traces) for of_traces in rewards}) > 1:
        return False
    return all(are_equal(of_agent) for of_agent in zip(*rewards, strict=True))


def untrained_episodes(group: Group) -> int:
    """How many finished episodes gave no sample that trains."""
    kept = {sample.episode_id for sample in group.samples if sample.id not in group.dropped}
    return sum(played.id not in kept for played, _ in group.finished)


def named_values(traces: Sequence[WireTrace]) -> dict[str, tuple[float, ...]]:
    """By name, one per trace that has it: parts of the reward, metrics of the environment, seconds
    of each stage. What is missing or not finite is left out.
    """
    found: dict[str, list[float]] = {}

    def note(name: str, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            found.setdefault(name, []).append(float(value))

    for trace in traces:
        for name, reward in trace.rewards.items():
            note(f"reward/{name}", None if reward is None else reward.score)
        for name, metric in trace.metrics.items():
            note(f"metric/{name}", metric)
        note("info_cut_bytes", cut_bytes(trace.info))
        for stage in STAGES:
            span = getattr(trace.timing, stage)
            if span.end:
                note(f"{stage}_seconds", span.duration)
    return {name: tuple(values) for name, values in found.items()}


def give_up(group: Group, reason: str) -> None:
    """The group trains nothing, for one reason that holds for all its episodes."""
    group.samples.clear()
    for played in group.played:
        failure = played.failure
        group.dropped[played.id] = f"{ERROR_PREFIX}{failure.kind}" if failure else reason


def _origin(group: Group, played: PlayedEpisode, grading: SourceGrader) -> SampleOrigin:
    return SampleOrigin(
        environment=group.source,
        group_id=group.id,
        episode_id=played.id,
        versions=played.versions,
        temperature=grading.temperature,
        max_length_tokens=grading.max_length_tokens,
    )
