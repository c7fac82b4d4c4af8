"""Plays episodes, for training and for evaluations: every start, retry and end is here.

    begin ──► attempt ──► checked and scored ──► PlayedEpisode
                 ▲                 │ failed, and its source plays such failures again
                 └──── wait ◄──────┘

Whatever happens to an episode, it ends exactly once. New weights may be served while it plays: it
continues, and its span of versions says so: of those that the engine says sampled its tokens, or,
where it does not say, from the one served at its start to the newest that may have answered. Next
page: `../buffer.py`, where ended episodes arrive.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from verifiers.v1.episode import WireEpisode

from gradus.config import ErrorPolicyConfig
from gradus.orchestrator.failures import ErrorPolicy, is_asked_to_end
from gradus.orchestrator.groups.grading import SourceGrader
from gradus.orchestrator.play.agents import mark_trainable
from gradus.orchestrator.play.environment import Environment
from gradus.orchestrator.play.episode_check import find_failure
from gradus.orchestrator.play.inference_client import PolicyClient
from gradus.orchestrator.play.restarts import CrashAttribution
from gradus.orchestrator.play.tasks import SourceShare
from gradus.orchestrator.traces import episode_versions
from gradus.orchestrator.types import EpisodeFailed, Failure, Group, PlayedEpisode
from gradus.wire.episode import LOST
from gradus.wire.versions import VersionSpan

CUT_OFF = Failure("CancelledError", "something that the episode waited for was cancelled")


@dataclass
class RunningEpisode:
    """An episode between its start and its end, retries included."""

    id: str
    group: Group
    version: int
    """Served when the present attempt began."""
    started_at: float
    retry: int = 0
    num_lost: int = 0
    """Retries because its process was lost: they use up none, and keep the seed."""

    def text(self, *, now: float) -> str:
        """One line about it, for a report."""
        task = self.group.pointer
        age = now - self.started_at
        return (
            f"{self.id}: {age:.0f} s, source {task.source!r}, task {task.index}, "
            f"version {self.version}, retry {self.retry}"
        )


RetryListener = Callable[[RunningEpisode, Failure], None]
"""Called before each retry, with the episode and the failure of the attempt before."""


class Playable(Protocol):
    """What the player needs of a source."""

    @property
    def environment(self) -> Environment: ...

    @property
    def errors(self) -> ErrorPolicy: ...

    async def find_failure(
        self, episode: WireEpisode, running: RunningEpisode, /
    ) -> Failure | None:
        """What is wrong with an episode that came back; it may be scored here."""


@dataclass(frozen=True)
class Source:
    """One source of training episodes, ready to play."""

    share: SourceShare
    group_size: int
    environment: Environment
    grader: SourceGrader
    errors: ErrorPolicy = field(default_factory=lambda: ErrorPolicy(ErrorPolicyConfig()))
    is_frozen: bool = False
    """Whether the policy plays no agent, so that its samples are never stale."""

    async def find_failure(
        self, episode: WireEpisode, running: RunningEpisode, /
    ) -> Failure | None:
        """Let the algorithm score an episode that has nothing wrong; EpisodeFailed when it cannot.

        An algorithm that tokenizes replies of other models does so before the tokens are checked.
        """
        grader = self.grader
        failure = mark_trainable(
            episode, grader.untrained_agents, has_one_baseline=grader.has_one_baseline
        )
        if failure is None and episode.ok:
            await grader.tokenize_external(episode, running.group, running.id)
        failure = failure or find_failure(
            episode,
            vocabulary_size=grader.vocabulary_size,
            max_image_tokens=grader.max_image_tokens,
        )
        if failure is None:
            await grader.score_episode(episode, running.group, running.id)
        return failure


class EpisodePlayer:
    """Owns the running episodes, and the queue of those that ended.

    Training starts episodes and collects them from `ended`; an evaluation awaits `play`.
    """

    def __init__(
        self,
        sources: Mapping[str, Playable],
        policy: PolicyClient | PinnedVersion,
        *,
        blame: CrashAttribution,
        on_retry: RetryListener,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        """`seed` is the run's; None lets the engine choose."""
        self.ended: asyncio.Queue[PlayedEpisode | None] = asyncio.Queue()
        """Those that `start` began, and None after the last of them."""
        self._sources = sources
        self._policy = policy
        self._on_retry = on_retry
        self._clock = clock
        self._seed = seed
        self._blame = blame
        self._running: dict[str, RunningEpisode] = {}
        self._tasks: dict[str, asyncio.Task[PlayedEpisode]] = {}

    @property
    def running(self) -> list[RunningEpisode]:
        """Oldest first."""
        return list(self._running.values())

    def start(self, episode_id: str, group: Group, tasks: asyncio.TaskGroup) -> int:
        """Begin to play one episode of `group`; the version that is served now."""
        episode = self.begin(episode_id, group)
        playing = tasks.create_task(self.play(episode))
        self._running[episode_id] = episode
        self._tasks[episode_id] = playing
        playing.add_done_callback(partial(self._note_end, episode))
        return episode.version

    def cancel(self, episode_ids: Iterable[str]) -> None:
        """Give up running episodes; one that ended a moment ago is collected as it is."""
        for episode_id in episode_ids:
            if episode_id in self._tasks:
                self._tasks[episode_id].cancel()

    async def close(self) -> None:
        """Give up every running episode, and mark the end of the queue."""
        running = list(self._tasks.values())
        for playing in running:
            playing.cancel()
        if running:
            await asyncio.wait(running)
        self.ended.put_nowait(None)

    def begin(self, episode_id: str, group: Group) -> RunningEpisode:
        """An episode of `group` whose clock runs from now on; `play` it."""
        return RunningEpisode(episode_id, group, self._policy.version, self._clock())

    async def play(self, episode: RunningEpisode) -> PlayedEpisode:
        """Attempt after attempt, until one succeeds or its failure is final."""
        errors = self._sources[episode.group.source].errors
        while True:
            played = await self._attempt(episode)
            if played.failure is None or self._blame.is_set_aside(episode.group.pointer):
                return played
            is_lost = played.failure.kind == LOST
            retry = 0 if is_lost else episode.retry - episode.num_lost
            wait = errors.wait_before_retry(played.failure, retry=retry)
            if wait is None:
                return played
            # Spread, or all that one refusal failed would come back together.
            await asyncio.sleep(wait * (1 + random.random() / 2))
            episode.retry += 1
            episode.num_lost += is_lost
            episode.version = self._policy.version
            self._on_retry(episode, played.failure)

    async def _attempt(self, episode: RunningEpisode) -> PlayedEpisode:
        group = episode.group
        source = self._sources[group.source]
        seed = None
        if self._seed is not None:
            seed = episode_seed(self._seed, episode.id, episode.retry - episode.num_lost)
        try:
            async with self._blame.playing(group.pointer, episode.id):
                result = await source.environment.run(
                    group.task, version=episode.version, seed=seed
                )
            self._blame.clear(episode.id)
            failure = await source.find_failure(result, episode)
        except EpisodeFailed as failed:
            self._blame.note_failure(group.pointer, episode.id, failed.failure)
            return self._end(episode, failure=failed.failure)
        except asyncio.CancelledError:
            if is_asked_to_end():
                raise
            return self._end(episode, failure=CUT_OFF)
        return self._end(episode, result, failure)

    def _note_end(self, episode: RunningEpisode, playing: asyncio.Task[PlayedEpisode]) -> None:
        """Also runs for an episode that was cancelled before it began."""
        del self._running[episode.id]
        del self._tasks[episode.id]
        if playing.cancelled():
            self.ended.put_nowait(self._end(episode))
        elif playing.exception() is None:
            self.ended.put_nowait(playing.result())

    def _end(
        self,
        episode: RunningEpisode,
        result: WireEpisode | None = None,
        failure: Failure | None = None,
    ) -> PlayedEpisode:
        # Any version from the start until now may have answered some of its requests.
        versions = VersionSpan(oldest=episode.version, newest=self._policy.newest_version)
        return PlayedEpisode(
            episode.id,
            episode.group.id,
            versions if result is None else versions.within(episode_versions(result)),
            episode=result,
            failure=failure,
            seconds=self._clock() - episode.started_at,
        )


@dataclass(frozen=True)
class PinnedVersion:
    """A policy that serves one version as long as the player lives, as in an evaluation."""

    version: int

    @property
    def newest_version(self) -> int:
        """No other is applied meanwhile."""
        return self.version


def episode_seed(run_seed: int, episode_id: str, retry: int = 0) -> int:
    """The sampling seed of an attempt: the same in every run of that seed, also after a resume.

    Each retry has its own: with the same seed it would sample the reply that failed once more.
    After the loss of its process an episode keeps it, for the reply had no part in that.

    31 bits, because some engines read it as a signed integer of 32. Each request of the episode
    gets a seed made of this one and of its prompt, in the environment's worker.

    >>> episode_seed(0, "g000000.0") == episode_seed(0, "g000000.1")
    False
    """
    attempt = f"{episode_id}/{retry}" if retry else episode_id
    digest = hashlib.sha256(f"{run_seed}/{attempt}".encode()).digest()
    return int.from_bytes(digest[:4]) >> 1
