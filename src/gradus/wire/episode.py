"""What environment processes and the orchestrator agree on about episodes, beyond verifiers."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, Field

LOST = "EnvironmentLost"
"""Kind of the failure of episodes whose process was lost."""
ARE_YOU_THERE = (b"", b"delta", b"")
"""To a client, which looks at it as little as at any delta of no request of its own."""
SETTLE_SECONDS = 0.25
"""Until the socket of a client that was killed is known to be closed."""
FROM_OUTSIDE = "from outside"
"""Words in the message of such a failure where somebody else ended the process, not its code."""
NO_MEMORY = "the kernel had no memory left"
"""Words where that was the kernel, for want of memory."""
CONTEXT_FULL = "context_length"
"""Stop condition of a trace whose next prompt does not fit into the engine's context."""

POLICY_VERSIONS = "policy_versions"
"""In a trace's `info`: number of a message → which versions of the policy sampled its tokens."""
QUARANTINED_TURNS = "quarantined_turns"
"""Key in a trace's `info` under which an environment lists the turns that do not train, for it
could not read them or they were not sampled from the policy alone, by their number among the
sampled turns of the trace, from 0."""
TEMPERATURES = "temperatures"
"""In a trace's `info`: number of a message → the temperature of its tokens, where it is not that of
the source."""
UNTRAINED = "untrained_turns"
"""In a trace's `info`: why turns of a program do not train → their numbers, which are among the
quarantined ones too."""
UNREAD = "unread"
"""Why a turn does not train whose reply the program did not read; each is so until it was read,
where a harness began this list."""
TURN = "gradus_turn"
"""Key in the body of a chat completion: the number of its turn, where somebody notes who read."""
ASKED_SAMPLING = "gradus_sampling"
"""Key in the body of a chat completion: sampling parameters of this call alone."""


def leave_out(info: dict[str, Any], turn: int, reason: str) -> None:
    """Note that a turn does not train, and why."""
    for turns in (
        info.setdefault(QUARANTINED_TURNS, []),
        info.setdefault(UNTRAINED, {}).setdefault(reason, []),
    ):
        turns += [turn] * (turn not in turns)


def take_back(info: dict[str, Any], turn: int, reason: str) -> None:
    """Note that this reason does not hold; the turn trains unless there is another."""
    reasons = info.get(UNTRAINED, {})
    if turn in reasons.get(reason, ()):
        reasons[reason].remove(turn)
        if not any(turn in turns for turns in reasons.values()):
            info[QUARANTINED_TURNS].remove(turn)


class InfoRequest(BaseModel):
    """As all below, in the words of verifiers' server, whose socket carries it."""

    method: ClassVar[str] = "info"


class TaskRequest(BaseModel):
    method: ClassVar[str] = "task"
    index: int


class _Reply(BaseModel):
    success: bool = True
    error: str | None = None


class TaskSetInfo(_Reply):
    """What an environment offers."""

    num_tasks: int | None = None
    """None means endless."""
    taskset: str = ""
    """Id of the taskset."""
    agents: dict[str, bool] = Field(default_factory=dict)
    """Agents of an episode → whether the environment lets them train."""
    tools: bool = False
    """Whether the policy is offered tools."""


class TaskReply(_Reply):
    task_data: dict[str, Any] = Field(default_factory=dict)
    key: str = ""
