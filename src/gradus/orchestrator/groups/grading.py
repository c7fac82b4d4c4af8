"""The episodes of one group become credited, filtered samples; nothing is lost without a reason."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from verifiers.v1.episode import WireEpisode

from gradus.errors import CreditError
from gradus.orchestrator.algorithms.base import (
    Algorithm,
    CreditContext,
    forget_credit,
    keep_credit,
    settle_credit,
)
from gradus.orchestrator.algorithms.rounding import are_equal
from gradus.orchestrator.failures import (
    ALGORITHM_FAILED,
    ErrorPolicy,
    ask_policy,
    blaming,
    scored_within,
)
from gradus.orchestrator.groups.batcher import ERROR_PREFIX
from gradus.orchestrator.groups.filters import (
    ActiveFilter,
    FilterContext,
    dropped_by,
    judge,
)
from gradus.orchestrator.groups.samples import SampleOrigin, build_samples
from gradus.orchestrator.traces import is_truncated
from gradus.orchestrator.types import (
    EpisodeFailed,
    Failure,
    Group,
    PlayedEpisode,
)
from gradus.wire.sample import Sample

NO_TOKENS = "no_trainable_tokens"
"""Reason for a finished episode without a sample, e.g. cut before its first sampled token."""


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
            _refuse_awaitable(
                grading.algorithm.score_group(_finished(group), credit_context(group))
            )
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
                scoring = algorithm.score_group(_finished(group), credit_context(group))
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
    credit = credit_context(group)
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


def credit_context(group: Group) -> CreditContext:
    """What an algorithm may know of a group beside its finished episodes."""
    came_back = [(p.episode, p.failure) for p in group.played if p.episode is not None]
    failed = [episode for episode, failure in came_back if failure is not None]
    played = [episode for episode, _ in came_back]
    return CreditContext(group.source, group.task.key, failed, group.numbers, played)


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
