"""The versions of a supervised run that are evaluated: published when due, and announced."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from gradus.config import SftEvalConfig, SftProcessConfig
from gradus.files import free_bytes
from gradus.heartbeat import beat
from gradus.log import get_logger
from gradus.run.paths import RunDirectory
from gradus.trainer.distributed import World
from gradus.trainer.learner import Learner
from gradus.trainer.publish import PendingVersion, PolicyPublisher, announcement
from gradus.transport import SpoolReceiver
from gradus.weights.filesystem import FilesystemWeights, published_versions
from gradus.weights.published import Published
from gradus.weights.publishing_thread import PublishingThread
from gradus.wire.events import TrainerDone

logger = get_logger(__name__)

ROOM_PAUSE_SECONDS = 2.0
"""Between two looks at a full disk."""


@dataclass(frozen=True)
class EvaluatedVersions:
    """Hands the versions that are due to the evaluator; every rank calls the same methods.

    Versions are whole weights, adapters merged, and wait on disk until the evaluator deletes them.

    >>> published = versions.publish_when_due(20)  # doctest: +SKIP
    >>> versions.announce(published)  # doctest: +SKIP
    """

    settings: SftEvalConfig
    max_steps: int
    run_dir: RunDirectory
    term: int
    world: World
    publisher: PolicyPublisher
    version_bytes: int
    """Size of one version on disk, about."""
    evaluator: SpoolReceiver | None
    """Where events go; only rank 0 has one."""

    @classmethod
    def build(
        cls,
        config: SftProcessConfig,
        learner: Learner,
        run_dir: RunDirectory,
        files: Mapping[str, bytes],
        thread: PublishingThread,
    ) -> Self | None:
        """The versions of a run, with `files` beside each; None when nothing is evaluated."""
        settings = config.eval
        if settings is None:
            return None
        model, world, dtype = learner.model, learner.world, learner.dtype
        weights = evaluator = None
        if world.is_first:
            weights = FilesystemWeights(
                run_dir, term=config.term, extra_files=files, keep_published=None
            )
            evaluator = SpoolReceiver(run_dir, config.term, rank=0)
        return cls(
            settings=settings,
            max_steps=config.max_steps,
            run_dir=run_dir,
            term=config.term,
            world=world,
            publisher=PolicyPublisher(model, world, dtype=dtype, weights=weights, thread=thread),
            version_bytes=sum(it.numel() for it in model.parameters()) * dtype.itemsize,
            evaluator=evaluator,
        )

    def publish_when_due(self, version: int) -> PendingVersion | None:
        """Begin to write the present weights when `version` is due; what is written on rank 0.

        StorageError when the disk had no room for the version before, even after waiting for an
        evaluation to end.
        """
        if not self.settings.is_due(version, max_steps=self.max_steps):
            return None
        self.publisher.settle()
        self._wait_for_room(version)
        return self.publisher.publish_version(version)

    def announce(self, pending: PendingVersion | None) -> None:
        """Tell the evaluator once the version is whole, after its step is recorded."""
        if pending is not None:
            self.publisher.thread.submit(lambda: self._tell(pending.published))

    def resume_at(self, version: int) -> None:
        """After a restart at `version`: announce what waits, and publish it if it is missing."""
        waiting = published_versions(self.run_dir) if self.evaluator is not None else []
        is_known = any(published.version == version for published in waiting)
        is_known |= self.evaluator is not None and self.run_dir.evaluation(version).is_file()
        for published in waiting:
            self._tell(published)
        if self.world.all_agree(not is_known):
            self.announce(self.publish_when_due(version))

    def ended_at(self, version: int) -> Self:
        """The same where `version` is the last, before the planned end, which is evaluated too."""
        is_published = self.settings.is_due(version, max_steps=self.max_steps)
        ended = replace(self, max_steps=version)
        if not is_published:
            ended.announce(ended.publish_when_due(version))
        return ended

    def finish(self) -> None:
        """Tell the evaluator that no more versions will come, once the last is whole."""
        self.publisher.finish()
        if self.evaluator is not None:
            self.evaluator.send_event(TrainerDone(step=self.max_steps - 1, term=self.term))

    def _tell(self, published: Published) -> None:
        if self.evaluator is not None:
            self.evaluator.send_event(announcement(published, self.term))

    def _wait_for_room(self, version: int) -> None:
        """Wait while the disk is full of versions: each that is evaluated makes room.

        waits for: the evaluator, no longer than one evaluation may take
        """
        patience = self.settings.longest_seconds
        deadline = time.monotonic() + patience
        has_warned = False
        while not self.world.all_agree(self._has_room() or time.monotonic() >= deadline):
            if self.world.is_first and not has_warned:
                text = "version %d waits for room on a full disk, until another one is evaluated"
                logger.warning(text, version)
                has_warned = True
            beat(f"version {version} waits for room")
            time.sleep(ROOM_PAUSE_SECONDS)

    def _has_room(self) -> bool:
        """Tell whether to publish now: the version fits, or no other one will make room."""
        if not self.world.is_first or not any(self.run_dir.weights.glob("version_*")):
            return True
        free = free_bytes(self.run_dir.weights)
        return free is None or free > self.version_bytes
