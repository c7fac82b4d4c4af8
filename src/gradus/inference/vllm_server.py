"""vLLM's OpenAI server in this process, behind the guard: for a run, or for ordinary clients.

A run's server has the routes of gradus beside vLLM's own and changes its weights; the other serves
one model and knows no versions.

Imported only once the environment is set (see `server.py`): vLLM reads variables while importing.
"""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import psutil
import uvloop
from fastapi import FastAPI
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.executor.abstract import Executor

from gradus.config import InferenceProcessConfig
from gradus.errors import ConfigError, ProcessError
from gradus.files import write_json
from gradus.inference.admin import PolicyRoutes, WeightAdmin
from gradus.inference.compat import (
    follow_tokenizer_json,
    inspect_models_with_gradus,
    keep_content_plain,
    worker_forked_into_engine,
)
from gradus.inference.gpu.turns import EngineTurns, TurnRoutes
from gradus.inference.guard import Guard, ServedToken, Tokens
from gradus.inference.http_server import (
    HttpServer,
    Stop,
    build_http_server,
    serve_until_stopped,
    warm_up,
)
from gradus.inference.policy_engine import (
    AdapterControl,
    EngineCounters,
    PolicyEngine,
    VllmControl,
    kv_capacity_tokens,
)
from gradus.inference.settings import ServedModel, engine_settings, serving_settings
from gradus.inference.token_route import TokenRoute, beat_with_engine
from gradus.inference.weights_check import build_check, find_initial_weights
from gradus.log import get_logger, note_step
from gradus.processes.started import cause_of_signal, class_of_exit, signal_name
from gradus.run.growing_files import audit
from gradus.run.model_files import text_digests
from gradus.run.paths import RunDirectory
from gradus.run.ready import own_pid
from gradus.wire.inference import ServedPolicy

logger = get_logger(__name__)
WATCH_INTERVAL_SECONDS = 0.05
ENGINE_STOP_SECONDS = 2.0
_START_SECONDS = 3600.0  # `launch.ready_timeout_seconds` is what a user sets.
ENGINE_ENDED = "vLLM's engine process ended; its last lines stand above in this log"
SCHEDULERS = "gradus.inference.engine.scheduler"


def serve_policy(config: InferenceProcessConfig, listener: socket.socket, tokens: Tokens) -> None:
    """Serve on `listener` until SIGTERM or SIGINT; ProcessError when the engine ends by itself."""
    signal.signal(signal.SIGTERM, interrupt)
    uvloop.run(_serve_policy(config, listener, tokens))


def serve_model(
    model: ServedModel, listener: socket.socket, on_listening: Callable[[str], None]
) -> None:
    """As `serve_policy`, for a model whose weights never change."""
    signal.signal(signal.SIGTERM, interrupt)
    uvloop.run(_serve_model(model, listener, on_listening))


def interrupt(*_: Any) -> NoReturn:
    """Before the server listens, SIGTERM unwinds like Ctrl-C, so that the engine is stopped."""
    raise KeyboardInterrupt


async def _serve_policy(
    config: InferenceProcessConfig, listener: socket.socket, tokens: Tokens
) -> None:
    run_dir = RunDirectory(Path(config.run_dir))
    began = time.monotonic()
    args = build_arguments(config)
    follow_tokenizer_json(args)
    counters = EngineCounters()
    engine = start_engine(args, counters)
    counters.kv_capacity_tokens = kv_capacity_tokens(engine.vllm_config.cache_config)
    logger.info("engine started in %.1f s", time.monotonic() - began)

    async def become_ready(base_url: str) -> None:
        left = _START_SECONDS - (time.monotonic() - began)
        # That of the admin, who may ask a server that is still closed to episodes.
        token = run_dir.admin_token.read_text().strip()
        await warm_up(base_url, token, timeout_seconds=max(left, 1.0))
        ready = {"base_url": base_url, "pid": own_pid(), "term": config.term, "version": 0}
        write_json(run_dir.ready_file(config.process), ready)
        note_step(0)
        logger.info("serves %s at %s", config.model.name, base_url)

    async with _running(engine) as stop:
        await engine.update_weight_version("0")
        if config.lora_rank is not None:
            await AdapterControl(engine).load(Path("version_0"))
        app = await build_vllm_app(engine, args)
        admin = build_admin(config, engine, stop)
        model = config.model
        texts = await asyncio.to_thread(text_digests, model.name, model.tokenizer)
        PolicyRoutes(engine, admin, counters, model.name, texts).add_to(app)
        if config.inference.gpu_sharing == "turns":
            turns = EngineTurns(VllmControl(engine), admin, on_broken=_ends(stop))
            TurnRoutes(turns).add_to(app)
        route = TokenRoute(app, engine, await engine.get_supported_tasks(), counters)
        guard = Guard(
            route,
            tokens,
            note=lambda path, status: audit(run_dir, "asked", path=path, status=status),
            is_stale=lambda: admin.served.is_stale or admin.is_broken or engine.errored,
        )
        server = build_http_server(guard)
        beating = asyncio.create_task(
            beat_with_engine(route.probe, lambda: counters.num_steps, lambda: admin.is_paused)
        )
        await _serve_app(app, server, listener, stop, become_ready)
        beating.cancel()


async def _serve_model(
    model: ServedModel, listener: socket.socket, on_listening: Callable[[str], None]
) -> None:
    args = fill_arguments(serving_settings(model, available_bytes=available_bytes()))
    follow_tokenizer_json(args)
    with engine_config(args) as vllm_config, named_signal():
        engine = AsyncLLM.from_vllm_config(
            vllm_config, usage_context=UsageContext.OPENAI_API_SERVER
        )

    async def tell(base_url: str) -> None:
        on_listening(base_url)

    async with _running(engine) as stop:
        app = await build_vllm_app(engine, args)
        server = build_http_server(Guard(app, ServedToken.of(model.token)))
        await _serve_app(app, server, listener, stop, tell)


@asynccontextmanager
async def _running(engine: AsyncLLM) -> AsyncIterator[Stop]:
    """Watch the engine, and end it with the block; ProcessError says how it ended before."""
    stop = Stop()
    watching = asyncio.create_task(watch_engine(engine, stop))
    try:
        await engine.collective_rpc("gradus_die_with_parent")
        yield stop
    except Exception as error:
        # Whoever asks a dead engine fails in a different way, and the first reason counts.
        if not engine.errored:
            raise
        raise await asyncio.to_thread(engine_death, engine.engine_core) from error
    finally:
        watching.cancel()
        await asyncio.to_thread(engine.shutdown, ENGINE_STOP_SECONDS)


async def _serve_app(
    app: FastAPI,
    server: HttpServer,
    listener: socket.socket,
    stop: Stop,
    when_listening: Callable[[str], Awaitable[None]],
) -> None:
    app.state.server = ServerForVllm(stop)
    await serve_until_stopped(server, listener, stop=stop, when_listening=when_listening)


class ServerForVllm:
    """What vLLM's error handlers take for the server: the first request that a dead engine fails
    makes them end it, before `watch_engine` looks, and the reason must be the same."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop

    @property
    def should_exit(self) -> bool:
        return self._stop.error is not None

    @should_exit.setter
    def should_exit(self, _: bool) -> None:
        self._stop.fail(ProcessError(ENGINE_ENDED))


async def watch_engine(engine: AsyncLLM, stop: Stop) -> None:
    """Fail `stop` when the engine's process has ended."""
    while not engine.errored:
        await asyncio.sleep(WATCH_INTERVAL_SECONDS)
    stop.fail(ProcessError(ENGINE_ENDED))


def engine_death(client: Any) -> ProcessError:
    """Why the engine ended, from vLLM's client of a dead one."""
    manager = client.resources.engine_manager
    # Set once vLLM has asked for the exit codes, which only the first to ask is told.
    if isinstance(manager, CoreEngineProcManager) and manager.manager_stopped.wait(
        ENGINE_STOP_SECONDS
    ):
        for process in manager.processes:
            if process.exitcode is not None and process.exitcode < 0:
                return killed_engine(-process.exitcode, process.pid)
    return ProcessError(ENGINE_ENDED)


def killed_engine(number: int, pid: int | None = None) -> ProcessError:
    """The error of an engine that a signal ended, with the class of what ended it."""
    who = "vLLM's engine process" if pid is None else f"vLLM's engine process ({pid})"
    error = ProcessError(f"{who} was killed by {signal_name(number)}: {cause_of_signal(number)}")
    error.exit_code = class_of_exit(-number)
    return error


def build_arguments(config: InferenceProcessConfig) -> Namespace:
    """vLLM's argument namespace; ConfigError names an `extra_args` key that vLLM does not have."""
    return fill_arguments(engine_settings(config, available_bytes=available_bytes()))


def available_bytes() -> int:
    """Free memory of a CPU engine; 0 where the engine runs on a GPU."""
    return psutil.virtual_memory().available if current_platform.is_cpu() else 0


def fill_arguments(settings: Mapping[str, Any]) -> Namespace:
    """vLLM's argument namespace with its defaults and `settings`."""
    parser = make_arg_parser(FlexibleArgumentParser())  # type: ignore[no-untyped-call]
    args: Namespace = parser.parse_args([])
    for name, value in settings.items():
        if not hasattr(args, name):
            raise ConfigError(f"inference.extra_args: vLLM has no argument {name!r}")
        setattr(args, name, value)
    return args


def start_engine(args: Namespace, counters: EngineCounters) -> PolicyEngine:
    with engine_config(args) as vllm_config, named_signal():
        hold_replies(vllm_config)
        return PolicyEngine(
            vllm_config=vllm_config,
            executor_class=Executor.get_class(vllm_config),
            log_stats=False,
            usage_context=UsageContext.OPENAI_API_SERVER,
            log_requests=False,
            stat_loggers=[lambda *_: counters],
        )


@contextmanager
def named_signal() -> Iterator[None]:
    """While the engine starts: name the signal that ended its process, which vLLM gives as a
    negative number in a list of processes."""
    try:
        yield
    except RuntimeError as error:
        found = re.search(r"Failed core proc.*?: -(\d+)", str(error))
        if found is None:
            raise
        raise killed_engine(int(found[1])) from error


def hold_replies(vllm_config: VllmConfig) -> None:
    """Let the engine send whole replies; a scheduler that the user or vLLM chose stays."""
    chosen = vllm_config.scheduler_config
    if chosen.scheduler_cls is not None:
        return
    if current_platform.is_cpu():
        chosen.scheduler_cls = f"{SCHEDULERS}.PacedReplies"
        return
    kind = "OverlappedReplies" if chosen.async_scheduling else "WholeReplies"
    chosen.scheduler_cls = f"{SCHEDULERS}.{kind}"


@contextmanager
def engine_config(args: Namespace) -> Iterator[VllmConfig]:
    """The config of an engine, which must be started while this is open."""
    inspect_models_with_gradus()
    keep_content_plain()
    context = UsageContext.OPENAI_API_SERVER
    vllm_config = AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=context)
    is_one_cpu_worker = current_platform.is_cpu() and vllm_config.parallel_config.world_size == 1
    forked = worker_forked_into_engine(vllm_config) if is_one_cpu_worker else nullcontext()
    with forked:
        yield vllm_config


async def build_vllm_app(engine: AsyncLLM, args: Namespace) -> FastAPI:
    """vLLM's own application, complete, not yet guarded."""
    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    return app


def build_admin(config: InferenceProcessConfig, engine: PolicyEngine, stop: Stop) -> WeightAdmin:
    """What changes the weights; it starts at version 0, in a run until told otherwise stale."""
    run_dir = RunDirectory(Path(config.run_dir))
    initial = find_initial_weights(config.model.name)
    served = ServedPolicy(
        run_id=run_dir.root.resolve().name,
        term=config.term,
        version=0,
        digest=None,
        is_stale=config.awaits_version,
    )
    has_adapter = config.lora_rank is not None
    return WeightAdmin(
        AdapterControl(engine)
        if has_adapter
        else VllmControl(engine, backend=config.broadcast_backend),
        served=served,
        initial_weights=initial,
        weights_root=run_dir.weights,
        verify=build_check(initial, config.lora_rank),
        on_broken=_ends(stop),
    )


def _ends(stop: Stop) -> Callable[[str], None]:
    return lambda reason: stop.fail(ProcessError(f"inference server: {reason}"))
