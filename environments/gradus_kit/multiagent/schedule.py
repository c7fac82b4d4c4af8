"""The order of turns: a list of slots, or a function of what was said.

A function cannot be read, so it is played once with made-up replies: that shows which member speaks
in which phase, and that it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gradus.errors import ConfigError
from gradus_kit.multiagent.channels import Channel, Said
from gradus_kit.multiagent.kernel import (
    DialogueState,
    Program,
    StaticSchedule,
    TurnSlot,
    apply_action,
)

MAX_TURNS = 256
"""Most turns of an episode; a barrier is one."""

NextSlot = Callable[[DialogueState], TurnSlot | None]


@dataclass(frozen=True)
class Schedule:
    """A program with what is known of it before the first turn.

    >>> Schedule.of_slots([TurnSlot(0, ("a", "b"), "propose")]).members
    ('a', 'b')
    """

    program: Program
    slots: tuple[TurnSlot, ...]
    """All slots of a list; those of one made-up play of a function."""

    @classmethod
    def of_slots(cls, slots: Sequence[TurnSlot]) -> Schedule:
        """A schedule that is the same in every episode."""
        if not 0 < len(slots) <= MAX_TURNS:
            raise ConfigError(f"the schedule has {len(slots)} slots; it needs 1 to {MAX_TURNS}")
        ids = [slot.slot_id for slot in slots]
        if len(set(ids)) < len(ids):
            raise ConfigError(f"the slots of the schedule have the ids {ids}; each needs its own")
        return cls(StaticSchedule(tuple(slots)), tuple(slots))

    @classmethod
    def of_function(cls, next_slot: NextSlot, name: str) -> Schedule:
        """A schedule that follows what is said; ConfigError when a made-up play of it fails."""
        slots = _played(_Computed(next_slot, name), name)
        known = frozenset(member for slot in slots for member in slot.members)
        return cls(_Computed(next_slot, name, known), slots)

    @property
    def members(self) -> tuple[str, ...]:
        """Everyone who speaks, in the order of their first turns."""
        return tuple(dict.fromkeys(name for slot in self.slots for name in slot.members))

    @property
    def turns(self) -> tuple[tuple[str, str], ...]:
        """Each (member, phase) once."""
        pairs = ((name, slot.phase) for slot in self.slots for name in slot.members)
        return tuple(dict.fromkeys(pairs))

    def num_rounds(self, member: str) -> int:
        """Slots with a member, at least 1."""
        return max(1, sum(member in slot.members for slot in self.slots))

    def swapped(self, one: str, other: str) -> Schedule | None:
        """The same turns with two members in each other's place; None where they do not have the
        same turns, or where a function orders them."""
        place = {one: other, other: one}
        slots = [
            replace(slot, members=tuple(place.get(name, name) for name in slot.members))
            for slot in self.slots
        ]
        found = Schedule.of_slots(slots)
        is_list = isinstance(self.program, StaticSchedule)
        return found if is_list and set(found.turns) == set(self.turns) else None

    def explained(self) -> str:
        """The order of turns in words, one line for each.

        >>> print(Schedule.of_slots([TurnSlot(0, ("a", "b"), "propose")]).explained())
        1. propose: a and b, at the same time
        """
        lines = []
        for number, slot in enumerate(self.slots, 1):
            names = " and ".join(slot.members)
            suffix = ", at the same time" if slot.is_barrier else ""
            lines.append(f"{number}. {slot.phase}: {names}{suffix}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Computed:
    next_slot: NextSlot
    name: str
    known: frozenset[str] | None = None
    """Who has turns; None while that is found out."""

    def current_slot(self, state: DialogueState) -> TurnSlot | None:
        """What the function says; it never hears of an open barrier."""
        if state.num_turns >= MAX_TURNS:
            raise ConfigError(f"schedule {self.name!r} continues after {MAX_TURNS} turns")
        slot = self.next_slot(DialogueState(transcript=state.transcript))
        if slot is not None and not isinstance(slot, TurnSlot):
            raise ConfigError(
                f"schedule {self.name!r} gives {type(slot).__name__}; it must give a TurnSlot or "
                "None"
            )
        if slot is not None and self.known is not None and not self.known.issuperset(slot.members):
            raise ConfigError(
                f"schedule {self.name!r} gives slot {slot.slot_id} to {', '.join(slot.members)}; "
                f"with made-up replies only {', '.join(sorted(self.known))} had a turn"
            )
        return slot


def _played(program: _Computed, name: str) -> tuple[TurnSlot, ...]:
    state, slots = DialogueState(), []
    try:
        while (slot := program.current_slot(state)) is not None:
            slots.append(slot)
            for member in slot.members:
                said = Said("a made-up reply")
                channels = {member: Channel() for member in slot.members}
                state, _ = apply_action(state, program, member, said, 1, channels)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"schedule {name!r} failed after {len(slots)} turns with made-up replies: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not slots:
        raise ConfigError(f"schedule {name!r} has no first slot")
    return tuple(slots)
