"""One environment process: verifiers' pool that plays episodes, and our socket that serves tasks.

It owns what verifiers leaves open: the sockets' permissions, the variables that environments see,
and the life of the workers. verifiers does not notice a dead worker; this process says so in
`health` and ends with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gradus.config import EnvironmentProcessConfig, algorithms, variables_named_in
from gradus.environments.containers import (
    RUN_VARIABLE,
    close_without_containers,
    engines_of,
    owner_label,
    refuse_silent,
    remove_left_over,
)
from gradus.environments.load_errors import Stopped
from gradus.environments.pool import (
    SILENT_SECONDS,
    STOPPED_SECONDS,
    Pool,
    PoolSize,
    answers,
    child_environment,
    describe_exit,
    hide_variables,
    worker_secrets,
)
from gradus.environments.roles import complete_roles
from gradus.environments.task_server import TaskServer
from gradus.environments.tasks import TaskIndex, load_tasks
from gradus.environments.verifiers.table import check_libraries
from gradus.environments.verifiers.task_headers import headers_of
from gradus.errors import ConfigError, EnvironmentFailure, ExitCode, GradusError
from gradus.files import read_json, write_json
from gradus.log import get_logger
from gradus.processes.child import LAUNCH_VARIABLE, end_below, end_within, is_launcher_gone
from gradus.processes.liveness import beat_with_loop
from gradus.processes.supervisor import NUM_NAME_CHARACTERS, become_subreaper
from gradus.processes.table import is_stopped
from gradus.run.paths import RunDirectory
from gradus.wire.episode import Health

UNHEALTHY_SECONDS = 1.0
"""How long `health` reports the failure before a process without a launcher ends: that reads it in
the log."""
REMOVAL_SECONDS = 60.0
"""For the containers of a run whose launcher was killed; on a busy machine each takes seconds."""
STOP_GRACE_SECONDS = 0.2
"""A stop signal reaches the whole process group: a pool that ends just before it did not fail."""
TASKS_TO_TRY = 10
"""First tasks, of which one must be readable before anything starts."""
ASK_SECONDS = 5.0
"""Between two checks that the pool answers."""
MAX_SOCKET_PATH_BYTES = 107
"""Longest path of a unix socket that the kernel accepts."""

log = get_logger(__name__)


def serve(config: EnvironmentProcessConfig) -> None:
    """Serve one environment until SIGTERM or SIGINT.

    Raises ConfigError when the environment cannot work as configured and EnvironmentFailure when
    its code, its command, or a process of its pool, fails.
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
        # Orphans of the workers become our children; nothing else would end them.
        end_below(time.monotonic())


def prepare_source(config: EnvironmentProcessConfig) -> None:
    """Run the source's command, unless this launch already ran it before a restart of the process.

    Ends what the command leaves running. Raises ConfigError when there is no such command and
    EnvironmentFailure when it fails or takes too long.
    """
    marker = RunDirectory(Path(config.run_dir)).prepared_file(config.process)
    if not config.prepare or (config.term and _term_in(marker) == config.term):
        return
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
            f"{what} did not end within prepare_seconds = {config.prepare_seconds:g}"
        ) from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)
        command.wait()
    if code:
        raise EnvironmentFailure(f"{what} {describe_exit(code)}; what it said stands above")
    if config.term:
        write_json(marker, {"term": config.term})


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
        longest = len(os.fsencode(directory / "tasks"))
        if longest > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"the socket path {directory}/tasks has {longest} bytes, the kernel takes "
                f"{MAX_SOCKET_PATH_BYTES}; set TMPDIR to a shorter directory"
            )
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if is_launched and is_launcher_gone() and directory.parent.name.startswith("gradus-"):
            # A launcher that was killed cannot remove its folder; the last process does.
            with contextlib.suppress(OSError):
                directory.parent.rmdir()


async def _serve(config: EnvironmentProcessConfig, directory: Path) -> None:
    run_dir = RunDirectory(Path(config.run_dir))
    variables = child_environment(os.environ, named=config.inherited_env)
    secrets = worker_secrets(
        os.environ,
        keys={*variables_named_in(config.verifiers), *config.env_var_names}
        - {*config.inherited_env},
        inference_token=_inference_token(run_dir),
    )
    hide_variables(secrets)
    variables[RUN_VARIABLE] = label = owner_label(run_dir.root.name)
    engines: list[str] = []
    pool = await Pool.start(variables, directory)
    try:
        # Blocks on purpose: some environments can only be imported in the main thread, and nothing
        # is served yet.
        check_libraries(config.headers_from)
        settings = complete_roles(config.name, config.verifiers)
        engines = engines_of(settings)
        refuse_silent(engines)
        if engines:
            end_within(REMOVAL_SECONDS)
        await remove_left_over(engines)
        tasks = load_tasks(
            config.name,
            settings,
            is_rendered=config.algo is not None,
            reads_images=config.reads_images,
            selection=config.tasks,
            warm_containers=config.warm_containers,
            asks_by_text=config.asks_by_text,
        )
        config = config.model_copy(update={"verifiers": settings})
        await check_seats(config, tasks)
        await check_headers(config, tasks)
        await EnvironmentProcess(config, pool, tasks, directory).run(secrets)
    finally:
        await close_without_containers(pool.close, engines, label)


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


class EnvironmentProcess:
    """Owns the task socket of one environment, and knows whether its pool can play."""

    def __init__(
        self, config: EnvironmentProcessConfig, pool: Pool, tasks: TaskIndex, directory: Path
    ) -> None:
        self._config = config
        self._pool = pool
        self._tasks = tasks
        self._directory = directory
        self._size = PoolSize.of(config.pool, config.load_seconds)
        self._run_address = f"ipc://{directory / 'run'}"
        self._reason: str | None = "its workers are starting"
        self._answers = True

    def health(self) -> Health:
        return Health(self._reason is None, self._reason, self._pool.num_workers)

    async def run(self, secrets: Mapping[str, str]) -> None:
        """Serve until a stop signal; EnvironmentFailure when a process of the pool is lost."""
        stopped = _stop_event()
        server = TaskServer(f"ipc://{self._directory / 'tasks'}", self._tasks, self.health)
        try:
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(server.serve())
                others = [
                    group.create_task(beat_with_loop(self._silent)),
                    group.create_task(self._watch_broker()),
                ]
                try:
                    await self._start_pool(stopped, secrets)
                    self._announce(server.address)
                    await self._watch_pool(stopped)
                finally:
                    for task in (serving, *others):
                        task.cancel()
        except* GradusError as errors:
            raise errors.exceptions[0] from None
        finally:
            server.close()

    def _silent(self) -> dict[str, str]:
        name = f"of environment {self._config.name!r}"
        silent = {
            f"worker {pid} {name}": "has not answered and gets no episodes"
            for pid in self._pool.silent_workers
        }
        if not self._answers:
            silent[f"the pool {name} (pid {self._pool.pid})"] = "has not answered"
        return silent

    async def _watch_broker(self) -> None:
        """Notice when the process that hands out the episodes, or plays them all, is blocked.

        After as long as a worker may be silent it is killed, which ends this process: the launcher
        starts it anew.

        waits for: its answer, or the deadline      unblocked by: the pool, time
        """
        blocked_seconds = self._size.patient_with(self._config.verifiers).blocked_seconds
        silence = 0.0
        while True:
            await asyncio.sleep(ASK_SECONDS)
            if self._reason is not None:
                continue
            self._answers = await answers(self._run_address, SILENT_SECONDS)
            silence = 0.0 if self._answers else silence + ASK_SECONDS + SILENT_SECONDS
            if silence >= (STOPPED_SECONDS if is_stopped(self._pool.pid) else blocked_seconds):
                self._pool.give_up(f"it answered nothing for {silence:.0f} s")

    async def _start_pool(self, stopped: asyncio.Event, secrets: Mapping[str, str]) -> None:
        await self._pool.configure(
            self._config.name,
            self._run_address,
            self._size,
            self._config.verifiers,
            secrets=secrets,
            headers_from=self._config.headers_from,
            warm_containers=self._config.warm_containers,
        )
        ready = asyncio.create_task(
            self._pool.wait_ready(
                self._run_address,
                num_workers=self._size.num_at_start,
                timeout_seconds=self._config.load_seconds,
            )
        )
        await _first_of(ready, asyncio.create_task(stopped.wait()))
        if ready.done():
            self._reason = None

    def _announce(self, task_address: str) -> None:
        run_dir = RunDirectory(Path(self._config.run_dir))
        ready = {
            "run_address": self._run_address,
            "task_address": task_address,
            "num_tasks": self._tasks.num_tasks,
            "pid": os.getpid(),
            "term": self._config.term,
        }
        write_json(run_dir.ready_file(self._config.process), ready)
        log.info(
            "serving %s tasks of %r",
            "endless" if self._tasks.num_tasks is None else self._tasks.num_tasks,
            self._tasks.taskset_id,
        )

    async def _watch_pool(self, stopped: asyncio.Event) -> None:
        """Return after a stop signal; EnvironmentFailure when the pool failed.

        consumes: the pool's reports      waits for: a lost process or a stop signal
        produces: health's reason         unblocked by: the operating system
        """
        failed = asyncio.create_task(self._pool.failed())
        await _first_of(failed, asyncio.create_task(stopped.wait()))
        if not failed.done() or failed.cancelled():
            return
        self._reason = failed.result()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_SECONDS):
                await stopped.wait()
                return
        log.error("the environment can no longer play: %s", self._reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.0 if self._config.term else UNHEALTHY_SECONDS):
                await stopped.wait()
        raise EnvironmentFailure(
            f"source {self._config.name!r}: {self._reason}. The episodes that it played are lost; "
            f"the lines above in this log may say why"
        )


async def _first_of(*tasks: asyncio.Task[Any]) -> None:
    """Wait until one task is done, raise its error, and cancel the others."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _stop_event() -> asyncio.Event:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    return stopped


def _inference_token(run_dir: RunDirectory) -> str | None:
    """The token of the run's data routes; None without one, as for a server started by hand."""
    try:
        return run_dir.inference_token.read_text().strip()
    except FileNotFoundError:
        return None
