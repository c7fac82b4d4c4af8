"""One measurement: every episode of an evaluation, on exactly one version of the policy."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradus.config import EvalSourcesConfig
from gradus.errors import ProtocolError
from gradus.log import get_logger
from gradus.orchestrator.evaluation.episodes import (
    EvaluatedEpisode,
    EvaluationPlayer,
    EvaluationSource,
    result_metrics,
    results,
)
from gradus.orchestrator.evaluation.file import EvaluationFile
from gradus.orchestrator.evaluation.results import EnvironmentResult, EpisodeScore
from gradus.orchestrator.failures import FirstFailures
from gradus.orchestrator.play.inference_client import PolicyClient
from gradus.orchestrator.play.restarts import Blame
from gradus.run.paths import RunDirectory

log = get_logger(__name__)


@dataclass(frozen=True)
class Measured:
    """What an evaluation of one version found."""

    version: int
    results: Mapping[str, EnvironmentResult]
    """The numbers of every environment by its name."""
    num_episodes: int
    seconds: float

    def metrics(self) -> dict[str, float]:
        """What a record of the version holds."""
        numbers = {"eval/version": float(self.version), "eval/seconds": self.seconds}
        return result_metrics(self.results) | numbers


class Measurement:
    """Owns how a version is measured: which episodes, on which engine, into which files.

    >>> measured = await measurement.measure(20)  # doctest: +SKIP
    """

    def __init__(
        self,
        settings: EvalSourcesConfig,
        sources: Sequence[EvaluationSource],
        *,
        policy: PolicyClient,
        episodes: Path,
    ) -> None:
        self._settings = settings
        self._sources = sources
        self._columns = {source.name: source.state_columns for source in sources}
        self._policy = policy
        self._episodes = episodes
        self._blame = Blame.apart()
        self._failures = FirstFailures(RunDirectory(episodes.parent), "eval")

    async def measure(self, version: int, *, is_continued: bool = False) -> Measured:
        """Play every episode on `version`, which must be served now and at the end.

        With `is_continued`, episodes that an earlier process played without error count and are
        not played again. ProtocolError when the engine serves another version.
        """
        begun = time.monotonic()
        await self._check_version(version)
        keys = [key for source in self._sources for key in source.episode_keys()]
        path = self._episodes / f"step_{version}" / "eval.jsonl"
        scores: dict[str, list[EpisodeScore]] = defaultdict(list)
        opened = EvaluationFile.reopen(path, keys) if is_continued else EvaluationFile.create(path)
        with opened as file:

            def note(ended: EvaluatedEpisode) -> None:
                scores[ended.key.source].append(ended.score())
                ended.tell(self._failures)
                self._write(file, ended)

            for key, score in file.finished.items():
                scores[key.source].append(score)
            missing = [key for key in keys if key not in file.finished]
            player = EvaluationPlayer(
                self._sources,
                max_in_flight=self._settings.max_in_flight_episodes,
                max_retries=self._settings.max_retries,
                blame=self._blame,
            )
            await player.play(
                missing,
                version=version,
                on_end=note,
                timeout_seconds=self._settings.timeout_seconds,
            )
        await self._check_version(version)
        seconds = time.monotonic() - begun
        return Measured(version, results(self._sources, scores), len(keys), seconds)

    def _write(self, file: EvaluationFile, ended: EvaluatedEpisode) -> None:
        """A disk that cannot take a record costs the record, not the run."""
        try:
            file.append(ended, self._columns[ended.key.source])
        except (OSError, ValueError) as error:
            log.warning("episode %s of the evaluation is not recorded: %s", ended.key, error)

    async def _check_version(self, version: int) -> None:
        """The engine itself must say that it serves what is measured, before and after."""
        served = (await self._policy.status()).version
        if served != version:
            raise ProtocolError(
                f"inference serves version {served} while version {version} is evaluated; one "
                "evaluation never mixes versions, see the log of inference"
            )
