"""Asks the judge again with the sides in the other order: a diagnosis that moves no reward.

A judge that prefers what stands first, or last, rewards the order of the seats. The second verdict
is its own conversation, with the same texts under the same names; its trace is taken out of
the episode before anything is scored, so that it never trains and is not recorded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import verifiers.v1 as vf

from gradus.errors import ConfigError
from gradus_kit.multiagent.channels import Said
from gradus_kit.multiagent.kernel import DialogueState, TurnSlot
from gradus_kit.multiagent.pack import JUDGE
from gradus_kit.multiagent.scores import EpisodeScores
from gradus_kit.multiagent.seats import stable_hash

AGAIN = "judge_again"
"""Key of a trace's info: on the second conversation that it is one, and on the judge's own trace
what became of it."""
DEADLINE_SECONDS = 60.0
"""Of the second verdict: an engine that is busy must not cost the episode."""
MAX_REASON_CHARACTERS = 300


def check_order(slots: Sequence[TurnSlot], contestants: Sequence[str], share: float) -> None:
    """ConfigError when no other order exists that the judge could read."""
    if not share:
        return
    turns_of_judge = sum(JUDGE in slot.members for slot in slots)
    counts = {sum(side in slot.members for slot in slots) for side in contestants}
    if len(contestants) != 2 or len(counts) != 1 or slots[-1].members != (JUDGE,):
        reason = "two sides that speak equally often, and a judge who speaks last and alone"
    elif turns_of_judge != 1:
        reason = f"a judge who speaks once; it speaks {turns_of_judge} times"
    else:
        return
    raise ConfigError(f"ask_judge_again = {share:g} needs {reason}")


def is_asked_again(question: str, share: float) -> bool:
    """Tell whether a task is one of those: the same in every episode of it, and in every run."""
    return share > 0 and stable_hash(f"judge/{question}") % 10_000 < share * 10_000


def in_other_order(state: DialogueState, sides: Sequence[str]) -> DialogueState | None:
    """What was said, with each turn of one side where the other's stood; None when one side spoke
    more often."""
    one, other = sides
    place = {one: other, other: one}
    turns = {side: deque(state.turns_of(side)) for side in sides}
    if len(turns[one]) != len(turns[other]):
        return None
    transcript = []
    for said in state.transcript:
        other_said = turns[place[said.member]].popleft() if said.member in place else said
        # Whose turn is next follows from the number of the last one.
        moved = replace(other_said, turn_index=said.turn_index, slot_id=said.slot_id)
        transcript.append(moved)
    return replace(state, transcript=tuple(transcript))


async def ask_judge(agent: Any, task: vf.Task[Any, Any, Any], text: str) -> Said:
    """The judge's reply to `text` in its own conversation; raises when there is none."""

    def mark(trace: vf.Trace) -> None:
        trace.info[AGAIN] = True
        trace.agent.trainable = False

    async with asyncio.timeout(DEADLINE_SECONDS), agent.interaction(task, on_trace=mark) as talk:
        segment = await talk.turn(text)
        if segment.terminated or talk.trace.errors:
            raise ValueError(talk.trace.stop_condition or "the judge did not answer")
        replies = [m for m in segment.messages if isinstance(m, vf.AssistantMessage)]
        thoughts = [m.reasoning_content for m in replies if m.reasoning_content]
        content = replies[-1].content
        return Said(content if isinstance(content, str) else "", "\n".join(thoughts) or None)


def compared(first: EpisodeScores, second: EpisodeScores) -> dict[str, Any]:
    """What the judge's trace says of it: whether the rewards would have been others."""
    if second.undecided is not None:
        return {"failure": second.undecided}
    return {"flipped": first.rewards != second.rewards}


def failed(error: Exception) -> dict[str, Any]:
    """The same when there is no second verdict."""
    return {"failure": f"{type(error).__name__}: {error}"[:MAX_REASON_CHARACTERS]}


def without_second(traces: list[vf.Trace]) -> list[vf.Trace]:
    """The traces of the members."""
    return [trace for trace in traces if trace.info.get(AGAIN) is not True]
