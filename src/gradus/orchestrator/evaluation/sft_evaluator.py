"""The evaluator of a supervised run: measures versions while the trainer makes the next ones.

    loop      consumes            waits for                     produces  unblocked by
    evaluate  published versions  the trainer's word, episodes  records   trainer, environments

Training never waits. The trainer writes each version that is due to disk and says so; versions
that come faster than they are measured queue up there, in order, and each is deleted once its
numbers are on disk. `episodes/step_<version>/eval.json` says that a version is measured, so a
resumed run measures only what is missing.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gradus.config import SftEvaluatorProcessConfig, continued_identity
from gradus.errors import ProtocolError
from gradus.files import read_json, write_json
from gradus.log import get_logger
from gradus.monitor.base import Monitor, MonitorGroup
from gradus.monitor.jsonl import JsonlMonitor
from gradus.orchestrator.build import open_served
from gradus.orchestrator.evaluation.episodes import warn_of_graded_rewards, watched
from gradus.orchestrator.evaluation.measurement import Measurement
from gradus.orchestrator.failures import root_cause
from gradus.orchestrator.play.inference_client import InferenceClient, PolicyClient
from gradus.orchestrator.play.renderer import settle_renderer
from gradus.run.lease import check_term
from gradus.run.paths import RunDirectory
from gradus.transport.spool import SpoolSender
from gradus.wire.events import Event, PolicyPublished, TrainerDone

log = get_logger(__name__)


def run(config: SftEvaluatorProcessConfig) -> None:
    """The evaluator process, from its ready file to the numbers of the last version."""
    try:
        asyncio.run(_run(config))
    except BaseExceptionGroup as group:
        raise root_cause(group) from group


async def _run(config: SftEvaluatorProcessConfig) -> None:
    run_dir = RunDirectory(Path(config.run_dir))
    check_term(run_dir, config.term)
    keep_identity(run_dir.root / "evaluation.json", config.identity)
    config = config.model_copy(update={"model": await settle_renderer(config.model)})
    async with AsyncExitStack() as stack:
        policy = await InferenceClient.connect(
            run_dir,
            term=config.term,
            apply_timeout_seconds=config.eval.apply_timeout_seconds,
        )
        stack.push_async_callback(policy.close)
        sources = [
            await open_served(config, source, policy.base_url, stack)
            for source in config.evaluation_sources
        ]
        events = SpoolSender(run_dir, config.term, capacity=1)
        stack.push_async_callback(events.close)
        monitor = MonitorGroup([JsonlMonitor(run_dir.metrics)])
        stack.callback(monitor.close)
        evaluator = SftEvaluator(
            config=config,
            measurement=Measurement(config.eval, sources, policy=policy, episodes=run_dir.episodes),
            policy=policy,
            events=events,
            monitor=monitor,
        )
        ready = {"pid": os.getpid(), "term": config.term}
        write_json(run_dir.ready_file("evaluator"), ready)
        async with watched(sources):
            await evaluator.run()


def keep_identity(path: Path, identity: dict[str, Any]) -> None:
    """Note what is evaluated; ConfigError when earlier episodes are of something else."""
    try:
        before = read_json(path)
    except FileNotFoundError:
        write_json(path, identity)
        return
    write_json(path, continued_identity(before, identity))


class TrainerEvents(Protocol):
    """Where the trainer's words arrive."""

    async def receive_event(self) -> Event:
        """The trainer's next event, in order."""
        ...


@dataclass
class SftEvaluator:
    """Owns the evaluations of a supervised run: which versions are measured, and their records.

    >>> await SftEvaluator(config, measurement, policy, events, monitor).run()  # doctest: +SKIP
    """

    config: SftEvaluatorProcessConfig
    measurement: Measurement
    policy: PolicyClient
    events: TrainerEvents
    monitor: Monitor
    _graded: set[str] = field(default_factory=set)

    @property
    def run_dir(self) -> RunDirectory:
        """The run's folder."""
        return RunDirectory(Path(self.config.run_dir))

    async def run(self) -> None:
        """Measure every version that is due, until the trainer is done.

        consumes: published versions    waits for: the next one, its episodes
        produces: records               unblocked by: the trainer, environments
        """
        self._record_again()
        if self._is_due(0) and not self._is_measured(0):
            await self._measure(0)
        while not isinstance(event := await self.events.receive_event(), TrainerDone):
            if not isinstance(event, PolicyPublished):
                raise ProtocolError(f"a supervised trainer publishes versions; it sent {event}")
            if not self._is_measured(event.version):
                await self.policy.apply(event)
                await self._measure(event.version)
            shutil.rmtree(self.run_dir.version(event.version), ignore_errors=True)
        self._warn_of_missing()

    async def _measure(self, version: int) -> None:
        measured = await self.measurement.measure(version, is_continued=True)
        warn_of_graded_rewards(measured.results, self._graded)
        check_term(self.run_dir, self.config.term)
        metrics = measured.metrics()
        write_json(self.run_dir.evaluation(version), metrics)
        self.monitor.record(metrics, step=version)
        log.info("version %d is evaluated in %.1f s", version, measured.seconds)

    def _record_again(self) -> None:
        """Records of earlier evaluations that lay behind the point that metrics were cut at."""
        recorded = _recorded_versions(self.run_dir.metrics)
        for version in range((self.config.resume_step or 0) + 1):
            if self._is_measured(version) and version not in recorded:
                self.monitor.record(read_json(self.run_dir.evaluation(version)), step=version)

    def _warn_of_missing(self) -> None:
        """Versions of a time when they were not due are gone; nobody shall look for them."""
        versions = range(self.config.max_steps + 1)
        missing = [v for v in versions if self._is_due(v) and not self._is_measured(v)]
        if missing:
            log.warning("versions %s are not evaluated: their weights were not kept", missing)

    def _is_due(self, version: int) -> bool:
        return self.config.eval.is_due(version, max_steps=self.config.max_steps)

    def _is_measured(self, version: int) -> bool:
        return self.run_dir.evaluation(version).is_file()


def _recorded_versions(metrics: Path) -> set[int]:
    """Versions with a record of their evaluation; a line that a crash cut off is none."""
    if not metrics.is_file():
        return set()
    versions = set()
    with metrics.open("rb") as file:
        for line in file:
            try:
                versions.add(int(json.loads(line)["eval/version"]))
            except (ValueError, KeyError, TypeError):
                continue
    return versions
