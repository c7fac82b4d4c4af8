"""Copies of episodes for plug-ins: what they keep or change is theirs, and only credit and notes
come back.

verifiers' messages cannot be frozen, and a plug-in may keep what it was given until long after its
call. So it never holds what is trained, counted or recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import WireTrace

from gradus.wire.episode import POLICY_VERSIONS, QUARANTINED_TURNS, TEMPERATURES, UNTRAINED

_CREDIT = ("advantages", "reference_logprobs", "loss_weights")
_OF_NODE = (
    *("parent", "sampled", "token_ids", "mask", "is_content", "logprobs", "message"),
    "routed_experts",
)
_OF_TRACE = (
    *("calls", "ok", "errors", "stop_condition", "is_timeout", "metrics", "rewards", "agent"),
    "mm_token_type_id_map",
)
_FACTS = (QUARANTINED_TURNS, POLICY_VERSIONS, TEMPERATURES, UNTRAINED)
"""Keys of `info` that decide what trains; all others are notes."""


class InputsChanged(Exception):
    """A plug-in changed what it was given to read."""


class Lent:
    """Episodes as a plug-in gets them: a copy of each, made when it is asked for.

    >>> Lent([]).take_back()
    """

    def __init__(self, episodes: Iterable[WireEpisode], *, is_trusted: bool = False) -> None:
        """A trusted plug-in, whose code is all ours, gets the episodes themselves: copies would
        cost a third of grading."""
        self._originals = {id(episode): episode for episode in episodes}
        self._copies: dict[int, WireEpisode] = {}
        self._is_trusted = is_trusted

    def copy_of(self, episode: WireEpisode) -> WireEpisode:
        """The copy that the plug-in gets in the place of one of the episodes."""
        if self._is_trusted:
            return episode
        if id(episode) not in self._copies:
            self._copies[id(episode)] = _copied(self._originals[id(episode)])
        return self._copies[id(episode)]

    def copies_of(self, episodes: Sequence[WireEpisode]) -> Sequence[WireEpisode]:
        """The copies of several, each made when the plug-in looks at it."""
        return episodes if self._is_trusted else _Copies(episodes, self.copy_of)

    def take_back(self) -> None:
        """Take the credit and the notes that the plug-in wrote.

        InputsChanged when it changed anything else, which has no effect beyond its own copy.
        """
        lent = [(self._originals[number], given) for number, given in self._copies.items()]
        changed = next((what for pair in lent for what in _changes(*pair)), None)
        if changed is not None:
            raise InputsChanged(
                f"it changed {changed}; a plug-in writes credit (write_credit) and notes "
                "(trace.info), and reads all else"
            )
        for original, given in lent:
            for trace, copied in zip(original.traces, given.traces, strict=True):
                facts = {name: trace.info[name] for name in _FACTS if name in trace.info}
                trace.info = copy.deepcopy(copied.info) | facts
                for node, written in zip(trace.nodes, copied.nodes, strict=True):
                    for name in _CREDIT:
                        setattr(node, name, _sliced(getattr(written, name)))


class _Copies(Sequence[WireEpisode]):
    """Copies that are made when they are looked at."""

    def __init__(
        self, episodes: Sequence[WireEpisode], copy_of: Callable[[WireEpisode], WireEpisode]
    ) -> None:
        self._episodes, self._copy_of = episodes, copy_of

    def __len__(self) -> int:
        return len(self._episodes)

    @overload
    def __getitem__(self, place: int) -> WireEpisode: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[WireEpisode]: ...
    def __getitem__(self, place: int | slice) -> WireEpisode | Sequence[WireEpisode]:
        found = self._episodes[place]
        return list(map(self._copy_of, found)) if isinstance(place, slice) else self._copy_of(found)


def _copied(episode: WireEpisode) -> WireEpisode:
    others = {name: copy.deepcopy(value) for name, value in episode if name != "traces"}
    return episode.model_copy(update=others | {"traces": [_of_trace(it) for it in episode.traces]})


def _of_trace(trace: WireTrace) -> WireTrace:
    others = {name: copy.deepcopy(value) for name, value in trace if name != "nodes"}
    return trace.model_copy(update=others | {"nodes": [_of_node(node) for node in trace.nodes]})


def _of_node(node: MessageNode) -> MessageNode:
    """Lists of one number per token are sliced; `deepcopy` would look at each number."""
    return node.model_copy(update={name: _sliced(value) for name, value in node})


def _sliced(value: Any) -> Any:
    if isinstance(value, list):
        is_flat = not value or isinstance(value[0], int | float)
        return value[:] if is_flat else copy.deepcopy(value)
    if isinstance(value, dict):
        return {name: _sliced(held) for name, held in value.items()}
    return copy.deepcopy(value)


def _changes(original: WireEpisode, given: WireEpisode) -> Iterator[str]:
    """Name what differs beyond credit and notes."""
    if len(given.traces) != len(original.traces):
        yield "traces"
        return
    for trace, copied in zip(original.traces, given.traces, strict=True):
        who = f"of agent {trace.agent.name!r}"
        yield from (f"{name} {who}" for name in _OF_TRACE if _differ(trace, copied, name))
        for name in _FACTS:
            if not _is_same(trace.info.get(name), copied.info.get(name)):
                yield f"info.{name} {who}"
        if len(copied.nodes) != len(trace.nodes):
            yield f"nodes {who}"
            return
        for number, (node, written) in enumerate(zip(trace.nodes, copied.nodes, strict=True)):
            place = f"of message {number} {who}"
            yield from (f"{name} {place}" for name in _OF_NODE if _differ(node, written, name))


def _differ(original: Any, given: Any, name: str) -> bool:
    return not _is_same(getattr(original, name), getattr(given, name, None))


def _is_same(kept: Any, found: Any) -> bool:
    if isinstance(kept, np.ndarray):
        return isinstance(found, np.ndarray) and np.array_equal(kept, found)
    return type(found) is type(kept) and bool(found == kept)
