"""The episodes of one group become credited, filtered samples; nothing is lost without a reason.

Next pages: `../algorithms/group_relative.py`, one way to give credit, then `samples.py`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

from verifiers.v1.episode import WireEpisode

from gradus.config import RunProcessConfig, SourceConfig
from gradus.errors import ConfigError
from gradus.gate import CALL_SECONDS, is_ours
from gradus.orchestrator.algorithms import (
    build_algorithm,
    compares_all_traces,
    needs_reference,
)
from gradus.orchestrator.algorithms.base import (
    Algorithm,
    CreditContext,
    EpisodeCredit,
    has_credit,
    keep_credit,
    settle_credit,
    settle_group,
)
from gradus.orchestrator.algorithms.distill import Scorer, TokenizesExternal, score_branches
from gradus.orchestrator.algorithms.inputs import Lent
from gradus.orchestrator.algorithms.teacher import ReferenceModel
from gradus.orchestrator.failures import (
    ErrorPolicy,
    blaming,
    scored_within,
)
from gradus.orchestrator.groups.filters import (
    ActiveFilter,
    build_filters,
    filter_group,
    read_vocabulary_size,
)
from gradus.orchestrator.groups.samples import build_group_samples
from gradus.orchestrator.traces import trainable_traces
from gradus.orchestrator.types import (
    ERROR_PREFIX,
    EpisodeFailed,
    Group,
)
from gradus.run.model_files import image_tokens
from gradus.wire.tokens import LARGEST_VOCABULARY


@dataclass(frozen=True)
class SourceGrader:
    """Gives the groups of one source their credit, and makes filtered samples of them."""

    algorithm: Algorithm
    filters: Sequence[ActiveFilter]
    temperature: float
    max_length_tokens: int
    untrained_agents: Collection[str] = ()
    """Agents whose traces never train."""
    has_one_baseline: bool = False
    """Whether all traces of a group are compared, those of different agents too."""
    timeout_seconds: float = CALL_SECONDS
    """For one call of the algorithm."""
    reference: Scorer | None = None
    """Scores what the loss compares with it; None where the algorithm asks it, or there is none."""
    vocabulary_size: int = LARGEST_VOCABULARY
    """Of the policy."""
    max_image_tokens: int | None = None
    """Most placeholders of one branch's images; None means no bound."""

    @property
    def awaits_groups(self) -> bool:
        """Whether groups are scored by `async def score_group`."""
        return inspect.iscoroutinefunction(self.algorithm.score_group)

    async def tokenize_external(self, episode: WireEpisode, group: Group, episode_id: str) -> None:
        """Let the algorithm complete an episode that came without tokens, where it can."""
        # Asking a protocol with isinstance would take longer than a whole check of the episode.
        if hasattr(self.algorithm, "tokenize_external"):
            complete = partial(cast("TokenizesExternal", self.algorithm).tokenize_external, episode)
            await self._scored(_place(group, episode_id), complete)

    async def score_episode(self, episode: WireEpisode, group: Group, episode_id: str) -> None:
        """Credit that needs one episode only; EpisodeFailed when the algorithm cannot give it."""
        where = _place(group, episode_id)
        if type(self.algorithm).score_episode is not Algorithm.score_episode:
            asked = self._asked(group, [episode])
            ask = partial(self.algorithm.score_episode, asked.episodes[0], asked.context)
            await self._scored(where, ask, asked.taking_back())
        if self.reference is not None:
            for trace in trainable_traces([episode]):
                ask = partial(score_branches, trace, self.reference)
                limit = self.timeout_seconds
                await scored_within(limit, "reference model", self.reference, where, ask)
        if has_credit(episode):
            with self._blaming(where):
                settle_credit(episode)

    def grade(self, group: Group) -> None:
        """Score a group by an algorithm that needs no wait, and fill its samples.

        In a replay, the episodes already have the credit of an algorithm that is awaited.
        """
        group.sort()
        credit: Mapping[str, EpisodeCredit] = {}
        if not self.awaits_groups:
            with _keeping_failure(group), self._blaming(_place(group)):
                asked = self._asked(group, group.finished_episodes)
                with asked.taking_back():
                    answer = self.algorithm.score_group(asked.episodes, asked.context)
                    _refuse_awaitable(answer)
                credit = settle_group(group)
        self._fill(group, credit)

    async def grade_awaited(self, group: Group, errors: ErrorPolicy) -> None:
        """Let an algorithm with `async def score_group` score a group, again where `errors` says
        so, and fill its samples.

        Each attempt starts from the credit of `score_episode` alone. `group.failure` says why the
        last one failed.
        """
        group.sort()
        where, retry = _place(group), 0
        credit: Mapping[str, EpisodeCredit] = {}
        put_back = keep_credit(group.finished_episodes, group.numbers)
        while True:
            group.failure = None
            with _keeping_failure(group):
                asked = self._asked(group, group.finished_episodes)
                ask = partial(self.algorithm.score_group, asked.episodes, asked.context)
                await self._scored(where, ask, asked.taking_back())
                with self._blaming(where):
                    credit = settle_group(group)
            wait = group.failure and errors.wait_before_retry(group.failure, retry=retry)
            if wait is None:
                break
            await asyncio.sleep(wait)
            put_back()
            retry += 1
        self._fill(group, credit)

    def _fill(self, group: Group, credit: Mapping[str, EpisodeCredit]) -> None:
        """Fill `samples` and `dropped` of a scored group, with its credit by episode."""
        for played in group.played:
            if played.failure is not None:
                group.dropped[played.id] = f"{ERROR_PREFIX}{played.failure.kind}"
        if group.failure is not None:
            group.fail(group.failure)
            return
        limit = self.max_length_tokens
        built = build_group_samples(
            group, credit, temperature=self.temperature, max_length_tokens=limit
        )
        filter_group(self.filters, group, built)

    def _asked(self, group: Group, episodes: Sequence[WireEpisode]) -> _Asked:
        """A call about these episodes of a group; where code of others runs, about copies."""
        is_trusted = is_ours(self.algorithm) and not self.algorithm.calls_foreign_code
        every = [*episodes, *(p.episode for p in group.played if p.episode is not None)]
        lent = Lent(every, is_trusted=is_trusted)
        context = credit_context(group, lent)
        return _Asked(group, lent, [lent.copy_of(it) for it in episodes], context)

    def _blaming(self, where: str) -> AbstractContextManager[None]:
        return blaming("algorithm", self.algorithm, where, seconds=self.timeout_seconds)

    async def _scored(
        self,
        where: str,
        score: Callable[[], Awaitable[None] | None],
        watch: AbstractContextManager[None] | None = None,
    ) -> None:
        limit, algorithm = self.timeout_seconds, self.algorithm
        await scored_within(limit, "algorithm", algorithm, where, score, watch=watch)


@dataclass(frozen=True)
class _Asked:
    """What one call of an algorithm gets, and where what it gives goes."""

    group: Group
    lent: Lent
    episodes: list[WireEpisode]
    context: CreditContext

    @contextmanager
    def taking_back(self) -> Iterator[None]:
        """Take credit, notes and numbers once the body, which is the call, has ended well."""
        yield
        self.context.check()
        self.lent.take_back()
        self.group.numbers.update(self.context.numbers)


@contextmanager
def _keeping_failure(group: Group) -> Iterator[None]:
    """What the algorithm does wrong is kept as the group's failure."""
    try:
        yield
    except EpisodeFailed as failed:
        group.failure = failed.failure


def build_grader(
    config: RunProcessConfig,
    source: SourceConfig,
    reference: ReferenceModel | None = None,
) -> SourceGrader:
    """The grader of a source; refuses one without a temperature."""
    temperature = source.sampling.temperature
    if temperature is None:
        raise ConfigError(f"source {source.name!r}: sampling.temperature is missing")
    size = read_vocabulary_size(config.model)
    return SourceGrader(
        algorithm=build_algorithm(source.algo, reference),
        filters=build_filters(config.orchestrator.filters, vocabulary_size=size),
        temperature=temperature,
        max_length_tokens=config.model.max_length_tokens,
        untrained_agents=frozenset(source.untrained_agents),
        has_one_baseline=compares_all_traces(source.algo),
        timeout_seconds=source.algo.scoring_timeout_seconds,
        reference=None if needs_reference(source.algo) else reference,
        vocabulary_size=size or LARGEST_VOCABULARY,
        max_image_tokens=image_tokens(config.trainer.micro_batch_patches, config.model.name),
    )


def credit_context(group: Group, lent: Lent) -> CreditContext:
    """What an algorithm may know about a group besides its finished episodes."""
    came_back = [(p.episode, p.failure) for p in group.played if p.episode is not None]
    failed = lent.copies_of([episode for episode, failure in came_back if failure is not None])
    played = lent.copies_of([episode for episode, _ in came_back])
    return CreditContext(group.source, group.task.key, failed, dict(group.numbers), played)


def _place(group: Group, episode_id: str = "") -> str:
    place = f"source {group.source!r}, group {group.id}"
    return f"{place}, episode {episode_id}" if episode_id else place


def _refuse_awaitable(result: object) -> None:
    if inspect.iscoroutine(result):
        result.close()
    if inspect.isawaitable(result):
        raise TypeError("score_group gives an awaitable; write it as `async def score_group`")
