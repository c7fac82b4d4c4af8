"""verifiers' worker pool as a child process that is watched, and the variables that it may see.

An environment is foreign code, and its worker answers requests that may name any variable as a
key. So a worker starts with the few variables that programs need and what the source's `env_vars`
and `pass_env` name; nothing else of the caller's shell. Keys and tokens that the worker itself
needs reach it outside its environment, so that programs that it starts do not inherit them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from gradus.config import ElasticPoolConfig, StaticPoolConfig
from gradus.errors import DeadlineError, EnvironmentFailure
from gradus.log import LogSettings, get_logger
from gradus.processes.child import LAUNCH_VARIABLE
from gradus.processes.secured import AUTHORITY_VARIABLE
from gradus.processes.started import PASSED_TO_EVERY_PROCESS
from gradus.wire.inference import INFERENCE_TOKEN_VARIABLE

LOAD_SECONDS = 300.0
SILENT_SECONDS = 10.0
"""A process of the pool that answers nothing for so long gets no episodes."""
STOPPED_SECONDS = 20.0
"""One that a signal stopped for so long is lost."""
BLOCKED_SECONDS = 120.0
"""verifiers' own deadline of scoring; a worker that blocks for longer is lost."""
CLOSE_TIMEOUT_SECONDS = 10.0
"""After SIGTERM the pool closes its episodes, tool servers and runtimes; then it is killed."""


HUB_TOKEN_VAR = "HF_TOKEN"

_ALLOWED = PASSED_TO_EVERY_PROCESS | {
    "TOKENIZERS_PARALLELISM",
    "OMP_NUM_THREADS",
    "DOCKER_HOST",
    AUTHORITY_VARIABLE,
    # The mark by which the launcher finds what an environment leaves running.
    LAUNCH_VARIABLE,
}
_ALLOWED_PREFIXES = ("LC_",)
_STDERR = 2
_START = """
import sys
from gradus.installed import see_folder
from gradus.processes.child import uncollected
see_folder()
with uncollected():
    from gradus.environments.pool_process import main
main(*sys.argv[1:])
"""
"""Not `-m`, because a module imports what it needs before it can stop the search for garbage."""

log = get_logger(__name__)


@dataclass(frozen=True)
class PoolSize:
    """The size of a pool, in the words of verifiers' `serve_env`."""

    max_workers: int | None
    elastic: bool
    multiplex: int
    num_at_start: int
    max_tool_servers: int
    blocked_seconds: float = BLOCKED_SECONDS
    """How long the environment's code may keep a worker from answering."""
    load_seconds: float = LOAD_SECONDS
    """How long a worker may take until it answers for the first time."""

    @classmethod
    def of(
        cls, config: StaticPoolConfig | ElasticPoolConfig, load_seconds: float = LOAD_SECONDS
    ) -> PoolSize:
        """The size that a source's `pool` describes."""
        patience = {"load_seconds": load_seconds}
        if isinstance(config, StaticPoolConfig):
            workers = config.num_workers
            return cls(workers, False, 128, workers, config.max_tool_servers, **patience)
        most, places = config.max_workers, config.multiplex
        return cls(most, True, places, 1, config.max_tool_servers, **patience)

    def tool_servers(self, data: Mapping[str, Any]) -> dict[str, float]:
        """Limits of a worker's tool servers; the longest set-up that a seat in `data` grants."""
        found = _granted(data, "setup")
        seconds = {"start_seconds": max(found)} if found else {}
        return {"max_at_once": self.max_tool_servers, **seconds}

    def patient_with(self, data: Mapping[str, Any]) -> PoolSize:
        """With as long for code that blocks as the seats in `data` grant their scoring."""
        granted = max([BLOCKED_SECONDS, *_granted(data, "scoring")])
        return replace(self, blocked_seconds=granted)


class Pool:
    """Owns the process of verifiers' broker; it owns the workers.

    pool = await Pool.start(environment_variables, directory)
    await pool.configure("words", address, size, verifiers_config)
    await pool.wait_ready(address, num_workers=1, timeout_seconds=60)
    reason = await pool.failed()
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        death_pipe: int,
        reports: asyncio.StreamReader,
    ) -> None:
        self._process = process
        self._death_pipe = death_pipe
        self._reports = reports
        self._given_up = ""
        self._watch = asyncio.create_task(self._watch_reports())
        self.num_workers = 1
        """Living worker processes; the broker itself when it is the only one."""
        self.silent_workers: list[int] = []
        """Workers that do not answer, and so get no episodes."""

    @classmethod
    async def start(cls, variables: Mapping[str, str], directory: Path) -> Pool:
        """Start the process; it warms up and waits for its settings.

        Its sockets go into `directory`, which it removes at its end.
        """
        death_read, death_write = os.pipe()
        report_read, report_write = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", _START),
                *(str(death_read), str(report_write), str(directory)),
                stdin=asyncio.subprocess.PIPE,
                stdout=_STDERR,
                env=dict(variables),
                pass_fds=(death_read, report_write),
            )
        finally:
            os.close(death_read)
            os.close(report_write)
        reports = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reports), os.fdopen(report_read, "rb")
        )
        return cls(process, death_write, reports)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def configure(
        self,
        name: str,
        address: str,
        size: PoolSize,
        data: dict[str, Any],
        *,
        secrets: Mapping[str, str],
        headers_from: str | None = None,
        warm_containers: int = 0,
    ) -> None:
        """Tell the process what to serve; `data` is verifiers' EnvConfig.

        `secrets` are variables for the workers, not for the programs that they start.
        `headers_from` is the field of a task's data with headers for its model requests.
        """
        settings = {
            "name": name,
            "secrets": dict(secrets),
            "logs": asdict(LogSettings.current()),
            "headers_from": headers_from,
            "warm_containers": warm_containers,
            "tool_servers": size.tool_servers(data),
            "address": address,
            "size": asdict(size.patient_with(data)),
            "config_data": data,
        }
        stdin = self._process.stdin
        assert stdin is not None, "the process was started with a pipe"
        with contextlib.suppress(ConnectionError):  # its end is reported by `failed`
            stdin.write(json.dumps(settings).encode() + b"\n")
            await stdin.drain()
            stdin.close()

    async def wait_ready(self, address: str, *, num_workers: int, timeout_seconds: float) -> None:
        """Return when `num_workers` workers answer; the pool's socket alone answers earlier."""
        # A method that verifiers does not know is passed on to the least busy worker, which refuses
        # it: the broker itself answers `health`, and so would be ready before any worker.
        answered = asyncio.create_task(_ask(address, b"gradus_probe", times=num_workers))
        failed = asyncio.create_task(self.failed())
        try:
            done, _ = await asyncio.wait(
                {answered, failed},
                timeout=timeout_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if failed in done:
                raise EnvironmentFailure(f"while it started, {failed.result()}")
            if not done:
                raise DeadlineError(
                    f"the environment's workers did not answer within {timeout_seconds:g} s; "
                    "its log says what they wait for"
                )
        finally:
            for task in (answered, failed):
                task.cancel()
            await asyncio.gather(answered, failed, return_exceptions=True)

    async def failed(self) -> str:
        """Wait until a process of the pool is lost; says what happened."""
        return await asyncio.shield(self._watch)

    async def _watch_reports(self) -> str:
        cause = ""
        async for line in self._reports:
            report = json.loads(line)
            if "cause" in report:
                cause = f": {report['cause']}" if report["cause"] else ""
            if "lost" in report:
                if not report["is_replaced"]:
                    return f"{report['lost']}"
                log.warning("%s; another takes its place and its episodes", report["lost"])
                self.silent_workers = [it for it in self.silent_workers if it != report["pid"]]
            self.num_workers = report.get("num_workers", self.num_workers)
            self._note_silent(report.get("silent", self.silent_workers))
        exit_code = await self._process.wait()
        how = self._given_up or describe_exit(exit_code)
        return f"the pool's process {self.pid} {how}{cause}"

    def give_up(self, reason: str) -> None:
        """Kill the process, so that `failed` returns."""
        self._given_up = f"was killed: {reason}"
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _note_silent(self, silent: list[int]) -> None:
        for pid in set(silent) - set(self.silent_workers):
            log.warning("worker %s does not answer; it gets no episodes until it does", pid)
        for pid in set(self.silent_workers) - set(silent):
            log.info("worker %s answers again", pid)
        self.silent_workers = silent

    async def close(self) -> None:
        self._watch.cancel()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                log.warning("the pool did not end within %g s; killing it", CLOSE_TIMEOUT_SECONDS)
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        os.close(self._death_pipe)
        await asyncio.gather(self._watch, return_exceptions=True)


def _granted(data: Mapping[str, Any], stage: str) -> list[float]:
    """The deadlines that the seats of an environment set for a stage."""
    seats = [seat for seat in data.values() if isinstance(seat, Mapping)]
    timeouts = [seat["timeout"] for seat in seats if isinstance(seat.get("timeout"), Mapping)]
    return [seconds for timeout in timeouts if (seconds := timeout.get(stage))]


def describe_exit(exit_code: int) -> str:
    """How a process ended, in words; negative codes are signals."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = " (out of memory, or killed by hand)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


async def answers(address: str, timeout_seconds: float) -> bool:
    """Whether the process behind `address`, a broker or the only worker, answers in time."""
    try:
        async with asyncio.timeout(timeout_seconds):
            await _ask(address, b"health")
    except TimeoutError:
        return False
    return True


async def _ask(address: str, method: bytes, *, times: int = 1) -> None:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.connect(address)
        for _ in range(times):
            await socket.send_multipart([uuid.uuid4().hex.encode(), method, b"\xc0"])
        for _ in range(times):
            await socket.recv_multipart()
    finally:
        socket.close()
        context.term()


def child_environment(caller: Mapping[str, str], *, named: Iterable[str]) -> dict[str, str]:
    """The variables of the pool's processes, which every program that they start inherits.

    `named` are the names of the source's own variables.
    """
    wanted = set(named) | _ALLOWED
    chosen = {
        name: value
        for name, value in caller.items()
        if name in wanted or name.startswith(_ALLOWED_PREFIXES)
    }
    # Libraries send no telemetry, even if the caller's shell allows it.
    chosen.update(HF_HUB_DISABLE_TELEMETRY="1", DO_NOT_TRACK="1", PYTHONUNBUFFERED="1")
    for name in (INFERENCE_TOKEN_VARIABLE, HUB_TOKEN_VAR):
        chosen.pop(name, None)
    return chosen


def worker_secrets(
    caller: Mapping[str, str], *, keys: Iterable[str], inference_token: str | None
) -> dict[str, str]:
    """What a worker may read, and no program that it starts: see `hide_variables`.

    The token of the run's data routes, and the `keys` that the config names. Without an inference
    token none is set, and the model is asked without one.
    """
    names = {*keys} - {INFERENCE_TOKEN_VARIABLE}
    secrets = {name: caller[name] for name in names if name in caller}
    if inference_token is not None:
        secrets[INFERENCE_TOKEN_VARIABLE] = inference_token
    return secrets


def hide_variables(secrets: Mapping[str, str]) -> None:
    """Let code of this process read `secrets` in `os.environ`, and no process that it starts.

    A lookup by name finds them; they are neither inherited, nor listed, nor copied.
    """
    hidden = dict(secrets)
    plain: Any = type(os.environ)

    class HidingEnviron(plain):
        def __getitem__(self, name: str) -> Any:
            try:
                return super().__getitem__(name)
            except KeyError:
                if name in hidden:
                    return hidden[name]
                raise

        def __delitem__(self, name: str) -> None:
            if name in set(self) or name not in hidden:
                super().__delitem__(name)
            hidden.pop(name, None)

    for name in hidden:
        os.environ.pop(name, None)
    os.environ.__class__ = HidingEnviron
