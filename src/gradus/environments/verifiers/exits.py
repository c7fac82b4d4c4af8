"""What an environment's code and the programs that it starts may do to the process they run in."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from verifiers.v1 import env, errors, harness, rollout, session, task
from verifiers.v1.runtimes import subprocess as runtime
from verifiers.v1.serve.server import EnvServer
from verifiers.v1.utils import decorators

from gradus.environments.verifiers.patch import wrap
from gradus.processes.child import dying_with_parent
from gradus.processes.plain_calls import call


def survive_exits() -> None:
    """Let `exit()` in code of an environment, or in what it runs, fail the episode alone.

    asyncio passes `SystemExit` through the loop, which ends the worker with all its episodes.
    """
    for module in (env, harness, rollout, task):
        module.boundary = _Boundary
    task.invoke_all = harness.invoke_all = _invoke_all


class _Boundary:
    """verifiers' `boundary`, for which an exit is an error like any other.

    A class, because two nested generators around each of a dozen stages cost more than the stages.
    """

    def __init__(self, error_cls: type[errors.RolloutError], what: str) -> None:
        self._error_cls = error_cls
        self._what = what

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, errors.RolloutError):
            return
        if isinstance(error, TimeoutError):
            raise self._error_cls(f"{self._what} timed out") from error
        if isinstance(error, SystemExit):
            error = _exit_error(error)
        if isinstance(error, Exception):
            text = f"{self._what}: {type(error).__name__}: {error}"
            raise self._error_cls(text) from error


async def _invoke_all(
    functions: Sequence[Callable[..., Any]], available: Mapping[str, Any]
) -> list[Any]:
    """verifiers' `invoke_all`; an exit must not leave a task, or it ends the loop."""

    return await asyncio.gather(*(scored(function, dict(available)) for function in functions))


async def scored(function: Callable[..., Any], available: dict[str, Any]) -> Any:
    """What a reward, a metric or a judge gives."""
    with _exit_as_error():
        return await decorators.invoke(function, available)


def run_plain_hooks_in_threads() -> None:
    """Let rewards, metrics, set-up and the other hooks of a task be written without `async`, and
    keep nothing waiting: verifiers calls them in the event loop of all episodes."""

    def threaded(invoke: Any) -> Any:
        async def invoke_anywhere(function: Any, available: dict[Any, Any]) -> Any:
            work = partial(invoke, function, available)
            return await call(function, work, hook_name(function))

        return invoke_anywhere

    for module in (decorators, rollout, session):
        wrap(module, "invoke", threaded)


def hook_name(function: Any) -> str:
    """What messages call a hook: its kind, its name, and where it stands."""
    kinds = ("reward", "metric", "stop", "intercept")
    kind = next((f"{it} " for it in kinds if hasattr(function, it)), "")
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
    return f"{kind}{getattr(function, '__qualname__', function)}{place}"


@contextlib.contextmanager
def _exit_as_error() -> Iterator[None]:
    try:
        yield
    except SystemExit as error:
        raise _exit_error(error) from error


def _exit_error(error: SystemExit) -> RuntimeError:
    raised = RuntimeError(
        f"the code asked the interpreter to exit (SystemExit: {error.code}); run code that may do "
        "so in a separate process"
    )
    raised.__cause__ = error
    return raised


def drop_unreadable_requests() -> None:
    """Let a request whose number is no text be lost alone, and not with it all who play."""

    def reading(start: Any) -> Any:
        def start_reading(server: EnvServer, *args: Any, **kwargs: Any) -> None:
            start(server, *args, **kwargs)
            receive = server.frontend.recv_multipart

            async def readable() -> list[bytes]:
                parts: list[bytes] = []
                while not is_readable(parts):
                    parts = await receive()
                return parts

            server.frontend.recv_multipart = readable

        return start_reading

    wrap(EnvServer, "__init__", reading)


def is_readable(parts: Sequence[bytes]) -> bool:
    """Whether verifiers can read a request: who asks, a number, a method, and what is asked."""
    try:
        _, number, method, _ = parts
        return bool(number.decode() and method.decode())
    except ValueError:
        return False


def end_servers_with_worker() -> None:
    """Let what a runtime starts in the background, tool servers above all, die with this process.

    verifiers' servers ask for that themselves, but only after their imports, which take seconds.
    They run in a folder of the episode; what the environment can import, they can.
    """

    def dying(start: Any) -> Any:
        async def start_dying(started: Any, argv: list[str], env: dict[str, str], log: str) -> None:
            if argv[0] == sys.executable:
                env = {**env, "PYTHONPATH": _import_path()}
            command = dying_with_parent(argv) if Path(argv[0]).is_absolute() else argv
            await start(started, command, env, log)

        return start_dying

    wrap(runtime.SubprocessRuntime, "run_background", dying)


def _import_path() -> str:
    """Where this process finds modules and another one of the same interpreter would not look."""
    everywhere = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    entries = dict.fromkeys(map(os.path.abspath, sys.path))
    own = (entry for entry in entries if not entry.startswith(everywhere) and os.path.isdir(entry))
    return os.pathsep.join(own)


def move_episode_folders(temporary: Path) -> None:
    """Put the working folders of episodes below a folder that goes away with the launch."""
    runtime.CACHE_DIR = temporary / "verifiers"
