"""Measures versions of the policy, each by every episode of an evaluation.

Who supplies the versions differs, and what a new one must wait for:

    in an RL run          refresh serves a version; the next one waits until the evaluation ended,
                          so that no episode mixes two (docs/decisions.md)
    in a supervised run   the trainer writes a version to disk and trains on; versions queue up
                          there (docs/decisions.md)
    `gradus eval`         only version 0: the model as it is
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gradus.config import EvalSourcesConfig, SftProcessConfig
from gradus.errors import DeadlineError, ProcessError, ProtocolError, StorageError
from gradus.files import DurableFiles, read_json, write_json
from gradus.log import get_logger, note_step
from gradus.monitor import MAX_FAILED_SHARE, Difference, Monitor, mean_of
from gradus.orchestrator.evaluation.episodes import (
    EvaluatedEpisode,
    EvaluationSource,
    play_episodes,
)
from gradus.orchestrator.evaluation.file import EvaluationFile
from gradus.orchestrator.evaluation.results import (
    EnvironmentResult,
    EpisodeScore,
    combine,
    evaluate,
    mean_rewards,
    result_metrics,
)
from gradus.orchestrator.failures import FirstFailures
from gradus.orchestrator.play.inference_client import (
    LONGEST_START_SECONDS,
    EngineFailed,
    PolicyClient,
)
from gradus.orchestrator.play.restarts import CrashAttribution
from gradus.orchestrator.records.journal import Journal, JournalEvent
from gradus.orchestrator.records.writer import RecordWriter
from gradus.run.lease import check_term
from gradus.run.model_files import BestKeeper, BestVersion
from gradus.run.paths import RunDirectory
from gradus.run.records import EVALUATION, read_records
from gradus.sealed import discard
from gradus.transport import SpoolSender
from gradus.wire.events import PolicyPublished, TrainerDone

PROGRESS_SECONDS = 0.5
"""How often the numbers so far are written."""
AWAY_SECONDS = 0.5
"""Between two looks whether a server is there."""

log = get_logger(__name__)


@dataclass
class Measurement:
    """Owns the scores of one version, while its episodes end and afterwards.

    >>> Measurement(20, sources=[]).metrics()["eval/version"]
    20.0
    """

    version: int
    sources: Sequence[EvaluationSource]
    scores: defaultdict[str, list[EpisodeScore]] = field(default_factory=lambda: defaultdict(list))
    """By the name of their source."""
    messages: dict[str, str] = field(default_factory=dict)
    """Kind of error → what the first one said."""
    seconds: float = 0.0
    """What it took, once all episodes have ended."""

    @property
    def num_planned(self) -> int:
        return sum(source.num_episodes for source in self.sources)

    def add(self, ended: EvaluatedEpisode) -> None:
        self.scores[ended.key.source].append(ended.score())
        if ended.failure is not None:
            self.messages.setdefault(ended.failure.kind, ended.failure.message)

    def results(self) -> dict[str, EnvironmentResult]:
        """The numbers so far by environment; one without an episode has its row too."""
        return {
            source.name: evaluate(self.scores[source.name], group_size=source.group_size)
            for source in self.sources
        }

    def best(self) -> BestVersion | None:
        """The average as what may be the best of the run.

        None without one, and where more than MAX_FAILED_SHARE of an environment failed.
        """
        finished = {
            source.name: sum(it.reward is not None for it in self.scores[source.name])
            for source in self.sources
        }
        for source in self.sources:
            failed = source.num_episodes - finished[source.name]
            if failed > MAX_FAILED_SHARE * source.num_episodes:
                log.warning(
                    "version %d cannot become the best one or end the run: %d of %d episodes of %r "
                    "failed, more than %g %%",
                    *(self.version, failed, source.num_episodes, source.name),
                    100 * MAX_FAILED_SHARE,
                )
                return None
        results = self.results()
        average = combine(list(results.values())).avg
        if average is None:
            return None
        found = self._mean([name for name, it in results.items() if it.avg is not None])
        episodes = {source.name: source.num_episodes for source in self.sources}
        return BestVersion(self.version, average, found.low, found.high, episodes, finished)

    def _mean(self, names: Iterable[str]) -> Difference:
        """The average of environments that have one, with its interval over tasks."""
        return mean_of([mean_rewards(self.scores[name]) for name in names])

    def metrics(self) -> dict[str, float]:
        numbers = {"eval/version": float(self.version), "eval/seconds": self.seconds}
        return result_metrics(self.results()) | numbers

    def table(self) -> dict[str, Any]:
        """What `progress.json` and `results.json` hold."""

        found = self.results()
        played = [name for name, it in found.items() if it.avg is not None]

        def row(
            name: str, planned: int, result: EnvironmentResult, of: Sequence[str]
        ) -> dict[str, Any]:
            mean = None if result.avg is None else self._mean(of)
            interval = {"low": mean.low, "high": mean.high} if mean is not None else {}
            return {"name": name, "planned_episodes": planned, **asdict(result), **interval}

        return {
            "environments": [
                row(it.name, it.num_episodes, found[it.name], [it.name]) for it in self.sources
            ],
            "overall": row("overall", self.num_planned, combine(list(found.values())), played),
            "error_messages": dict(self.messages),
        }


class Evaluator:
    """Owns how a version is measured: which episodes, on which engine, into which files."""

    def __init__(
        self,
        sources: Sequence[EvaluationSource],
        run_dir: RunDirectory,
        *,
        max_in_flight: int,
        timeout_seconds: float | None = None,
        policy: PolicyClient | None = None,
        progress: Path | None = None,
    ) -> None:
        """`timeout_seconds` is for all episodes of one version; `policy` says which version is
        served, None when there is only one.

        `progress` gets the numbers so far, and a record that the disk does not take ends the
        evaluation. Without it, beside a training, only the record is lost.
        """
        self.graded: set[str] = set()
        """Environments whose graded rewards were reported."""
        self._sources = sources
        self._run_dir = run_dir
        self._max_in_flight = max_in_flight
        self._timeout_seconds = timeout_seconds
        self._policy = policy
        self._progress = progress
        self._progress_at = -PROGRESS_SECONDS
        self._blame = CrashAttribution.without_journal()
        self._failures = FirstFailures(run_dir, "eval")
        self._columns = {source.name: source.state_columns for source in sources}

    async def measure(self, version: int, *, is_continued: bool = False) -> Measurement:
        """Play every episode on `version`, which must be served now and at the end.

        With `is_continued`, episodes that an earlier process played without error count and are
        not played again. ProtocolError when the engine serves another version.
        """
        begun = time.monotonic()
        await self._check_version(version)
        keys = [key for source in self._sources for key in source.episode_keys()]
        path = self._run_dir.episodes / f"step_{version}" / "eval.jsonl"
        measurement = Measurement(version, self._sources)
        opened = EvaluationFile.reopen(path, keys) if is_continued else EvaluationFile.create(path)
        with opened as file:

            def note(ended: EvaluatedEpisode) -> None:
                measurement.add(ended)
                ended.tell(self._failures)
                self._write(file, ended)
                self._show_progress(measurement)

            for key, score in file.finished.items():
                measurement.scores[key.source].append(score)
            missing = [key for key in keys if key not in file.finished]
            log.info("version %d: %d of %d episodes to play", version, len(missing), len(keys))
            self._show_progress(measurement)
            await play_episodes(
                self._sources,
                missing,
                version=version,
                max_in_flight=self._max_in_flight,
                on_end=note,
                blame=self._blame,
                timeout_seconds=self._timeout_seconds,
            )
        await self._check_version(version)
        warn_of_graded_rewards(measurement.results(), self.graded)
        measurement.seconds = time.monotonic() - begun
        return measurement

    def _write(self, file: EvaluationFile, ended: EvaluatedEpisode) -> None:
        try:
            file.append(ended, self._columns[ended.key.source])
        except (OSError, ValueError) as error:
            if self._progress is not None:
                raise
            log.warning("episode %s of the evaluation is not recorded: %s", ended.key, error)

    def _show_progress(self, measurement: Measurement) -> None:
        """Put the numbers so far on disk, now and then."""
        if self._progress is None or time.monotonic() < self._progress_at + PROGRESS_SECONDS:
            return
        self._progress_at = time.monotonic()
        write_json(self._progress, measurement.table())

    async def _check_version(self, version: int) -> None:
        """The engine itself must say that it serves what is measured, before and after."""
        if self._policy is None:
            return
        served = await _served(self._policy)
        if served != version:
            raise ProtocolError(
                f"inference serves version {served} while version {version} is evaluated; one "
                "evaluation never mixes versions, see the log of inference"
            )


async def _served(policy: PolicyClient) -> int:
    """The version that is served; a server in the place of another is awaited, as by episodes."""
    until = time.monotonic() + LONGEST_START_SECONDS
    while True:
        try:
            status = await policy.status()
            if not status.is_stale or time.monotonic() >= until:
                return status.version
        except (DeadlineError, ProcessError, EngineFailed):
            if time.monotonic() >= until:
                raise
        await asyncio.sleep(AWAY_SECONDS)


def build_evaluator(
    settings: EvalSourcesConfig,
    sources: Sequence[EvaluationSource],
    run_dir: RunDirectory,
    policy: PolicyClient,
) -> Evaluator:
    """The evaluator of a run, in which weights change."""
    return Evaluator(
        sources,
        run_dir,
        max_in_flight=settings.max_in_flight_episodes,
        timeout_seconds=settings.timeout_seconds,
        policy=policy,
    )


def warn_of_graded_rewards(found: Mapping[str, EnvironmentResult], already: set[str]) -> None:
    """Warn once per environment that its rewards allow only an average."""
    for name, result in found.items():
        if not result.is_binary and name not in already:
            already.add(name)
            log.warning(
                "environment %r gives rewards other than 0 and 1: pass@k and pass^k mean nothing "
                "there, only avg@k is reported",
                name,
            )


class Measured(msgspec.Struct, frozen=True):
    """What an RL run has measured."""

    version: int | None
    """The last one. None means that none was."""
    graded: set[str]
    """Environments whose graded rewards were reported."""


class RlEvaluation:
    """Owns which version of an RL run is measured, and holds the weights meanwhile.

        loop      consumes           waits for               produces           unblocked by
        evaluate  versions that are  the next one, episodes  records, a policy  refresh,
                  due                                        free to change     environments

    `released` holds the refresh loop until the evaluation ended. The wait needs neither the trainer
    nor a slot, and every evaluation has a deadline, so it always ends.
    """

    def __init__(
        self,
        settings: EvalSourcesConfig | None,
        sources: Sequence[EvaluationSource],
        *,
        policy: PolicyClient,
        recorder: RecordWriter,
        journal: Journal,
        keeper: BestKeeper,
        max_steps: int,
    ) -> None:
        """`settings` None switches evaluation off."""
        self._settings = settings
        self._max_steps = max_steps
        self._evaluator = (
            None if settings is None else build_evaluator(settings, sources, keeper.run_dir, policy)
        )
        self._keeper = keeper
        self._recorder = recorder
        self._journal = journal
        self._due: asyncio.Queue[int] = asyncio.Queue()
        self._idle = asyncio.Event()
        self._idle.set()
        self._last: int | None = None
        self._measured: int | None = None
        self._has_failed = False

    def begin_if_due(self, version: int) -> None:
        """`version` is served: measure it when the config says so, and not twice."""
        if self._settings is None or self._has_failed or version == self._last:
            return
        if self._settings.is_due(version, max_steps=self._max_steps):
            self._last = version
            self._idle.clear()
            self._due.put_nowait(version)

    def begin_last(self, version: int) -> None:
        """The run ends with `version`, which is served, before its last planned step."""
        self._max_steps = version
        self.begin_if_due(version)

    @property
    def state(self) -> Measured:
        """What was measured to its end; a measurement that a restart cuts off begins again."""
        return Measured(self._measured, self._evaluator.graded if self._evaluator else set())

    @state.setter
    def state(self, state: Measured) -> None:
        self._last = self._measured = state.version
        if self._evaluator:
            self._evaluator.graded = state.graded

    async def released(self) -> float | None:
        """Return when no evaluation needs the served version; the seconds that this took.

        None when evaluation is off.
        """
        if self._settings is None:
            return None
        begun = time.monotonic()
        await self._idle.wait()
        return time.monotonic() - begun

    async def run(self) -> None:
        """Measure what is due, until cancelled.

        consumes: versions that are due    waits for: the next one, its episodes
        produces: records, a free policy   unblocked by: refresh, environments
        """
        try:
            while True:
                await self._measure(await self._due.get())
        finally:
            # After a failure the steps in flight are trained; none waits to be measured.
            self._has_failed = True
            self._idle.set()

    async def _measure(self, version: int) -> None:
        assert self._evaluator is not None
        self._journal.write(JournalEvent.EVALUATION_STARTED, version=version)
        await asyncio.to_thread(self._keeper.stage, version)
        measured = await self._evaluator.measure(version)
        await asyncio.to_thread(self._keeper.settle, measured.best(), version)
        self._recorder.add_metrics(measured.metrics(), step=version)
        self._measured = version
        self._journal.write(
            JournalEvent.EVALUATION_ENDED, version=version, episodes=measured.num_planned
        )
        self._idle.set()


@dataclass
class SftEvaluation:
    """Owns which versions of a supervised run are measured, and their records.

    `episodes/step_<version>/eval.json` says that a version is measured, so a resumed run measures
    only what is missing. A version leaves the disk when its numbers are there.
    """

    config: SftProcessConfig
    evaluator: Evaluator
    policy: PolicyClient
    events: SpoolSender
    """Only its events are read."""
    monitor: Monitor
    files: DurableFiles = field(default_factory=DurableFiles)

    @property
    def run_dir(self) -> RunDirectory:
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
            self._delete(event.version)
        self._warn_of_missing()

    async def _measure(self, version: int) -> None:
        note_step(version)
        keeper = BestKeeper.open(self.run_dir, self.config.term)
        keeper.stage(version)
        measured = await self.evaluator.measure(version, is_continued=True)
        check_term(self.run_dir, self.config.term)
        keeper.settle(measured.best(), version)
        metrics = measured.metrics()
        write_json(self.run_dir.evaluation(version), metrics)
        self.monitor.record(metrics, step=version)
        log.info("version %d is evaluated in %.1f s", version, measured.seconds)

    def _delete(self, version: int) -> None:
        """A kill leaves no half of a version for a resume to find."""
        folder = self.run_dir.version(version)
        if not folder.is_dir():
            return
        try:
            discard(folder, self.config.term, self.files)
        except StorageError as error:
            log.warning("version %d stays on disk: %s", version, error)

    def _record_again(self) -> None:
        """Record evaluations once more whose records a resume cut off with later steps."""
        records = read_records(self.run_dir.metrics)
        recorded = {int(it.metrics[EVALUATION]) for it in records if it.is_evaluation}
        for version in range((self.config.resume_step or 0) + 1):
            if self._is_measured(version) and version not in recorded:
                self.monitor.record(read_json(self.run_dir.evaluation(version)), step=version)

    def _warn_of_missing(self) -> None:
        """A version that was not due when it was trained is gone."""
        versions = range(self.config.max_steps + 1)
        missing = [v for v in versions if self._is_due(v) and not self._is_measured(v)]
        if missing:
            log.warning("versions %s are not evaluated: their weights were not kept", missing)

    def _is_due(self, version: int) -> bool:
        section = self.config.eval
        return section is not None and section.is_due(version, max_steps=self.config.max_steps)

    def _is_measured(self, version: int) -> bool:
        return self.run_dir.evaluation(version).is_file()
