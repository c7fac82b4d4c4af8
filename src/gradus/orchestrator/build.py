"""The orchestrator process: connects to its peers, builds the loops, and runs them."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gradus.config import RunProcessConfig, SourceConfig, algorithms
from gradus.errors import CorruptStateError, ProtocolError
from gradus.files import write_atomically
from gradus.heartbeat import beat
from gradus.log import get_logger, note_step
from gradus.monitor import Goal, JsonlMonitor, Monitor, MonitorGroup
from gradus.orchestrator.algorithms import (
    needs_reference,
    reads_policy_tokens,
)
from gradus.orchestrator.algorithms.teacher import (
    RETRY_DELAYS_SECONDS,
    ReferenceModel,
    compare_tokenizers,
    open_reference,
)
from gradus.orchestrator.buffer import GroupBuffer
from gradus.orchestrator.early_end import EarlyEnd
from gradus.orchestrator.evaluation.episodes import EvaluationSource, open_evaluated
from gradus.orchestrator.evaluation.evaluator import RlEvaluation
from gradus.orchestrator.failures import ErrorPolicy, FirstFailures, notify, run_loops
from gradus.orchestrator.groups.batcher import build_batcher
from gradus.orchestrator.groups.grading import build_grader
from gradus.orchestrator.groups.packing import Layout
from gradus.orchestrator.groups.slots import GroupSlots
from gradus.orchestrator.groups.solved import RewardRanges
from gradus.orchestrator.live import LiveWriter
from gradus.orchestrator.orchestrator import Orchestrator
from gradus.orchestrator.play.agents import check_agents
from gradus.orchestrator.play.concurrency import (
    AdmissionRate,
    EngineWatch,
    InFlightController,
    Scheduler,
    build_controller,
)
from gradus.orchestrator.play.environment import (
    Environment,
    TaskRefused,
    build_settings,
    find_environment,
)
from gradus.orchestrator.play.inference_client import LONGEST_START_SECONDS, PolicyClient
from gradus.orchestrator.play.player import EpisodePlayer, Source
from gradus.orchestrator.play.renderer import check_bodies, check_tools, settle_renderer
from gradus.orchestrator.play.replicas import PolicyPool, connect_policy
from gradus.orchestrator.play.restarts import CrashAttribution
from gradus.orchestrator.play.sharing import connect_source
from gradus.orchestrator.play.tasks import SourceShare, TaskQueue, TaskSource
from gradus.orchestrator.records.episodes import EpisodeWriter
from gradus.orchestrator.records.health import Alarms
from gradus.orchestrator.records.journal import Journal, JournalEvent, last_end
from gradus.orchestrator.records.metrics import PendingStepMetrics
from gradus.orchestrator.records.probe import StartProbe
from gradus.orchestrator.records.recording import EpisodeRecording, bounded, open_recording
from gradus.orchestrator.records.watchdog import WaitBoard, Watchdog
from gradus.orchestrator.records.writer import RecordWriter
from gradus.orchestrator.resume.checkpoint import SavedOrchestrator, build_writer, find_saved
from gradus.orchestrator.resume.snapshot import Snapshotter
from gradus.orchestrator.resume.standing import (
    RecordsBefore,
    Standing,
    StandingWriter,
    find_recorded,
    find_standing,
    progress_of,
)
from gradus.orchestrator.trainer_link import TrainerLink, continue_from, progress_of_link
from gradus.processes.child import tune_collector
from gradus.processes.leftovers import was_ended_from_outside
from gradus.processes.liveness import beat_with_loop
from gradus.processes.secured import trust_in
from gradus.run.lease import check_term
from gradus.run.model_files import BestKeeper
from gradus.run.paths import RunDirectory
from gradus.run.ready import read_token, write_ready
from gradus.sealed import open_sealed
from gradus.transport import SpoolSender
from gradus.wire.control_tokens import read_stop_token_ids
from gradus.wire.events import PolicyPublished
from gradus.wire.inference import SERVED_MODEL_NAME

TASKS_TO_TRY = 10
"""One of them must load before anything is played."""

log = get_logger(__name__)


def run(config: RunProcessConfig) -> None:
    """The orchestrator process, from its ready file to the trainer's last step."""
    run_loops(_run(config), tell=partial(notify, RunDirectory(Path(config.run_dir))))


async def _run(config: RunProcessConfig) -> None:
    standing = find_standing(config)
    async with connect(config, standing) as components:
        run_dir = RunDirectory(Path(config.run_dir))
        saved = standing or find_saved(config)
        run_dir.evicted.unlink(missing_ok=True)
        for path in run_dir.good_ends.values():
            path.unlink(missing_ok=True)
        beat("becoming ready")
        write_ready(run_dir, "orchestrator", config.term)
        tune_collector()
        orchestrator = build_orchestrator(config, components, saved)
        watches = [
            asyncio.create_task(beat_with_loop(orchestrator.silent)),
            asyncio.create_task(LiveWriter(run_dir.live, orchestrator, term=config.term).run()),
        ]
        try:
            await orchestrator.play()
            if components.recording is not None:
                components.recording.finish()
        finally:
            for watch in watches:
                watch.cancel()


@dataclass(frozen=True)
class Components:
    """Everything outside the loops; tests put fakes here."""

    sources: Mapping[str, Source]
    policy: PolicyClient
    sender: SpoolSender
    monitor: Monitor
    journal: Journal
    episodes: EpisodeWriter
    check_lease: Callable[[], None]
    """FencedError when this process must stop writing."""
    clock: Callable[[], float]
    """Monotonic seconds, for metrics only."""
    evaluated: Sequence[EvaluationSource] = ()
    """What measures the policy."""
    recording: EpisodeRecording | None = None
    """What a replay needs of each episode."""

    @property
    def environment_watches(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """One for each environment that is played."""
        trained = [source.environment for source in self.sources.values()]
        return [it.watch for it in (*trained, *(source.environment for source in self.evaluated))]


@asynccontextmanager
async def connect(
    config: RunProcessConfig, standing: Standing | None = None
) -> AsyncIterator[Components]:
    """Connect to inference and environments, open the files; all is closed at the end."""
    run_dir = RunDirectory(Path(config.run_dir))
    check_term(run_dir, config.term)
    async with AsyncExitStack() as stack:
        policy = await _connect_policy(config, standing, stack)
        config = config.model_copy(update={"model": await settle_renderer(config.model)})
        sources = {
            source.name: await _open_source(config, source, policy, stack)
            for source in config.sources
        }
        evaluated = [
            await open_evaluated(
                source,
                run_dir,
                build_settings(source, config.model, policy.base_url, run_dir.images),
                stack,
                model=config.model,
                restart_seconds=config.environment_restart_seconds,
            )
            for source in config.evaluation_sources
        ]
        sender = SpoolSender(
            run_dir,
            config.term,
            keeps_trained=config.is_trainer_replaceable,
            keeps_events=config.is_orchestrator_replaceable,
        )
        monitor = MonitorGroup([JsonlMonitor(run_dir.metrics)])
        stack.callback(monitor.close)
        journal = stack.enter_context(Journal(run_dir.journal, term=config.term, now=time.time))
        recording = open_recording(config)
        if recording is not None:
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


async def _connect_policy(
    config: RunProcessConfig, standing: Standing | None, stack: AsyncExitStack
) -> PolicyClient:
    """The policy, which serves what the run continues with."""
    run_dir = RunDirectory(Path(config.run_dir))
    tell = partial(notify, run_dir)
    if (file := config.inference.addresses) is not None:
        # Told by the launcher; an orchestrator that somebody else starts has the config alone.
        os.environ.update(trust_in(config.inference.authority))
        policy: PolicyClient = await PolicyPool(
            Path(file),
            run_dir,
            term=config.term,
            model=config.model.name,
            tell=tell,
            tokenizer=config.model.tokenizer,
        ).begin()
    else:
        policy = await connect_policy(
            run_dir,
            config.inference.processes,
            term=config.term,
            tell=tell,
            # What ended the process before this one may have ended a server too.
            start_seconds=LONGEST_START_SECONDS if standing else 0.0,
        )
    stack.push_async_callback(policy.close)
    await _serve_first(policy, config, standing)
    return policy


async def _serve_first(
    policy: PolicyClient, config: RunProcessConfig, standing: Standing | None
) -> None:
    """Let inference serve what the run begins with, or what it served when a process before this
    one ended, so that a server that takes its place is told the same."""
    version = max(policy.version, standing.progress.num_served) if standing else 0
    if version:
        folder = RunDirectory(Path(config.run_dir).absolute()).version(version)
        try:
            digest = open_sealed(folder, dict).digest
        except CorruptStateError as error:
            # Not for the run: when everything starts again, it is published anew.
            raise ProtocolError(f"version {version} cannot be served again: {error}") from error
        await policy.apply(PolicyPublished(version, config.term, str(folder), digest))
    elif config.resume_step is None:
        await policy.serve_initial()


async def _open_source(
    config: RunProcessConfig, source: SourceConfig, policy: PolicyClient, stack: AsyncExitStack
) -> Source:
    reference = build_reference(config, source, policy)
    if reference is not None:
        stack.push_async_callback(reference.close)
        own = needs_reference(source.algo)
        if source.algo.reference is not None and (reads_policy_tokens(source.algo) or not own):
            async with _policy_reference(config, policy) as ours:
                await compare_tokenizers(reference, ours, source.name)
    grader = build_grader(config, source, reference)
    if observed := getattr(grader.algorithm, "observed_roles", None):
        await check_bodies(source.name, config.model, observed)
    run_dir = RunDirectory(Path(config.run_dir))
    settings = build_settings(source, config.model, policy.base_url, run_dir.images)
    environment = await connect_source(
        partial(find_environment, run_dir, source),
        source,
        settings,
        restart_seconds=config.environment_restart_seconds,
        tell=partial(notify, run_dir),
        was_killed=partial(was_ended_from_outside, run_dir.processes),
    )
    stack.push_async_callback(environment.close)
    info = await environment.info()
    check_tools(source.name, config.model, offers_tools=info.tools)
    if info.agents and info.num_tasks != 0:
        check_agents(
            source,
            info.agents,
            await _first_task_data(environment, info.num_tasks),
            compares_all_traces=grader.has_one_baseline,
        )
    share = SourceShare(source.name, source.ratio, info.num_tasks, source.curriculum)
    errors = ErrorPolicy(source.errors)
    return Source(share, source.group_size, environment, grader, errors, source.is_frozen)


async def _first_task_data(environment: Environment, num_tasks: int | None) -> dict[str, Any]:
    """Of the first task that can be loaded; TaskRefused when none of ten can."""
    last = min(num_tasks or TASKS_TO_TRY, TASKS_TO_TRY) - 1
    for index in range(last):
        with suppress(TaskRefused):
            return (await environment.task(index)).task_data
    return (await environment.task(last)).task_data


def build_reference(
    config: RunProcessConfig, source: SourceConfig, policy: PolicyClient
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
            "turns that come without tokens also train on what the chat template writes after "
            "them",
            source.name,
            config.model.name,
        )
    return _policy_reference(config, policy, stops)


def _policy_reference(
    config: RunProcessConfig, policy: PolicyClient, stop_token_ids: frozenset[int] = frozenset()
) -> ReferenceModel:
    """The policy as it is served."""
    served = algorithms.ReferenceConfig(base_url=policy.base_url, model=SERVED_MODEL_NAME)
    token = read_token(RunDirectory(Path(config.run_dir)).inference_token)
    # While its server is replaced, it is asked as long as that may take.
    longest = RETRY_DELAYS_SECONDS[-1]
    num_delays = math.ceil(LONGEST_START_SECONDS / longest)
    return ReferenceModel(
        served,
        token=token,
        stop_token_ids=stop_token_ids,
        addresses=policy.addresses,
        retry_delays_seconds=(*RETRY_DELAYS_SECONDS, *[longest] * num_delays),
    )


def build_orchestrator(
    config: RunProcessConfig,
    components: Components,
    before: SavedOrchestrator | Standing | None = None,
) -> Orchestrator:
    """The loops, built on these components; a resumed run continues from what was `before`.

    Writes the first line of this process into the journal.
    """
    settings = config.orchestrator
    standing = before if isinstance(before, Standing) else None
    saved = before.saved if isinstance(before, Standing) else before
    progress, recorded = progress_of(before), find_recorded(config, standing)
    note_step(progress.num_finished)
    records, goal = _build_records(config, components, recorded)
    board = WaitBoard(clock=components.clock)
    controller = build_controller(config, components.policy.kv_capacity_tokens)
    scheduler = Scheduler(
        max_in_flight=controller.limit,
        rate=AdmissionRate(per_minute=settings.max_episodes_per_minute),
    )
    groups = _build_buffer(config, components, records, num_served=progress.num_served)
    evaluation = _build_evaluation(config, components, records)
    engine = EngineWatch(
        components.policy,
        controller,
        count=lambda: (scheduler.in_flight, groups.slots.ended.total()),
        on_limit=scheduler.set_limit,
        on_tokens=board.moved,
    )
    player = _build_player(config, components, groups)
    watchdog = Watchdog(
        board,
        settings.stall_seconds,
        oldest=lambda: [e.text(now=components.clock()) for e in player.running],
    )
    trainer = _build_link(config, components, groups, board, recorded)
    snapshotter = _build_snapshotter(config, groups, trainer, evaluation, controller)
    if saved is None:
        components.journal.write(JournalEvent.RUN_STARTED, version=components.policy.version)
    else:
        trainer.to_send_again = snapshotter.restore(saved, progress.num_served)
        scheduler.max_in_flight = controller.limit
    continue_from(progress, trainer, next_step=groups.batcher.step)
    return Orchestrator(
        groups=groups,
        scheduler=scheduler,
        player=player,
        trainer=trainer,
        evaluation=evaluation,
        engine=engine,
        snapshotter=snapshotter,
        standing=_build_standing(config, snapshotter, trainer),
        end=_build_end(config, groups, snapshotter, trainer, evaluation, goal),
        records=records,
        journal=components.journal,
        board=board,
        watches=[*components.environment_watches, evaluation.run, engine.run, watchdog.run],
        clock=components.clock,
    )


def _build_standing(
    config: RunProcessConfig, snapshotter: Snapshotter, trainer: TrainerLink
) -> StandingWriter:
    return StandingWriter(
        snapshotter,
        partial(progress_of_link, trainer),
        trainer.sender.forget_events,
        snapshotter.run_dir.standing_file(config.term),
        is_on=config.is_orchestrator_replaceable,
    )


def _build_records(
    config: RunProcessConfig, components: Components, recorded: RecordsBefore
) -> tuple[RecordWriter, Goal]:
    """The writer, and what may end the run: it knows what the records of a resumed run say."""
    run_dir = RunDirectory(Path(config.run_dir))
    goal = Goal(
        target=config.target_reward,
        patience_steps=config.patience_steps,
        is_evaluated=config.orchestrator.eval is not None,
        num_sources=len(config.orchestrator.train.env),
        tell=partial(notify, run_dir),
    )
    for record in recorded.records:
        goal.note(record.metrics, record.step)
    written = components.monitor, components.episodes
    own, tell = config.orchestrator, partial(notify, run_dir)
    bound = bounded(own.keep_gib, run_dir, components.recording, tell)
    return RecordWriter(*written, components.check_lease, goal.note, bound, recorded.later), goal


def _build_end(
    config: RunProcessConfig,
    groups: GroupBuffer,
    snapshotter: Snapshotter,
    trainer: TrainerLink,
    evaluation: RlEvaluation,
    goal: Goal,
) -> EarlyEnd:
    return EarlyEnd(
        run_dir=snapshotter.run_dir,
        trainer=trainer,
        batcher=groups.batcher,
        snapshotter=snapshotter,
        evaluation=evaluation,
        goal=goal,
        max_lag=config.orchestrator.max_lag,
    )


def _build_player(
    config: RunProcessConfig, components: Components, groups: GroupBuffer
) -> EpisodePlayer:
    return EpisodePlayer(
        components.sources,
        components.policy,
        on_retry=groups.retry,
        clock=components.clock,
        seed=config.seed,
        blame=CrashAttribution(is_set_aside=groups.tasks.is_aside, set_aside=groups.set_aside),
    )


def _build_evaluation(
    config: RunProcessConfig, components: Components, records: RecordWriter
) -> RlEvaluation:
    return RlEvaluation(
        config.orchestrator.eval,
        components.evaluated,
        policy=components.policy,
        recorder=records,
        journal=components.journal,
        keeper=BestKeeper.open(RunDirectory(Path(config.run_dir)), config.term),
        max_steps=config.max_steps,
    )


def _build_buffer(
    config: RunProcessConfig,
    components: Components,
    records: RecordWriter,
    *,
    num_served: int,
) -> GroupBuffer:
    settings, run_dir = config.orchestrator, RunDirectory(Path(config.run_dir))
    tasks = TaskSource([s.share for s in components.sources.values()], seed=config.seed)

    return GroupBuffer(
        sources=components.sources,
        tasks=tasks,
        queue=TaskQueue(tasks),
        slots=GroupSlots(
            budget=(settings.max_lag + 1) * settings.groups_per_batch,
            total_groups=(config.max_steps - num_served) * settings.groups_per_batch,
        ),
        batcher=build_batcher(config, partial(notify, run_dir)),
        journal=components.journal,
        records=records,
        recording=components.recording,
        failures=FirstFailures(run_dir, "train"),
        rewards=RewardRanges(_declared_rewards(config)),
        probe=StartProbe(
            partial(notify, run_dir),
            is_over=num_served > 0,
            is_quiet="failing_episodes" in settings.quiet_alarms,
        ),
    )


def _declared_rewards(config: RunProcessConfig) -> dict[str, float]:
    """The largest possible reward of each source whose curriculum knows it."""
    ranges = {s.name: getattr(s.curriculum, "reward_range", None) for s in config.sources}
    return {name: found[1] for name, found in ranges.items() if found is not None}


def _build_link(
    config: RunProcessConfig,
    components: Components,
    groups: GroupBuffer,
    board: WaitBoard,
    recorded: RecordsBefore,
) -> TrainerLink:
    now, run_dir = components.clock(), RunDirectory(Path(config.run_dir))
    alarms = Alarms(
        sources=list(components.sources),
        tell=partial(notify, run_dir),
        quiet=config.orchestrator.quiet_alarms,
        own=config.orchestrator.alarm,
        save=partial(write_atomically, run_dir.save_request, b""),
    )
    has_stop = any(it.action == "stop" for it in config.orchestrator.alarm)
    alarms.catch_up(recorded.records, ended=last_end(run_dir.journal) if has_stop else -1)
    return TrainerLink(
        sender=components.sender,
        policy=components.policy,
        slots=groups.slots,
        journal=components.journal,
        records=groups.records,
        board=board,
        check_lease=components.check_lease,
        clock=components.clock,
        layout=Layout.of(config),
        term=config.term,
        max_steps=config.max_steps,
        step_metrics=PendingStepMetrics(now=now, alarms=alarms),
        served_at=now,
    )


def _build_snapshotter(
    config: RunProcessConfig,
    groups: GroupBuffer,
    trainer: TrainerLink,
    evaluation: RlEvaluation,
    controller: InFlightController,
) -> Snapshotter:
    grades = {f"algorithm {name}": s.grader.algorithm for name, s in groups.sources.items()}
    draws = {f"curriculum {name}": it for name, it in groups.tasks.curricula.items()}
    return Snapshotter(
        run_dir=RunDirectory(Path(config.run_dir)),
        pieces={
            "tasks": groups.tasks,
            "slots": groups.slots,
            "batcher": groups.batcher,
            "counters": groups.counters,
            "starvation": groups.starvation,
            "rewards": groups.rewards,
            "steps": trainer.step_metrics,
            "evaluation": evaluation,
            "in_flight_limit": controller,
        },
        plugins={**grades, **draws},
        queue=groups.queue,
        batcher=groups.batcher,
        slots=groups.slots,
        groups=groups.groups,
        records=groups.records,
        journal=groups.journal,
        checkpoints=build_writer(config, groups.journal, trainer.sender.forget),
        max_steps=config.max_steps,
    )
