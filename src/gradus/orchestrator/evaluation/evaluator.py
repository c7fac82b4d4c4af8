"""The evaluator process: plays a stand-alone evaluation and keeps its results on disk.

`episodes/step_0/eval.jsonl` gets one line per episode, `progress.json` the numbers so far, and
`results.json` the numbers at the end. What ended without error is never played again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gradus.config import NO_KEY_VARIABLE, EvaluationSourceConfig, EvaluatorProcessConfig
from gradus.files import write_json
from gradus.log import get_logger
from gradus.monitor.jsonl import JsonlMonitor
from gradus.orchestrator.build import open_evaluated
from gradus.orchestrator.evaluation.episodes import (
    EvaluatedEpisode,
    EvaluationPlayer,
    EvaluationSource,
    result_metrics,
    results,
    warn_of_graded_rewards,
    watched,
)
from gradus.orchestrator.evaluation.file import EvaluationFile
from gradus.orchestrator.evaluation.results import EnvironmentResult, EpisodeScore, combine
from gradus.orchestrator.failures import FirstFailures, root_cause
from gradus.orchestrator.play.environment import (
    EnvironmentClient,
    EpisodeSettings,
    build_endpoint_settings,
    build_settings,
    find_environment,
)
from gradus.orchestrator.play.renderer import settle_renderer
from gradus.processes.ready import InferenceReady, read_ready
from gradus.run.lease import check_term
from gradus.run.paths import RunDirectory

log = get_logger(__name__)
PROGRESS_SECONDS = 0.5
"""How often the numbers so far are written."""


def run(config: EvaluatorProcessConfig) -> None:
    """The evaluator process, from its ready file to `results.json`."""
    try:
        asyncio.run(_run(config))
    except BaseExceptionGroup as group:
        raise root_cause(group) from group


async def _run(config: EvaluatorProcessConfig) -> None:
    run_dir = RunDirectory(Path(config.run_dir))
    check_term(run_dir, config.term)
    if config.base_url is None:
        config = config.model_copy(update={"model": await settle_renderer(config.model)})
    async with AsyncExitStack() as stack:
        sources = [await _open(config, source, run_dir, stack) for source in config.sources]
        ready = {"pid": os.getpid(), "term": config.term}
        write_json(run_dir.ready_file("evaluator"), ready)
        await evaluate_sources(config, sources, run_dir)


async def _open(
    config: EvaluatorProcessConfig,
    source: EvaluationSourceConfig,
    run_dir: RunDirectory,
    stack: AsyncExitStack,
) -> EvaluationSource:
    address = find_environment(run_dir, source, "eval")
    client = EnvironmentClient(source.name, address, _settings(config, source, run_dir))
    served = config.model if config.base_url is None else None
    return await open_evaluated(source, client, stack, model=served)


def _settings(
    config: EvaluatorProcessConfig, source: EvaluationSourceConfig, run_dir: RunDirectory
) -> EpisodeSettings:
    if config.base_url is None:
        base_url = read_ready(run_dir, "inference", InferenceReady).base_url
        return build_settings(source, config.model, base_url)
    return build_endpoint_settings(
        source,
        model=config.model.name,
        base_url=config.base_url,
        api_key_var=config.api_key_var or NO_KEY_VARIABLE,
    )


async def evaluate_sources(
    config: EvaluatorProcessConfig, sources: list[EvaluationSource], run_dir: RunDirectory
) -> dict[str, EnvironmentResult]:
    """Play what is missing, write everything down; the numbers at the end."""
    keys = [key for source in sources for key in source.episode_keys()]
    path = run_dir.episodes / "step_0" / "eval.jsonl"
    player = EvaluationPlayer(
        sources, max_in_flight=config.max_in_flight_episodes, max_retries=config.max_retries
    )
    with EvaluationFile.reopen(path, keys) as file:
        progress = Progress(sources, file, run_dir.root / "progress.json")
        progress.write()
        missing = [key for key in keys if key not in file.finished]
        log.info("%d of %d episodes are to be played", len(missing), len(keys))
        async with watched(sources):
            await player.play(missing, version=0, on_end=progress.note)
    check_term(run_dir, config.term)
    progress.write()
    found = progress.results()
    write_json(run_dir.root / "results.json", progress.as_json() | {"model": config.model.name})
    monitor = JsonlMonitor(run_dir.metrics)
    monitor.record(result_metrics(found) | {"eval/version": 0.0}, step=0)
    monitor.close()
    return found


class Progress:
    """Owns the scores so far, and puts each new episode and now and then the numbers on disk."""

    def __init__(self, sources: list[EvaluationSource], file: EvaluationFile, path: Path) -> None:
        self._sources = sources
        self._columns = {source.name: source.state_columns for source in sources}
        self._file = file
        self._path = path
        self._failures = FirstFailures(RunDirectory(path.parent), "eval")
        self._written_at = 0.0
        self._graded: set[str] = set()
        self._scores: dict[str, list[EpisodeScore]] = defaultdict(list)
        self._messages: dict[str, str] = {}
        for key, score in file.finished.items():
            self._scores[key.source].append(score)

    def note(self, ended: EvaluatedEpisode) -> None:
        """An episode ended."""
        self._file.append(ended, self._columns[ended.key.source])
        ended.tell(self._failures)
        self._scores[ended.key.source].append(ended.score())
        if ended.failure is not None:
            self._messages.setdefault(ended.failure.kind, ended.failure.message)
        if time.monotonic() - self._written_at >= PROGRESS_SECONDS:
            self.write()

    def write(self) -> None:
        """Put the numbers so far on disk."""
        self._written_at = time.monotonic()
        write_json(self._path, self.as_json())

    def results(self) -> dict[str, EnvironmentResult]:
        """The numbers of each environment."""
        found = results(self._sources, self._scores)
        warn_of_graded_rewards(found, self._graded)
        return found

    def as_json(self) -> dict[str, Any]:
        """What `progress.json` and `results.json` hold."""
        found = self.results()
        planned = {source.name: source.num_tasks * source.group_size for source in self._sources}
        row = partial(_row, planned)
        return {
            "environments": [row(name, result) for name, result in found.items()],
            "overall": _row(
                {"overall": sum(planned.values())}, "overall", combine(list(found.values()))
            ),
            "error_messages": self._messages,
        }


def _row(planned: dict[str, int], name: str, result: EnvironmentResult) -> dict[str, Any]:
    return {"name": name, "planned_episodes": planned[name], **asdict(result)}
