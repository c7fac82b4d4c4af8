"""What the reward of a task set says of made-up replies, before anything is played."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import verifiers.v1 as vf
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.graph import MessageNode
from verifiers.v1.state import state_cls
from verifiers.v1.trace import AgentInfo, TraceTask

from gradus.errors import ConfigError

AnyTask: TypeAlias = "vf.Task[Any, Any, Any]"
NUM_TASKS = 4
TRIAL_SECONDS = 20.0


class RewardError(Exception):
    """A function that the user named failed; task sets have an error of the same name."""


@dataclass(frozen=True)
class _Tried:
    """One reply, and what it earns."""

    reply: str
    total: float | None = None
    error: Exception | None = None
    is_right: bool = False
    """Whether the task itself gives it as right."""


def try_reward(
    tasks: Sequence[AnyTask], *, num_tasks: int = NUM_TASKS, seconds: float = TRIAL_SECONDS
) -> list[str]:
    """Warnings about a reward that fails for some replies, or is the same for all of them;
    ConfigError for a function of the user's that fails for each.

    Nothing is tried of tasks that do not say what a right reply is, or whose reward looks at
    more than the replies: at a runtime, or at what another model says.
    """
    some = [it for it in tasks[:: max(1, len(tasks) // num_tasks)] if _can_be_tried(it)][:num_tasks]
    tried: list[_Tried] = []
    is_late = threading.Event()

    def try_all() -> None:
        for task, replies in [(it, replies) for it in some for replies in _replies(it)]:
            if is_late.is_set():
                return
            tried.append(replace(_rated(task, replies), is_right=replies == task.gold_replies()))

    # Its code may hang, and then the process ends without it.
    thread = threading.Thread(target=try_all, name="reward trial", daemon=True)
    thread.start()
    thread.join(seconds)
    is_late.set()
    if thread.is_alive():
        return [f"its reward has rated {len(tried)} replies in {seconds:g} s; make it faster"]
    return _said(tried)


def _said(tried: Sequence[_Tried]) -> list[str]:
    failed = [it for it in tried if it.error is not None]
    are_all, first = len(failed) == len(tried), failed[0] if failed else None
    # Other errors may come of what only a played episode has, where some replies are rated.
    is_of_the_user = first is not None and type(first.error).__name__ == RewardError.__name__
    if first is not None and (are_all or is_of_the_user):
        head, *lines = str(first.error).splitlines()
        which = "every reply" if are_all else f"{len(failed)} of {len(tried)}"
        text = f"{head}, for the reply {first.reply!r:.60} and {which} that was tried"
        if are_all and is_of_the_user:
            raise ConfigError("\n".join([text, *lines]))
        return ["\n".join([f"{text}; a reply that fails trains nothing", *lines])]
    totals = {round(it.total, 6) for it in tried if it.total is not None}
    # Without a right one among them, as where that begins with a call of a tool, all may fail.
    if any(it.is_right for it in tried) and len(tried) > 1 and len(totals) == 1:
        return [
            f"its reward is {totals.pop():g} for each of {len(tried)} replies that were tried, "
            "right ones, empty ones and nonsense: where all replies earn the same, nothing is "
            "learned"
        ]
    return []


def _can_be_tried(task: AnyTask) -> bool:
    """Whether its reward takes the replies alone, and a right one is known or none is needed."""
    rewards = task.hooks("reward")
    names = {name for it in rewards for name in inspect.signature(it).parameters}
    return (
        bool(rewards)
        and hasattr(task, "gold_replies")
        and not (task.config.judges or "runtime" in names)
    )


def _replies(task: AnyTask) -> list[list[str]]:
    """The replies of some episodes, turn by turn."""
    gold: Any = task.gold_replies()
    is_plain = isinstance(gold, list) and gold and all(isinstance(it, str) for it in gold)
    return [*([gold] if is_plain else []), [""], ["I do not know."], ["1 2 3 word " * 40]]


def _rated(task: AnyTask, replies: Sequence[str]) -> _Tried:
    said = [vf.UserMessage(content=task.data.prompt_text), *map(_said_by_model, replies)]
    trace: vf.Trace[Any, Any, Any] = vf.Trace(
        task=TraceTask(type=type(task).__name__, data=task.data, key=task.key),
        agent=AgentInfo(config=AgentConfig()),
        state=state_cls(type(task))(),
        nodes=[
            MessageNode(parent=place - 1 if place else None, message=it, sampled=place > 0)
            for place, it in enumerate(said)
        ],
    )
    try:
        asyncio.run(task.score(trace))
    except SystemExit as error:
        return _Tried(replies[-1], error=RewardError(f"its reward exits ({error.code!r})"))
    except Exception as error:
        return _Tried(replies[-1], error=error)
    return _Tried(replies[-1], trace.reward)


def _said_by_model(text: str) -> vf.AssistantMessage:
    return vf.AssistantMessage(content=text)
