"""The episodes of an evaluation: which there are, how each is played, what is recorded of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from verifiers.v1.episode import EnvInfo, GroupInfo, WireEpisode

from gradus.config import RETRIED_ERRORS, EvaluationSourceConfig
from gradus.errors import ConfigError
from gradus.log import get_logger
from gradus.orchestrator.evaluation.results import (
    EnvironmentResult,
    EpisodeScore,
    combine,
    evaluate,
    metrics,
)
from gradus.orchestrator.failures import FirstFailures
from gradus.orchestrator.play.agents import settle_standing
from gradus.orchestrator.play.environment import Environment
from gradus.orchestrator.play.episode_check import find_failure
from gradus.orchestrator.play.restarts import Blame
from gradus.orchestrator.play.task_socket import TaskRefused, TaskSetInfo
from gradus.orchestrator.records.episodes import readable
from gradus.orchestrator.traces import (
    is_truncated,
    named_values,
    num_sampled_tokens,
    trainable_traces,
)
from gradus.orchestrator.types import EpisodeFailed, Failure, Task, TaskPointer

log = get_logger(__name__)

TIMED_OUT = "evaluation_timeout"
_PASSING_CLIENT_ERRORS = (408, 429)
"""Any other 4xx of a provider is the same next time."""
_FIRST_DELAY_SECONDS = 0.5
_MAX_DELAY_SECONDS = 15.0


@dataclass(frozen=True)
class EvaluationSource:
    """One evaluated environment, ready to play."""

    name: str
    num_tasks: int
    group_size: int
    environment: Environment
    state_columns: Sequence[str] = ()
    unmeasured_agents: Collection[str] = ()
    """Agents whose traces say nothing about the policy."""

    def episode_keys(self) -> list[EpisodeKey]:
        """Every episode to play, task by task."""
        return [
            EpisodeKey(self.name, task, replica)
            for task in range(self.num_tasks)
            for replica in range(self.group_size)
        ]


@dataclass(frozen=True)
class EpisodeKey:
    """What names an episode of an evaluation, also after a restart."""

    source: str
    task: int
    """Index of the task."""
    replica: int
    """Which of the task's episodes, from 0."""

    def __str__(self) -> str:
        return f"{self.source}/{self.task}/{self.replica}"


@dataclass(frozen=True)
class EvaluatedEpisode:
    """How one episode ended: with a reward, or with a failure."""

    key: EpisodeKey
    version: int
    attempts: int
    task_key: str | int | None = None
    episode: WireEpisode | None = None
    failure: Failure | None = None

    def score(self) -> EpisodeScore:
        """What it contributes to the numbers."""
        if self.failure is not None or self.episode is None:
            kind = self.failure.kind if self.failure else "unknown"
            return EpisodeScore(self.key.task, error=kind)
        traces = trainable_traces([self.episode])
        return EpisodeScore(
            task=self.key.task,
            reward=sum(trace.reward for trace in traces) / len(traces),
            length_tokens=sum(map(num_sampled_tokens, traces)),
            is_truncated=any(is_truncated(trace) for trace in traces),
            values={name: sum(of) / len(of) for name, of in named_values(traces).items()},
        )

    def tell(self, failures: FirstFailures) -> None:
        """Tell a person when it is the first that failed this way."""
        if self.failure is not None:
            failures.add(self.key.source, f"episode {self.key}", self.failure)

    def record(self, state_columns: Sequence[str]) -> dict[str, Any]:
        """One line of `eval.jsonl`: verifiers' own record, plus a `gradus` object."""
        if self.episode is None:
            return {"gradus": self._standing()}
        self.episode.env = EnvInfo(id=self.episode.env.id, name=self.key.source)
        self.episode.group = GroupInfo(id=f"{self.key.source}/{self.key.task}")
        return readable(self.episode, self._standing(), state_columns)

    def _standing(self) -> dict[str, Any]:
        score, failure = self.score(), self.failure
        return {
            "episode": str(self.key),
            "source": self.key.source,
            "task": {"index": self.key.task, "key": self.task_key},
            "replica": self.key.replica,
            "versions": {"oldest": self.version, "newest": self.version},
            "attempts": self.attempts,
            "reward": score.reward,
            "length_tokens": score.length_tokens,
            "is_truncated": score.is_truncated,
            "values": dict(score.values),
            "error": {"type": failure.kind, "message": failure.message} if failure else None,
        }


def count_tasks(config: EvaluationSourceConfig, info: TaskSetInfo) -> int:
    """How many tasks are played; ConfigError when the taskset cannot supply them."""
    if info.num_tasks is None:
        if config.num_tasks is None:
            raise ConfigError(
                f"evaluated environment {config.name!r} has endless tasks; set its num_tasks"
            )
        return config.num_tasks
    if config.num_tasks is not None and config.num_tasks > info.num_tasks:
        raise ConfigError(
            f"evaluated environment {config.name!r} has {info.num_tasks} tasks, "
            f"num_tasks = {config.num_tasks} asks for more; lower it"
        )
    return config.num_tasks or info.num_tasks


class EvaluationPlayer:
    """Plays episodes of an evaluation, some at once, each again when its error may pass.

    >>> player = EvaluationPlayer(sources, max_in_flight=64, max_retries=2)  # doctest: +SKIP
    >>> await player.play(keys, version=0, on_end=episodes.append)  # doctest: +SKIP
    """

    def __init__(
        self,
        sources: Iterable[EvaluationSource],
        *,
        max_in_flight: int,
        max_retries: int,
        first_delay_seconds: float = _FIRST_DELAY_SECONDS,
        blame: Blame | None = None,
    ) -> None:
        """`blame` remembers tasks that end their environment, from one evaluation to the next."""
        self._sources = {source.name: source for source in sources}
        self._max_in_flight = max_in_flight
        self._max_retries = max_retries
        self._first_delay_seconds = first_delay_seconds
        self._blame = blame or Blame.apart()

    async def play(
        self,
        keys: Collection[EpisodeKey],
        *,
        version: int,
        on_end: Callable[[EvaluatedEpisode], None],
        timeout_seconds: float | None = None,
    ) -> None:
        """Play every key once and hand each to `on_end`; after the timeout what is left fails.

        waits for: episodes        unblocked by: environments, the timeout
        """
        left = dict.fromkeys(keys)

        def settle(ended: EvaluatedEpisode) -> None:
            del left[ended.key]
            on_end(ended)

        waiting = iter(list(keys))
        try:
            async with asyncio.timeout(timeout_seconds), asyncio.TaskGroup() as tasks:
                for _ in range(min(self._max_in_flight, len(left))):
                    tasks.create_task(self._work(waiting, version, settle))
        except TimeoutError:
            text = f"the evaluation did not end in timeout_seconds = {timeout_seconds:g}"
            for key in list(left):
                settle(EvaluatedEpisode(key, version, 0, failure=Failure(TIMED_OUT, text)))

    async def _work(
        self,
        waiting: Iterable[EpisodeKey],
        version: int,
        settle: Callable[[EvaluatedEpisode], None],
    ) -> None:
        """One of the workers that share the keys that wait."""
        for key in waiting:
            settle(await self._play(key, version))

    async def _play(self, key: EpisodeKey, version: int) -> EvaluatedEpisode:
        source = self._sources[key.source]
        try:
            task = await source.environment.task(key.task)
        except TaskRefused as error:
            return EvaluatedEpisode(key, version, 0, failure=Failure("unreadable_task", f"{error}"))
        for attempt in range(1, self._max_retries + 2):
            ended = await self._attempt(key, task, version, attempt)
            is_final = self._blame.is_final(TaskPointer(key.source, 0, key.task))
            if attempt > self._max_retries or is_final or not may_pass(ended):
                return ended
            log.warning("episode %s is played again after %s", key, ended.failure)
            longest = min(_MAX_DELAY_SECONDS, self._first_delay_seconds * 2.0 ** (attempt - 1))
            await asyncio.sleep(longest * (0.5 + random.random() / 2))
        raise AssertionError("the last attempt returns")

    async def _attempt(
        self, key: EpisodeKey, task: Task, version: int, attempt: int
    ) -> EvaluatedEpisode:
        source, pointer = self._sources[key.source], TaskPointer(key.source, 0, key.task)
        episode: WireEpisode | None = None
        try:
            async with self._blame.turn(pointer):
                episode = await source.environment.run(task, version=version)
            self._blame.clear(pointer)
            failure = _find_failure(episode, source)
        except EpisodeFailed as failed:
            self._blame.note_failure(pointer, failed.failure)
            failure = failed.failure
        return EvaluatedEpisode(key, version, attempt, task.key, episode, failure)


def _find_failure(episode: WireEpisode, source: EvaluationSource) -> Failure | None:
    standing = settle_standing(episode, source.unmeasured_agents)
    failure = find_failure(episode, needs_tokens=False) if standing is None else standing
    if failure is None and not trainable_traces([episode]):
        return Failure("no_trace", "the episode has no trace of an agent that is measured")
    return failure


def may_pass(ended: EvaluatedEpisode) -> bool:
    """Whether the episode failed in a way that may be over when it is played again."""
    if ended.failure is None or ended.failure.kind not in RETRIED_ERRORS:
        return False
    status = _status_code(ended.episode)
    is_lasting = status is not None and 400 <= status < 500
    return not is_lasting or status in _PASSING_CLIENT_ERRORS


def _status_code(episode: WireEpisode | None) -> int | None:
    """The provider's status of the last error."""
    if episode is None:
        return None
    errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
    return errors[-1].status_code if errors else None


def results(
    sources: Iterable[EvaluationSource], scores: Mapping[str, Iterable[EpisodeScore]]
) -> dict[str, EnvironmentResult]:
    """The numbers of every environment by its name."""
    return {s.name: evaluate(scores.get(s.name, ()), group_size=s.group_size) for s in sources}


def result_metrics(found: Mapping[str, EnvironmentResult]) -> dict[str, float]:
    """`eval/<environment>/...` of each, and `eval/...` of all together."""
    named = metrics(combine(list(found.values())), "eval")
    for name, result in found.items():
        named |= metrics(result, f"eval/{name}")
    return named


def warn_of_graded_rewards(found: Mapping[str, EnvironmentResult], already: set[str]) -> None:
    """Say once per environment that its rewards give an average only."""
    for name, result in found.items():
        if not result.is_binary and name not in already:
            already.add(name)
            log.warning(
                "environment %r gives rewards other than 0 and 1: pass@k and pass^k mean nothing "
                "there, only avg@k is reported",
                name,
            )


@asynccontextmanager
async def watched(sources: Iterable[EvaluationSource]) -> AsyncIterator[None]:
    """While this is open, the end of an environment process is an error here."""
    async with asyncio.TaskGroup() as tasks:
        watches = [tasks.create_task(source.environment.watch()) for source in sources]
        yield
        for watch in watches:
            watch.cancel()
