"""Whose turn it is, and what was said: the immutable state of an episode with several members.

The kernel knows turn order and nothing else. A slot with one member commits at once. A slot with
several is a barrier: what its members say is held back until all of them have spoken, and is then
committed in the slot's order, so that the state does not depend on who answered first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from gradus.errors import ProtocolError
from gradus_kit.multiagent.channels import Channel, Said


class TurnOrderError(ProtocolError):
    """A member spoke that was not to speak; the state is as it was."""


@dataclass(frozen=True)
class TurnSlot:
    """Who speaks next, and in which phase; several members speak at the same time.

    >>> TurnSlot(0, ("debater_a", "debater_b"), "propose").is_barrier
    True
    """

    slot_id: int
    members: tuple[str, ...]
    phase: str

    def __post_init__(self) -> None:
        if not self.members or len(set(self.members)) != len(self.members):
            raise ValueError(
                f"slot {self.slot_id}: members = {list(self.members)} must be different names, at "
                "least one"
            )

    @property
    def is_barrier(self) -> bool:
        """True if several members speak without seeing each other."""
        return len(self.members) > 1


@dataclass(frozen=True)
class Utterance:
    """The words of one member in one turn, split into public and private text."""

    member: str
    turn_index: int
    """Number of the turn from 0; the utterances of a barrier share it."""
    slot_id: int
    phase: str
    raw: str
    """The content as it was sampled."""
    public: str
    private: str | None
    token_count: int
    parse_error: str | None = None
    """Why nothing of it is public."""
    is_quarantined: bool = False
    """True if its channels could not be told apart, so that no other member sees any of it."""


@dataclass(frozen=True)
class Pending:
    """The words of a member of the open barrier."""

    member: str
    said: Said
    token_count: int


@dataclass(frozen=True)
class DialogueState:
    """Everything that was said; `apply_action` gives the next state.

    >>> DialogueState().num_turns
    0
    """

    transcript: tuple[Utterance, ...] = ()
    pending: tuple[Pending, ...] = ()
    """Of the open barrier, in its slot's order."""

    @property
    def num_turns(self) -> int:
        """Committed turns; a barrier is one."""
        return self.transcript[-1].turn_index + 1 if self.transcript else 0

    def turns_of(self, member: str) -> tuple[Utterance, ...]:
        """Return the turns of a member, oldest first."""
        return tuple(said for said in self.transcript if said.member == member)


class Program(Protocol):
    """Decides who speaks next from what was said."""

    def current_slot(self, state: DialogueState) -> TurnSlot | None:
        """The slot that is open; None when the episode is finished."""


@dataclass(frozen=True)
class StaticSchedule:
    """The same slots in every episode, one after the other."""

    slots: tuple[TurnSlot, ...]

    def current_slot(self, state: DialogueState) -> TurnSlot | None:
        """The slot after the committed turns."""
        return self.slots[state.num_turns] if state.num_turns < len(self.slots) else None


def apply_action(
    state: DialogueState,
    program: Program,
    member: str,
    said: Said,
    token_count: int,
    channels: Mapping[str, Channel],
) -> tuple[DialogueState, tuple[Utterance, ...]]:
    """The state after a member spoke, and the utterances that this committed.

    A reply that cannot be read, or that leaves nothing public, commits with a parse error and the
    schedule continues. TurnOrderError, with the state unchanged, when the episode is finished, when
    the member is not in the open slot, and when it spoke in it already.
    """
    slot = program.current_slot(state)
    if slot is None:
        raise TurnOrderError(f"{member!r} spoke, but the episode is finished")
    if member not in slot.members:
        raise TurnOrderError(
            f"{member!r} spoke in slot {slot.slot_id}, which belongs to {', '.join(slot.members)}"
        )
    if any(held.member == member for held in state.pending):
        raise TurnOrderError(f"{member!r} spoke twice in slot {slot.slot_id}")
    held = {one.member: one for one in (*state.pending, Pending(member, said, token_count))}
    ordered = tuple(held[name] for name in slot.members if name in held)
    if len(ordered) < len(slot.members):
        return replace(state, pending=ordered), ()
    turn = state.num_turns
    committed = tuple(_utterance(one, slot, turn, channels[one.member]) for one in ordered)
    return DialogueState(transcript=(*state.transcript, *committed)), committed


def _utterance(pending: Pending, slot: TurnSlot, turn_index: int, channel: Channel) -> Utterance:
    split = channel.split(pending.said)
    return Utterance(
        member=pending.member,
        turn_index=turn_index,
        slot_id=slot.slot_id,
        phase=slot.phase,
        raw=pending.said.content,
        public=split.public,
        private=split.private,
        token_count=pending.token_count,
        parse_error=split.parse_error,
        is_quarantined=split.is_quarantined,
    )
