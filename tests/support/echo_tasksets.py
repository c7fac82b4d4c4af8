"""Deterministic tasksets for tests: what they reward is known, and they can go wrong on request.

verifiers finds a taskset by the name of a top-level module, so the folder `tests/environments`
holds one small module per id that exports a class of this one:

    from echo_tasksets import EchoTaskset

    __all__ = ["EchoTaskset"]
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterable
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

Behaviour = Literal["plain", "nan_reward", "raises", "raises_in_setup", "exits", "hangs", "waits"]


class EchoConfig(vf.TasksetConfig):
    """How many tasks, and what goes wrong in each."""

    num_tasks: int | None = Field(8, ge=0)
    """Number of tasks. None means endless."""
    behaviour: Behaviour = "plain"
    """`nan_reward` scores NaN, `raises` fails in scoring, `exits` leaves it, `hangs` never ends it,
    `waits` never ends a plain function of it."""


class EchoData(vf.TaskData):
    """A text for the model to repeat."""

    answer: str
    """The text to repeat."""
    behaviour: Behaviour
    """What goes wrong."""


class EchoTask(vf.Task[EchoData, vf.State, vf.TaskConfig]):
    """Repeat the prompt: reward 1 for the same text, else 0."""

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Fail here when the task says so."""
        if self.data.behaviour == "raises_in_setup":
            raise RuntimeError("this task always fails in setup")

    @vf.reward  # type: ignore[untyped-decorator]
    async def echoed(self, trace: vf.Trace) -> float:
        """1 when the last reply is the text."""
        match self.data.behaviour:
            case "nan_reward":
                return float("nan")
            case "raises":
                raise RuntimeError("this task always fails in scoring")
            case "exits":
                raise SystemExit("this task always fails by an exit")
            case "hangs":
                await asyncio.Event().wait()
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    def patience(self) -> dict[str, float]:
        """Nothing, in the end."""
        if self.data.behaviour == "waits":
            threading.Event().wait()
        return {}


class EchoTaskset(vf.Taskset[EchoTask, EchoConfig]):
    """`repeat 0`, `repeat 1`, and so on."""

    def __init__(self, config: EchoConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_tasks is None

    def load(self) -> Iterable[EchoTask]:
        """Yield the tasks in order."""
        for index in itertools.islice(itertools.count(), self.config.num_tasks):
            text = f"repeat {index}"
            data = EchoData(prompt=text, answer=text, behaviour=self.config.behaviour)
            yield EchoTask(data, self.config.task)


class AddTools(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    """A tool server of one tool, `add`."""

    TOOL_PREFIX = "calculator"

    @vf.tool  # type: ignore[untyped-decorator]
    def add(self, a: int, b: int) -> str:
        """The sum of two integers."""
        return str(a + b)


class TalkConfig(vf.EnvConfig):
    """A conversation of fixed length."""

    agent: vf.AgentConfig = vf.AgentConfig()
    """The model."""
    num_questions: int = 3
    """User messages of an episode."""


class TalkEnv(vf.Env[TalkConfig]):
    """A simulated user who says `say 0`, `say 1`, and counts the right echoes."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Say one message after the other until the model stops answering."""
        right = 0
        async with agents.agent.interaction(task) as talk:
            for number in range(self.config.num_questions):
                segment = await talk.turn(f"say {number}")
                if segment.terminated:
                    break
                right += segment.last_reply.strip() == f"say {number}"
        talk.trace.record_reward("right", right / self.config.num_questions)


class TalkTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    """Tasks without a prompt: the user opens."""

    def load(self) -> Iterable[vf.Task]:
        """Yield two tasks."""
        for name in ("first", "second"):
            yield vf.Task(vf.TaskData(name=name, system_prompt="repeat"), self.config.task)
