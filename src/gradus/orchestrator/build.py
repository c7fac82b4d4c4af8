"""What the orchestrator is made of, and how each part is built from the process config."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gradus.config import (
    OrchestratorProcessConfig,
    ReferenceConfig,
    SourceConfig,
)
from gradus.errors import ProtocolError
from gradus.log import get_logger
from gradus.monitor.base import Monitor, MonitorGroup
from gradus.monitor.jsonl import JsonlMonitor
from gradus.orchestrator.algorithms import (
    needs_reference,
    reads_policy_tokens,
)
from gradus.orchestrator.algorithms.teacher import (
    ReferenceModel,
    compare_tokenizers,
    open_reference,
)
from gradus.orchestrator.evaluation.episodes import EvaluationSource, open_evaluated
from gradus.orchestrator.failures import build_error_policy
from gradus.orchestrator.groups.grading import build_grader
from gradus.orchestrator.play.agents import check_seats
from gradus.orchestrator.play.environment import (
    Environment,
    build_settings,
    find_environment,
)
from gradus.orchestrator.play.inference_client import InferenceClient, PolicyClient
from gradus.orchestrator.play.player import Source
from gradus.orchestrator.play.renderer import check_tools, settle_renderer
from gradus.orchestrator.play.restarts import connect_environment
from gradus.orchestrator.play.task_socket import TaskRefused
from gradus.orchestrator.play.tasks import SourceShare
from gradus.orchestrator.records.episodes import EpisodeWriter
from gradus.orchestrator.records.journal import Journal
from gradus.orchestrator.records.recording import NoRecording, Recording, open_recording
from gradus.processes.ready import read_token
from gradus.run.lease import check_term
from gradus.run.paths import RunDirectory
from gradus.transport.base import BatchSender
from gradus.transport.spool import SpoolSender
from gradus.wire.inference import SERVED_MODEL_NAME
from gradus.wire.turns import read_stop_token_ids

TASKS_TO_TRY = 10
"""Of which one must be readable before anything is played."""

log = get_logger(__name__)


@dataclass(frozen=True)
class Components:
    """Everything outside the loops; tests put fakes here."""

    sources: Mapping[str, Source]
    policy: PolicyClient
    sender: BatchSender
    monitor: Monitor
    journal: Journal
    episodes: EpisodeWriter
    check_lease: Callable[[], None]
    """FencedError when this process must stop writing."""
    clock: Callable[[], float]
    """Monotonic seconds, for metrics only."""
    evaluated: Sequence[EvaluationSource] = ()
    """What measures the policy."""
    recording: Recording = field(default_factory=NoRecording)
    """What a replay needs of each episode."""


@asynccontextmanager
async def connect(config: OrchestratorProcessConfig) -> AsyncIterator[Components]:
    """Connect to inference and environments, open the files; all is closed at the end."""
    run_dir = RunDirectory(Path(config.run_dir))
    check_term(run_dir, config.term)
    async with AsyncExitStack() as stack:
        policy = await InferenceClient.connect(
            run_dir,
            term=config.term,
            apply_timeout_seconds=config.orchestrator.apply_timeout_seconds,
        )
        stack.push_async_callback(policy.close)
        if policy.version != 0:
            raise ProtocolError(
                f"inference at {policy.base_url} serves version {policy.version}; "
                "a run starts with version 0, so restart inference"
            )
        config = config.model_copy(update={"model": await settle_renderer(config.model)})
        sources = {
            source.name: await _open_source(config, source, policy.base_url, stack)
            for source in config.sources
        }
        evaluation = config.orchestrator.eval
        evaluated = [
            await open_evaluated(
                source,
                run_dir,
                build_settings(source, config.model, policy.base_url),
                stack,
                model=config.model,
                max_retries=evaluation.max_retries,
                restart_seconds=config.environment_restart_seconds,
            )
            for source in config.evaluation_sources
            if evaluation is not None
        ]
        # One batch more than may wait untrained, so that only the slots bound the lag.
        capacity = config.orchestrator.max_lag + 1
        sender = SpoolSender(run_dir, config.term, capacity=capacity)
        stack.push_async_callback(sender.close)
        monitor = MonitorGroup([JsonlMonitor(run_dir.metrics)])
        stack.callback(monitor.close)
        journal = stack.enter_context(Journal(run_dir.journal, term=config.term, now=time.time))
        recording = open_recording(config)
        stack.callback(recording.close)
        columns = {source.name: source.state_columns for source in config.sources}
        yield Components(
            sources=sources,
            policy=policy,
            sender=sender,
            monitor=monitor,
            journal=journal,
            episodes=EpisodeWriter(run_dir.episodes, columns),
            check_lease=partial(check_term, run_dir, config.term),
            clock=time.monotonic,
            evaluated=evaluated,
            recording=recording,
        )


async def _open_source(
    config: OrchestratorProcessConfig, source: SourceConfig, base_url: str, stack: AsyncExitStack
) -> Source:
    reference = build_reference(config, source, base_url)
    if reference is not None:
        stack.push_async_callback(reference.close)
        if source.algo.reference is not None and reads_policy_tokens(source.algo):
            async with _policy_reference(config, base_url) as policy:
                await compare_tokenizers(reference, policy, source.name)
    grader = build_grader(config, source, reference)
    settings = build_settings(source, config.model, base_url)
    environment = connect_environment(
        partial(find_environment, RunDirectory(Path(config.run_dir)), source),
        source,
        settings,
        restart_seconds=config.environment_restart_seconds,
    )
    stack.push_async_callback(environment.close)
    info = await environment.info()
    check_tools(source.name, config.model, offers_tools=info.tools)
    if info.agents and info.num_tasks != 0:
        check_seats(
            source,
            info.agents,
            await _first_task_data(environment, info.num_tasks),
            compares_all_traces=grader.has_one_baseline,
        )
    share = SourceShare(source.name, source.ratio, info.num_tasks, source.curriculum)
    errors = build_error_policy(source.errors, source=source.name)
    return Source(share, source.group_size, environment, grader, errors, source.is_frozen)


async def _first_task_data(environment: Environment, num_tasks: int | None) -> dict[str, Any]:
    """Of the first task that can be loaded; TaskRefused when none of ten can."""
    last = min(num_tasks or TASKS_TO_TRY, TASKS_TO_TRY) - 1
    for index in range(last):
        with suppress(TaskRefused):
            return (await environment.task(index)).task_data
    return (await environment.task(last)).task_data


def build_reference(
    config: OrchestratorProcessConfig, source: SourceConfig, base_url: str
) -> ReferenceModel | None:
    """The model that the source's algorithm asks: its frozen one, or the policy as it is served."""
    if source.algo.reference is not None:
        return open_reference(source.algo.reference, source.name)
    if not needs_reference(source.algo):
        return None
    stops = read_stop_token_ids(config.model.name, config.model.tokenizer)
    if source.is_frozen and not stops:
        log.warning(
            "source %r: no file of model %r on this machine says at which token it ends a turn, so "
            "turns that come without tokens train with all that the chat template writes behind "
            "them",
            source.name,
            config.model.name,
        )
    return _policy_reference(config, base_url, stops)


def _policy_reference(
    config: OrchestratorProcessConfig, base_url: str, stop_token_ids: frozenset[int] = frozenset()
) -> ReferenceModel:
    """The policy as it is served."""
    policy = ReferenceConfig(base_url=base_url, model=SERVED_MODEL_NAME)
    token = read_token(RunDirectory(Path(config.run_dir)).inference_token)
    return ReferenceModel(policy, token=token, stop_token_ids=stop_token_ids)
