"""A chat with one tool: a shell in the episode's container."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.errors import SandboxError

from gradus.environments.containers import is_kept
from gradus.errors import EnvironmentFailure
from gradus_chat.chat import ChatHarness, ChatHarnessConfig, ChatSession

_SCRIPT = (
    '{ timeout -k 2 "$1" sh -c "$2" 2>&1 </dev/null; code=$?; '
    'if [ "$code" = 124 ]; then echo "[stopped after $1 s]"; else echo "[exit code $code]"; fi; } '
    '| head -c "$3"'
)


RUINED = "error: the container can run no command any more"
GRACE_SECONDS = 30.0
"""Seconds beyond a command's own deadline, which an agent can wreck in its container."""
_NOT_STARTED = (126, 127)
"""What engines answer when the container runs and the command cannot be started in it."""
_PROBE_SECONDS = 10.0


async def is_there(runtime: vf.Runtime) -> bool:
    """Tell whether the engine still has the container, be it in ruins.

    What an agent wrecks is its own work, also a container that it ended, or in which no process
    can be started or continues; an engine that lost the container is not.
    """
    if await _exit_code(runtime) in (0, *_NOT_STARTED):
        return True
    engine, container = getattr(runtime, "engine", None), getattr(runtime, "info", None)
    return bool(engine and container and await is_kept(engine, str(container.id)))


async def is_answering(runtime: vf.Runtime) -> bool:
    """Tell whether a command that does nothing succeeds."""
    return await _exit_code(runtime) == 0


async def _exit_code(runtime: vf.Runtime) -> int | None:
    """Of a command that does nothing; None when there is none in time."""
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            return int((await runtime.run(["true"], {})).exit_code)
    except (SandboxError, TimeoutError):
        return None


class ShellHarnessConfig(ChatHarnessConfig):
    """The keys of the chat harness, and what a command may cost."""

    id: str = "gradus-swe-sandbox"
    """Id under which verifiers imports it."""
    command_seconds: float = Field(30.0, gt=0, le=600)
    """Time of one command; then it is killed and the model is told."""
    max_output_bytes: int = Field(10_000, ge=200)
    """Output of one command that is read; a command that writes more is ended by it."""


class Shell:
    """The tool `shell` of one episode."""

    def __init__(self, runtime: vf.Runtime, config: ShellHarnessConfig) -> None:
        self._runtime = runtime
        self._config = config
        self.tools: list[dict[str, Any]] = [
            {
                "name": "shell",
                "description": (
                    "Run a command in a shell of the container. Each call starts in the working "
                    f"directory and may take {config.command_seconds:g} s."
                ),
                "inputSchema": {
                    "type": "object",
                    "properties": {"command": {"type": "string"}},
                    "required": ["command"],
                },
            }
        ]

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:  # noqa: ARG002
        """The output of a command, standard error between it, and how it ended."""
        command = arguments.get("command")
        if not isinstance(command, str) or set(arguments) != {"command"}:
            return 'error: the tool takes {"command": "..."}'
        if "\0" in command:
            return "error: a command cannot hold a zero byte"
        command = command.encode("utf-8", "replace").decode()
        config = self._config
        bounds = (f"{config.command_seconds:g}", command, str(config.max_output_bytes))
        try:
            async with asyncio.timeout(config.command_seconds + GRACE_SECONDS):
                done = await self._runtime.run(["sh", "-c", _SCRIPT, "sh", *bounds], {})
        except TimeoutError:
            return f"error: no answer after {config.command_seconds + GRACE_SECONDS:g} s"
        if done.exit_code != 0 and not done.stdout and await _exit_code(self._runtime) != 0:
            if not await is_there(self._runtime):
                raise EnvironmentFailure(f"the container is gone: {done.stderr.strip()[:300]}")
            return RUINED
        text: str = done.stdout or done.stderr
        if len(text.encode("utf-8", "replace")) >= config.max_output_bytes:
            text += f"\n[ended after {config.max_output_bytes} bytes of output]"
        return text


class ShellSession(ChatSession):
    """A conversation whose tools are the task's and the shell."""

    @classmethod
    async def open(
        cls, harness: Any, stack: AsyncExitStack, *args: Any, **kwargs: Any
    ) -> ShellSession:
        """As a chat, with the shell beside the task's tools."""
        session = await super().open(harness, stack, *args, **kwargs)
        assert isinstance(session, cls)
        session._tools.add(Shell(session.runtime, harness.config))
        return session


class ShellHarness(ChatHarness, vf.Harness[ShellHarnessConfig]):
    """Plays a seat as a chat in whose turns the model may run commands in its container."""

    NEEDS_CONTAINER = True
    EXECUTES_CODE = True

    @property
    def session_type(self) -> type[ChatSession]:
        return ShellSession
