"""One environment process: it loads an environment once, gives its tasks and plays its episodes.

It owns what verifiers leaves open: the socket's permissions, the variables that environments see,
and what a command before it makes. One that is blocked or lost is the launcher's to replace, as any
other process of a run; several of one source share its episodes.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import gc
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgpack
import verifiers.v1 as vf
import zmq
from verifiers.v1.serve import server as verifiers_server
from verifiers.v1.serve.client import EnvClient
from verifiers.v1.serve.delta import pack
from verifiers.v1.serve.types import BaseResponse, HealthRequest, HealthResponse

from gradus.config import EnvironmentProcessConfig, algorithms, variables_named_in
from gradus.environments.blocking import BlockedFor, LoopWatch
from gradus.environments.containers import (
    RUN_VARIABLE,
    close_without_containers,
    engines_of,
    owner_label,
    refuse_silent,
    remove_left_over,
)
from gradus.environments.load_errors import Stopped
from gradus.environments.roles import complete_roles
from gradus.environments.tasks import TaskIndex, load_tasks
from gradus.environments.variables import child_environment, environment_secrets, hide_variables
from gradus.environments.verifiers.patch import replaced
from gradus.environments.verifiers.table import ProcessSettings, apply
from gradus.environments.verifiers.task_headers import headers_of
from gradus.environments.verifiers.tool_servers import (
    START_SECONDS,
    ToolServerLimits,
    granted_seconds,
)
from gradus.errors import ConfigError, EnvironmentFailure, ExitCode, GradusError, first_line
from gradus.files import read_json, write_json
from gradus.log import get_logger
from gradus.processes.child import LAUNCH_VARIABLE, end_below, end_within, is_launcher_gone
from gradus.processes.liveness import beat_with_loop
from gradus.processes.plain_calls import PlainCalls, use_plain_calls
from gradus.processes.supervisor import NUM_NAME_CHARACTERS, become_subreaper
from gradus.run.paths import RunDirectory, environment_process
from gradus.wire.episode import TaskReply, TaskRequest, TaskSetInfo

REMOVAL_SECONDS = 60.0
"""For the containers of a run whose launcher was killed; on a busy machine each takes seconds."""
LEAVE_SECONDS = 5.0
"""How long threads and children of the environment may keep a process that has served."""
COLLECT_AFTER_ALLOCATIONS = (20_000, 20, 50)
"""An episode allocates about twelve thousand tracked objects and leaves few cycles; the collector's
default thresholds spent a fifth of a worker's time on walking the imported modules."""
TASKS_TO_TRY = 10
"""First tasks, of which one must be readable before anything starts."""
MAX_SOCKET_PATH_BYTES = 107
"""Longest path of a unix socket that the kernel accepts."""

log = get_logger(__name__)


def serve(config: EnvironmentProcessConfig) -> None:
    """Serve one environment until SIGTERM or SIGINT.

    Raises ConfigError when the environment cannot work as configured and EnvironmentFailure when
    its code or its command fails.
    """
    # Before the event loop handles the signal, it must unwind the stack so that nothing is left.
    before = signal.signal(signal.SIGTERM, _leave)
    become_subreaper()
    try:
        prepare_source(config)
        with private_directory(Path(config.run_dir).name) as directory:
            asyncio.run(_serve(config, directory))
    finally:
        signal.signal(signal.SIGTERM, before)
        # Orphans of what it started become our children; nothing else would end them.
        end_below(time.monotonic())


def prepare_source(config: EnvironmentProcessConfig) -> None:
    """Run the source's command, unless this launch already ran it before a restart of the process.

    Ends what the command leaves running. Raises ConfigError when there is no such command and
    EnvironmentFailure when it fails or takes too long.
    """
    if not config.prepare:
        return
    source = environment_process(config.name, config.purpose)
    marker = RunDirectory(Path(config.run_dir)).prepared_file(source)
    marker.parent.mkdir(parents=True, exist_ok=True)
    with marker.with_suffix(".lock").open("w") as lock:
        # Of several processes of the source one runs it, and the others wait for its end.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not config.term or _term_in(marker) != config.term:
            _run_command(config)
        if config.term:
            write_json(marker, {"term": config.term})


def _run_command(config: EnvironmentProcessConfig) -> None:
    names = {*config.inherited_env, *config.passed_env} & os.environ.keys()
    own = {name: os.environ[name] for name in names}
    variables = child_environment(os.environ, named=()) | own
    words = shlex.join(config.prepare)
    what = f"source {config.name!r}: prepare = {words!r}"
    log.info("running %s", words)
    try:
        command = subprocess.Popen(
            config.prepare,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"{what} cannot be started: {error.strerror}") from error
    try:
        code = command.wait(config.prepare_seconds)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFailure(
            f"{what} did not end within {config.prepare_seconds:g} s"
        ) from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)
        command.wait()
    if code:
        raise EnvironmentFailure(f"{what} {describe_exit(code)}; what it said stands above")


def describe_exit(exit_code: int) -> str:
    """How a process ended, in words; negative codes are signals."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = " (out of memory, or killed by hand)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _term_in(marker: Path) -> int | None:
    try:
        return int(read_json(marker)["term"])
    except FileNotFoundError:
        return None


def _leave(*_: object) -> None:
    raise Stopped(ExitCode.DONE)


@contextlib.contextmanager
def private_directory(run: str) -> Iterator[Path]:
    """A new directory for sockets that only this user can enter; removed at the end.

    Its name contains the run's name, unless the launch's folder around it already does.
    """
    is_launched = LAUNCH_VARIABLE in os.environ
    prefix = "env-" if is_launched else f"gradus-env-{run[:NUM_NAME_CHARACTERS]}-"
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        longest = len(os.fsencode(directory / "run"))
        if longest > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"the socket path {directory}/run has {longest} bytes, the kernel takes "
                f"{MAX_SOCKET_PATH_BYTES}; set TMPDIR to a shorter directory"
            )
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if is_launched and is_launcher_gone() and directory.parent.name.startswith("gradus-"):
            # A launcher that was killed cannot remove its folder; the last process does.
            with contextlib.suppress(OSError):
                directory.parent.rmdir()


def _prepare(config: EnvironmentProcessConfig, secrets: Mapping[str, str]) -> dict[str, Any]:
    """Hide keys, quiet what is loud, tame the garbage collector, and patch verifiers.

    Returns verifiers' config with the seats of every role.
    """
    variables = child_environment(os.environ, named=config.inherited_env)
    os.environ.clear()
    os.environ.update(variables)
    hide_variables(secrets)
    # Two lines per episode, which say less than its record.
    logging.getLogger("verifiers.v1.rollout").setLevel(logging.WARNING)
    # The interpreter's last collection walks every imported module and would take a second.
    atexit.register(gc.freeze)
    gc.set_threshold(*COLLECT_AFTER_ALLOCATIONS)
    settings = complete_roles(config.name, config.verifiers)
    seconds = granted_seconds(settings, "setup", START_SECONDS)
    limits = ToolServerLimits(seconds, config.max_tool_servers)
    apply(ProcessSettings(limits, config.headers_from, config.warm_containers))
    return settings


async def _serve(config: EnvironmentProcessConfig, directory: Path) -> None:
    run_dir = RunDirectory(Path(config.run_dir))
    keys = {*variables_named_in(config.verifiers), *config.env_var_names} - {*config.inherited_env}
    secrets = environment_secrets(os.environ, keys=keys, inference_token=_inference_token(run_dir))
    # Blocks on purpose, as all up to the server: some environments can only be imported in the main
    # thread, and nothing is served yet.
    settings = _prepare(config, secrets)
    os.environ[RUN_VARIABLE] = label = owner_label(run_dir.root.name)
    async with AsyncExitStack() as closing:
        engines = engines_of(settings)
        refuse_silent(engines)
        if engines:
            end_within(REMOVAL_SECONDS)
        await remove_left_over(engines)
        playing = AsyncExitStack()
        closing.push_async_callback(close_without_containers, playing.aclose, engines, label)
        tasks = load_tasks(
            config.name,
            settings,
            is_rendered=config.algo is not None,
            reads_images=config.reads_images,
            selection=config.tasks,
            warm_containers=config.warm_containers,
            asks_by_text=config.asks_by_text,
        )
        await check_seats(config, tasks)
        await check_headers(config, tasks)
        assert tasks.environment is not None
        use_plain_calls(PlainCalls(config.num_threads))
        server = EnvironmentServer(tasks.environment, tasks, f"ipc://{directory / 'run'}")
        playing.push_async_callback(server.close)
        limits = BlockedFor(
            granted_seconds(settings, "scoring", BlockedFor.scoring),
            settings.get("timeout", {}).get("episode") or BlockedFor.episode,
        )
        with LoopWatch(limits, source=config.name).watching():
            await _play(config, tasks, server)


_ANSWER_SECONDS = 2.0
"""How long a stop waits for episodes to be given up, so that each is answered."""


class EnvironmentServer(verifiers_server.EnvServer):
    """Owns the socket of an environment that is loaded already, and everything that plays.

    A request is `[id, method, payload]`, and what comes back `[id, kind, data]`, any number of
    `delta` and one `reply`. Beside verifiers' own methods there are `info` and `task`, see
    `wire.episode`.
    """

    def __init__(self, environment: vf.Env[Any], tasks: TaskIndex, address: str) -> None:
        """Must be called inside the running event loop, in which it serves from now on."""
        with replaced(verifiers_server, "load_environment", lambda _config: environment):
            super().__init__(environment.config, address)
        self._tasks = tasks
        self.serving = asyncio.create_task(self.run())

    async def answers(self) -> None:
        """Wait until requests are answered: until shared tool servers have started, too."""
        client = EnvClient(self.address)
        try:
            await client._request(HealthRequest(), HealthResponse)
        finally:
            await client.close()

    async def close(self) -> None:
        """Give up what plays, and end what it started."""
        playing = list(self._running.values())
        for task in playing:
            task.cancel()
        if playing:  # each is answered while there is a socket
            await asyncio.wait(playing, timeout=_ANSWER_SECONDS)
        self.serving.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self.serving

    async def _handle(
        self, client_id: bytes, request_id: bytes, method: bytes, payload: bytes
    ) -> None:
        if method not in (b"info", b"task"):
            await super()._handle(client_id, request_id, method, payload)
            return
        try:
            data = pack((await self._answer(method, payload)).model_dump())
        except Exception as error:  # a task that cannot be loaded fails its own request only
            is_told = isinstance(error, GradusError)
            text = f"{error}" if is_told else f"{type(error).__name__}: {error}"
            printable = text.encode(errors="replace").decode()
            data = pack(BaseResponse(success=False, error=printable).model_dump())
        with contextlib.suppress(zmq.ZMQError):  # it did not wait for the answer
            await self.frontend.send_multipart([client_id, request_id, b"reply", data])

    async def _answer(self, method: bytes, payload: bytes) -> TaskSetInfo | TaskReply:
        if method == b"info":
            tasks = self._tasks
            return TaskSetInfo(
                num_tasks=tasks.num_tasks,
                taskset=tasks.taskset_id,
                agents=dict(tasks.agents),
                tools=tasks.offers_tools,
            )
        request = TaskRequest.model_validate(msgpack.unpackb(payload))
        return TaskReply(**await self._tasks.task(request.index))


async def _play(
    config: EnvironmentProcessConfig, tasks: TaskIndex, server: EnvironmentServer
) -> None:
    """Serve until a stop signal; EnvironmentFailure when the server fails.

    waits for: a stop signal, or the end of the server      unblocked by: the launcher
    """
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    beating = asyncio.create_task(beat_with_loop())
    stopping = asyncio.create_task(stopped.wait())
    try:
        answering = asyncio.create_task(server.answers())
        await asyncio.wait({server.serving, stopping, answering}, return_when=FIRST_COMPLETED)
        if answering.done() and not answering.cancelled():
            _announce(config, tasks, server.address)
        answering.cancel()
        await asyncio.wait({server.serving, stopping}, return_when=FIRST_COMPLETED)
        if not stopping.done():
            await server.serving
            raise EnvironmentFailure(f"source {config.name!r}: its server ended by itself")
        leave_soon(ExitCode.DONE)
    except Exception as error:
        leave_soon(ExitCode.INTERNAL)
        raise EnvironmentFailure(
            f"source {config.name!r}: its server failed: {cause_of(error)}. The episodes that it "
            "played are lost; the lines above in this log may say why"
        ) from error
    finally:
        beating.cancel()


def cause_of(error: BaseException) -> str:
    """An error in one line; of several, the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return first_line(f"{type(error).__name__}: {error}")


def leave_soon(code: int, seconds: float = LEAVE_SECONDS) -> None:
    """End this process in a few seconds, even if the environment left something running in it.

    A process whose event loop has ended plays no more, but the interpreter would wait forever for
    its threads and children, and the watch would count it as alive.
    """
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


def _announce(config: EnvironmentProcessConfig, tasks: TaskIndex, address: str) -> None:
    ready = {
        "run_address": address,
        "num_tasks": tasks.num_tasks,
        "pid": os.getpid(),
        "term": config.term,
    }
    write_json(RunDirectory(Path(config.run_dir)).ready_file(config.process), ready)
    number = "endless" if tasks.num_tasks is None else tasks.num_tasks
    log.info("serving %s tasks of %r", number, tasks.taskset_id)


async def check_seats(config: EnvironmentProcessConfig, tasks: TaskIndex) -> None:
    """ConfigError when the source's algorithm cannot learn from the agents of this environment.

    Checked here because only this process knows the agents before a model is loaded.
    """
    if config.algo is None:
        return
    first = await _first_readable(tasks)
    refusal = config.algo.seat_refusal(
        tasks.agents,
        config.untrained_agents,
        has_learner_seat=first.get(algorithms.LEARNER_SEAT) is not None,
    )
    if refusal is not None:
        raise ConfigError(f"source {config.name!r}: {refusal}")


async def check_headers(config: EnvironmentProcessConfig, tasks: TaskIndex) -> None:
    """ConfigError when the first task does not carry headers as `headers_from` says."""
    if config.headers_from is None:
        return
    try:
        headers_of(await _first_readable(tasks), config.headers_from)
    except ValueError as error:
        raise ConfigError(
            f"source {config.name!r}: headers_from does not fit its first task: {error}"
        ) from error


async def _first_readable(tasks: TaskIndex) -> dict[str, Any]:
    """The data of the first task that can be loaded; EnvironmentFailure when none of ten can."""
    number = min(tasks.num_tasks or TASKS_TO_TRY, TASKS_TO_TRY)
    for index in range(number):
        try:
            task_data: dict[str, Any] = (await tasks.task(index))["task_data"]
            return task_data
        except Exception as error:  # the environment's own code, of which one task may be broken
            last = error
            log.warning("task %d cannot be loaded: %s: %s", index, type(error).__name__, error)
    raise EnvironmentFailure(
        f"none of the first {number} tasks can be loaded, the last one because of "
        f"{type(last).__name__}: {last}; fix the data or the environment's package"
    )


def _inference_token(run_dir: RunDirectory) -> str | None:
    """The token of the run's data routes; None without one, as for a server started by hand."""
    try:
        return run_dir.inference_token.read_text().strip()
    except FileNotFoundError:
        return None
