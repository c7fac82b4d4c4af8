"""What a plug-in must leave on episodes as it is: all that is trained, counted or compared.

verifiers' messages cannot be frozen, so what they hold is compared after the call, and put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from verifiers.v1.episode import WireEpisode
from verifiers.v1.trace import WireTrace

from gradus.gate import is_ours
from gradus.orchestrator.algorithms.base import Algorithm, CreditContext
from gradus.wire.episode import QUARANTINED_TURNS

_OF_NODE = ("parent", "sampled", "token_ids", "mask", "is_content", "logprobs", "message")
_OF_TRACE = ("nodes", "calls", "ok", "errors", "stop_condition", "is_timeout", "metrics")


class InputsChanged(Exception):
    """A plug-in changed what it was given to read."""


@contextmanager
def unchanged(episodes: Iterable[WireEpisode]) -> Iterator[None]:
    """InputsChanged when the body changes an episode beyond its credit and the notes in `info`.

    Whatever happens, the episodes are then as they were.

        >>> with unchanged([]):
        ...     pass
    """
    kept = [it for episode in episodes for it in _kept_of_episode(episode)]
    is_done = False
    try:
        yield
        is_done = True
    finally:
        changed = [what for what, owner, name, value in kept if _put_back(owner, name, value)]
        if changed and is_done:
            raise InputsChanged(
                f"it changed {changed[0]}; a plug-in writes credit (write_credit) and notes "
                "(trace.info), and reads all else"
            )


@contextmanager
def only_credit(
    algorithm: Algorithm, episodes: Iterable[WireEpisode], context: CreditContext
) -> Iterator[None]:
    """`unchanged` for a call of an algorithm, whose numbers are checked then.

    Nothing is compared where all code is ours: it would cost a third of grading.
    """
    is_foreign = not is_ours(algorithm) or algorithm.calls_foreign_code
    with unchanged(episodes if is_foreign else ()):
        yield
    context.check()


_Kept = tuple[str, Any, str, Any]
"""What it is called, who holds it, under which name, and a copy."""


def _kept_of_episode(episode: WireEpisode) -> Iterator[_Kept]:
    yield "traces", episode, "traces", _copy(episode.traces)
    for trace in episode.traces:
        yield from _kept(trace)


def _kept(trace: WireTrace) -> Iterator[_Kept]:
    who = f"of agent {trace.agent.name!r}"
    for name in _OF_TRACE:
        yield f"{name} {who}", trace, name, _copy(getattr(trace, name))
    rewards = {n: None if r is None else r.model_copy() for n, r in trace.rewards.items()}
    yield f"rewards {who}", trace, "rewards", rewards
    for name in ("name", "trainable"):
        yield f"{name} {who}", trace.agent, name, getattr(trace.agent, name)
    turns = trace.info.get(QUARANTINED_TURNS)
    yield f"info.{QUARANTINED_TURNS} {who}", trace, QUARANTINED_TURNS, _copy(turns)
    for number, node in enumerate(trace.nodes):
        place = f"of message {number} {who}"
        for name in _OF_NODE:
            yield f"{name} {place}", node, name, _copy(getattr(node, name))
        yield f"content {place}", node.message, "content", _copy(node.message.content)


def _copy(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict) else value


def _put_back(owner: Any, name: str, value: Any) -> bool:
    """Whether it had been changed."""
    is_note = name == QUARANTINED_TURNS
    found = owner.info.get(name) if is_note else getattr(owner, name, None)
    if found is value or (type(found) is type(value) and found == value):
        return False
    if not is_note:
        setattr(owner, name, value)
    elif value is None:
        owner.info.pop(name)
    else:
        owner.info[name] = value
    return True
