"""The episodes of an evaluation: which there are, how each is played, what is recorded of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from verifiers.v1.episode import EnvInfo, GroupInfo, WireEpisode

from gradus.config import ErrorPolicyConfig, EvaluationSourceConfig, ModelConfig
from gradus.errors import ConfigError
from gradus.log import get_logger
from gradus.orchestrator.evaluation.results import (
    EpisodeScore,
)
from gradus.orchestrator.failures import ErrorPolicy, FirstFailures, notify
from gradus.orchestrator.play.agents import mark_trainable
from gradus.orchestrator.play.environment import (
    Environment,
    EpisodeSettings,
    TaskRefused,
    find_environment,
)
from gradus.orchestrator.play.episode_check import find_failure
from gradus.orchestrator.play.player import EpisodePlayer, PinnedVersion, RunningEpisode
from gradus.orchestrator.play.renderer import check_tools
from gradus.orchestrator.play.restarts import CrashAttribution
from gradus.orchestrator.play.sharing import connect_source
from gradus.orchestrator.records.episodes import readable
from gradus.orchestrator.traces import (
    trainable_traces,
)
from gradus.orchestrator.types import (
    EpisodeNumbers,
    Failure,
    Group,
    PlayedEpisode,
    TaskPointer,
)
from gradus.processes.leftovers import was_ended_from_outside
from gradus.processes.liveness import beat_with_loop
from gradus.run.paths import RunDirectory
from gradus.wire.episode import TaskSetInfo
from gradus.wire.versions import VersionSpan

log = get_logger(__name__)

TIMED_OUT = "evaluation_timeout"
UNREADABLE = "unreadable_task"


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
    errors: ErrorPolicy = field(default_factory=lambda: ErrorPolicy(ErrorPolicyConfig()))

    @property
    def num_episodes(self) -> int:
        return self.num_tasks * self.group_size

    def episode_keys(self) -> list[EpisodeKey]:
        """Every episode to play, task by task."""
        return [
            EpisodeKey(self.name, task, replica)
            for task in range(self.num_tasks)
            for replica in range(self.group_size)
        ]

    async def find_failure(self, episode: WireEpisode, _: RunningEpisode, /) -> Failure | None:
        """What keeps an episode from being measured; a plain endpoint gives no tokens."""
        failure = mark_trainable(episode, self.unmeasured_agents)
        failure = failure or find_failure(episode, needs_tokens=False)
        if failure is None and not trainable_traces([episode]):
            return Failure("no_trace", "the episode has no trace of an agent that is measured")
        return failure


async def open_evaluated(
    config: EvaluationSourceConfig,
    run_dir: RunDirectory,
    settings: EpisodeSettings,
    stack: AsyncExitStack,
    *,
    model: ModelConfig | None,
    restart_seconds: float = 0.0,
) -> EvaluationSource:
    """Connect to an evaluated environment; `stack` closes the connection.

    `model` is the policy with its renderer; None when an endpoint renders.
    """
    environment = await connect_source(
        partial(find_environment, run_dir, config, "eval"),
        config,
        settings,
        restart_seconds=restart_seconds,
        tell=partial(notify, run_dir),
        was_killed=partial(was_ended_from_outside, run_dir.processes),
    )
    stack.push_async_callback(environment.close)
    info = await environment.info()
    if model is not None:
        check_tools(config.name, model, offers_tools=info.tools)
    return EvaluationSource(
        name=config.name,
        num_tasks=count_tasks(config, info),
        group_size=config.group_size,
        environment=environment,
        state_columns=config.state_columns,
        unmeasured_agents=frozenset(config.unmeasured_agents),
        errors=ErrorPolicy(config.errors),
    )


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

    @property
    def group_id(self) -> str:
        """What all episodes of the task have in common."""
        return f"{self.source}/{self.task}"

    def failed(self, version: int, kind: str, message: str) -> EvaluatedEpisode:
        """This episode as one that never began."""
        span = VersionSpan(oldest=version, newest=version)
        failure = Failure(kind, message)
        return EvaluatedEpisode(self, PlayedEpisode(str(self), self.group_id, span, None, failure))


@dataclass(frozen=True)
class EvaluatedEpisode:
    """How one episode ended: with a reward, or with a failure."""

    key: EpisodeKey
    played: PlayedEpisode
    attempts: int = 0
    task_key: str | int | None = None

    @property
    def failure(self) -> Failure | None:
        """None when it has a reward."""
        return self.played.failure

    def score(self) -> EpisodeScore:
        """What it contributes to the numbers."""
        numbers = self.played.numbers
        if numbers is None:
            return EpisodeScore(self.key.task, error=self.failure.kind if self.failure else None)
        return EpisodeScore(
            task=self.key.task,
            reward=sum(numbers.rewards) / len(numbers.rewards),
            length_tokens=numbers.length_tokens,
            is_truncated=numbers.is_truncated,
            values={name: sum(of) / len(of) for name, of in _named(numbers).items()},
            is_shared=len(set(numbers.agents)) > 1,
        )

    def tell(self, failures: FirstFailures) -> None:
        """Report it to the user when it is the first to fail in this way."""
        if self.failure is not None:
            failures.add(self.key.source, f"episode {self.key}", self.failure)

    def record(self, state_columns: Sequence[str]) -> dict[str, Any]:
        """One line of `eval.jsonl`: verifiers' own record, plus a `gradus` object."""
        episode = self.played.episode
        if episode is None:
            return {"gradus": self._gradus_fields()}
        episode.env = EnvInfo(id=episode.env.id, name=self.key.source)
        episode.group = GroupInfo(id=self.key.group_id)
        return readable(episode, self._gradus_fields(), state_columns)

    def _gradus_fields(self) -> dict[str, Any]:
        score, failure, versions = self.score(), self.failure, self.played.versions
        return {
            "episode": str(self.key),
            "source": self.key.source,
            "task": {"index": self.key.task, "key": self.task_key},
            "replica": self.key.replica,
            "versions": {"oldest": versions.oldest, "newest": versions.newest},
            "attempts": self.attempts,
            "reward": score.reward,
            "length_tokens": score.length_tokens,
            "is_truncated": score.is_truncated,
            "values": dict(score.values),
            "is_shared": score.is_shared,
            "error": {"type": failure.kind, "message": failure.message} if failure else None,
        }


def _named(numbers: EpisodeNumbers) -> dict[str, tuple[float, ...]]:
    """Rewards of agents come first: only so many names are kept."""
    of_agents = {
        f"agent/{agent}/{name}": of
        for agent, named in numbers.of_agents.items()
        for name, of in named.items()
    }
    rewards = {name: of for name, of in of_agents.items() if name.endswith("/reward")}
    return {**rewards, **numbers.values, **of_agents}


async def play_episodes(
    sources: Collection[EvaluationSource],
    keys: Collection[EpisodeKey],
    *,
    version: int,
    max_in_flight: int,
    on_end: Callable[[EvaluatedEpisode], None],
    blame: CrashAttribution | None = None,
    timeout_seconds: float | None = None,
) -> None:
    """Play every key once and hand each to `on_end`; after the timeout what is left fails.

    `blame` remembers tasks that end their environment, from one evaluation to the next.

    waits for: episodes        unblocked by: environments, the timeout
    """
    environments = {source.name: source.environment for source in sources}
    player = EpisodePlayer(
        {source.name: source for source in sources},
        PinnedVersion(version),
        blame=blame or CrashAttribution.without_journal(),
        on_retry=lambda episode, failure: log.warning(
            "episode %s is played again after %s", episode.id, failure
        ),
    )
    left = dict.fromkeys(keys)

    def settle(ended: EvaluatedEpisode) -> None:
        del left[ended.key]
        on_end(ended)

    async def work(waiting: Iterable[EpisodeKey]) -> None:
        """One of the workers that share the keys that wait."""
        for key in waiting:
            settle(await _play(key, player, environments[key.source], version))

    waiting = iter(list(keys))
    try:
        async with asyncio.timeout(timeout_seconds), asyncio.TaskGroup() as tasks:
            for _ in range(min(max_in_flight, len(left))):
                tasks.create_task(work(waiting))
    except TimeoutError:
        text = f"the evaluation did not end in timeout_seconds = {timeout_seconds:g}"
        for key in list(left):
            settle(key.failed(version, TIMED_OUT, text))


async def _play(
    key: EpisodeKey, player: EpisodePlayer, environment: Environment, version: int
) -> EvaluatedEpisode:
    try:
        task = await environment.task(key.task)
    except TaskRefused as error:
        return key.failed(version, UNREADABLE, f"{error}")
    group = Group(key.group_id, TaskPointer(key.source, 0, key.task), task)
    episode = player.begin(str(key), group)
    played = await player.play(episode)
    return EvaluatedEpisode(key, played, attempts=episode.retry + 1, task_key=task.key)


@asynccontextmanager
async def watched(
    sources: Iterable[EvaluationSource], *others: Coroutine[Any, Any, None]
) -> AsyncIterator[None]:
    """Within this block, the end of an environment process raises here, and `others` run too."""
    async with asyncio.TaskGroup() as tasks:
        watches = [tasks.create_task(source.environment.watch()) for source in sources]
        watches += [tasks.create_task(other) for other in (beat_with_loop(), *others)]
        yield
        for watch in watches:
            watch.cancel()
