"""The evaluator process: of `gradus eval`, or beside the trainer of a supervised run."""

from __future__ import annotations

from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from gradus.config import (
    NO_KEY_VARIABLE,
    EvalProcessConfig,
    EvaluationSourceConfig,
    SftProcessConfig,
)
from gradus.files import read_json, write_json
from gradus.monitor import JsonlMonitor, MonitorGroup
from gradus.orchestrator.evaluation.episodes import open_evaluated, watched
from gradus.orchestrator.evaluation.evaluator import Evaluator, SftEvaluation, build_evaluator
from gradus.orchestrator.failures import notify, run_loops
from gradus.orchestrator.play.environment import (
    EpisodeSettings,
    build_endpoint_settings,
    build_settings,
)
from gradus.orchestrator.play.inference_client import keep_served
from gradus.orchestrator.play.renderer import settle_renderer
from gradus.orchestrator.play.replicas import connect_policy
from gradus.run.lease import check_term
from gradus.run.paths import RunDirectory
from gradus.run.ready import InferenceReady, read_ready, started_replicas, write_ready
from gradus.run.settings import continued_identity
from gradus.transport import SpoolSender
from gradus.wire.inference import join_addresses


def run(config: EvalProcessConfig | SftProcessConfig) -> None:
    if isinstance(config, EvalProcessConfig):
        run_loops(_evaluate_model(config))
    else:
        run_loops(_follow_trainer(config))


async def _evaluate_model(config: EvalProcessConfig) -> None:
    """Version 0 of the model that the run or an endpoint serves.

    `progress.json` gets the numbers so far, and `results.json` those at the end.
    """
    run_dir = RunDirectory(Path(config.run_dir))
    check_term(run_dir, config.term)
    if config.base_url is None:
        config = config.model_copy(update={"model": await settle_renderer(config.model)})
    progress = run_dir.root / "progress.json"
    async with AsyncExitStack() as stack:
        sources = [
            await open_evaluated(
                source,
                run_dir,
                _settings(config, source, run_dir),
                stack,
                model=config.model if config.base_url is None else None,
            )
            for source in config.evaluation_sources
        ]
        write_ready(run_dir, "evaluator", config.term)
        evaluator = Evaluator(
            sources, run_dir, max_in_flight=config.max_in_flight_episodes, progress=progress
        )
        async with watched(sources):
            measured = await evaluator.measure(0, is_continued=True)
    check_term(run_dir, config.term)
    write_json(progress, measured.table())
    write_json(run_dir.root / "results.json", measured.table() | {"model": config.model.name})
    with closing(JsonlMonitor(run_dir.metrics)) as monitor:
        monitor.record(measured.metrics(), step=0)


def _settings(
    config: EvalProcessConfig, source: EvaluationSourceConfig, run_dir: RunDirectory
) -> EpisodeSettings:
    if config.base_url is None:
        started = started_replicas(run_dir, config.inference.processes)
        ready = (read_ready(run_dir, it, InferenceReady) for it in started)
        base_url = join_addresses([it.base_url for it in ready])
        return build_settings(source, config.model, base_url, run_dir.images)
    return build_endpoint_settings(
        source,
        model=config.model.name,
        base_url=config.base_url,
        api_key_var=config.api_key_var or NO_KEY_VARIABLE,
        images=run_dir.images,
    )


async def _follow_trainer(config: SftProcessConfig) -> None:
    """Every version that the trainer of a supervised run publishes."""
    run_dir = RunDirectory(Path(config.run_dir))
    check_term(run_dir, config.term)
    section = config.eval
    assert section is not None
    keep_identity(run_dir.root / "evaluation.json", config.identity)
    model = await settle_renderer(config.model)
    async with AsyncExitStack() as stack:
        tell = partial(notify, run_dir)
        served = config.inference.processes
        policy = await connect_policy(run_dir, served, term=config.term, tell=tell)
        stack.push_async_callback(policy.close)
        await policy.serve_initial()
        sources = [
            await open_evaluated(
                source,
                run_dir,
                build_settings(source, model, policy.base_url, run_dir.images),
                stack,
                model=model,
            )
            for source in config.evaluation_sources
        ]
        events = SpoolSender(run_dir, config.term)
        monitor = MonitorGroup([JsonlMonitor(run_dir.metrics)])
        stack.callback(monitor.close)
        evaluator = build_evaluator(section, sources, run_dir, policy)
        write_ready(run_dir, "evaluator", config.term)
        async with watched(sources, keep_served(policy)):
            await SftEvaluation(config, evaluator, policy, events, monitor).run()


def keep_identity(path: Path, identity: dict[str, Any]) -> None:
    """Note what is evaluated; ConfigError when earlier episodes are of something else."""
    try:
        before = read_json(path)
    except FileNotFoundError:
        write_json(path, identity)
        return
    write_json(path, continued_identity(before, identity))
