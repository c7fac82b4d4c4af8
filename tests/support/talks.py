"""A scripted player for environments that talk turn by turn, without any process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any


class ScriptedTalk:
    """Says what a script says, and keeps what it heard and what was recorded about it."""

    def __init__(self, reply: Callable[[int, str], str | None]) -> None:
        self.heard: list[str] = []
        self.replies: list[str] = []
        self.rewards: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.trace = SimpleNamespace(
            record_reward=self._reward, record_metric=self.metrics.__setitem__, info={}
        )
        self._reply = reply

    def _reward(self, name: str, value: float, weight: float = 1.0) -> None:
        self.rewards[name] = value * weight

    async def turn(self, message: str | None = None) -> SimpleNamespace:
        """One reply; a script that gives None ends the episode as a limit would."""
        self.heard.append(message or "")
        reply = self._reply(len(self.heard) - 1, message or "")
        if reply is not None:
            self.replies.append(reply)
        last = self.replies[-1] if self.replies else ""
        return SimpleNamespace(terminated=reply is None, last_reply=last)


def scripted(replies: Sequence[str | None]) -> ScriptedTalk:
    """Says these in turn, and ends when there are no more."""
    return ScriptedTalk(lambda turn, _: replies[turn] if turn < len(replies) else None)


async def play(environment: type, task: Any, talk: ScriptedTalk, role: str = "agent") -> Any:
    """Play a task of a single-agent environment; gives a trace for its rewards and metrics."""

    @asynccontextmanager
    async def interaction(_: Any) -> AsyncIterator[ScriptedTalk]:
        yield talk

    agents = SimpleNamespace(**{role: SimpleNamespace(interaction=interaction)})
    await object.__new__(environment).run(task, agents)
    messages = [SimpleNamespace(content=reply) for reply in talk.replies]
    last = talk.replies[-1].strip() if talk.replies else ""
    return SimpleNamespace(assistant_messages=messages, last_reply=last, **vars(talk.trace))
