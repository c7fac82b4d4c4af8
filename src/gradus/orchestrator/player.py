"""Plays episodes, each in a task of its own; whatever happens, each one ends up in `ended` once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial

from gradus.orchestrator.episode_check import EpisodeFailed, find_failure
from gradus.orchestrator.grading import Group, PlayedEpisode
from gradus.orchestrator.parts import Source
from gradus.orchestrator.policy import PolicyPool
from gradus.wire.policy import VersionSpan


class EpisodePlayer:
    """Owns the running episodes and the queue of those that ended.

    >>> player = EpisodePlayer(sources, policy)  # doctest: +SKIP
    >>> player.start("g000000.0", group, tasks)  # doctest: +SKIP
    0
    """

    def __init__(self, sources: Mapping[str, Source], policy: PolicyPool) -> None:
        self.ended: asyncio.Queue[PlayedEpisode | None] = asyncio.Queue()
        """None is the last entry, behind the last episode."""
        self._sources = sources
        self._policy = policy
        self._running: dict[str, asyncio.Task[PlayedEpisode]] = {}

    def start(self, episode_id: str, group: Group, tasks: asyncio.TaskGroup) -> int:
        """Begin to play one episode of `group`; the version that is served now."""
        version = self._policy.version
        playing = tasks.create_task(self._play(episode_id, group, version))
        self._running[episode_id] = playing
        playing.add_done_callback(partial(self._note_end, episode_id, group.id, version))
        return version

    def cancel(self, episode_ids: Iterable[str]) -> None:
        """Give up running episodes; one that ended a moment ago is collected as it is."""
        for episode_id in episode_ids:
            if episode_id in self._running:
                self._running[episode_id].cancel()

    async def close(self) -> None:
        """Give up all that runs, and mark the end of the queue."""
        running = list(self._running.values())
        for playing in running:
            playing.cancel()
        if running:
            await asyncio.wait(running)
        self.ended.put_nowait(None)

    async def _play(self, episode_id: str, group: Group, version: int) -> PlayedEpisode:
        source = self._sources[group.source]
        try:
            episode = await source.environment.run(group.task, version=version)
        except EpisodeFailed as failed:
            return PlayedEpisode(episode_id, group.id, self._span(version), failure=failed.failure)
        failure = find_failure(episode)
        if failure is None:
            await source.grading.algorithm.score_episode(episode, group.credit_context)
        return PlayedEpisode(
            episode_id, group.id, self._span(version), episode=episode, failure=failure
        )

    def _note_end(
        self, episode_id: str, group_id: str, version: int, playing: asyncio.Task[PlayedEpisode]
    ) -> None:
        """Runs also for an episode that was cancelled before its first line."""
        del self._running[episode_id]
        if playing.cancelled():
            self.ended.put_nowait(PlayedEpisode(episode_id, group_id, self._span(version)))
        elif playing.exception() is None:
            self.ended.put_nowait(playing.result())

    def _span(self, version: int) -> VersionSpan:
        """From the version at the start to the newest that may have answered until now."""
        return VersionSpan(oldest=version, newest=self._policy.newest_version)
