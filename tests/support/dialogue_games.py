"""Random small games for the property tests of the kernel, the prompts and the scores."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from hypothesis import strategies as st

from gradus_kit.multiagent.channels import Said
from gradus_kit.multiagent.kernel import DialogueState, TurnSlot, apply_action
from gradus_kit.multiagent.pack import Pack, load_pack
from gradus_kit.multiagent.prompts import Case, Prompter, channels_of
from gradus_kit.multiagent.schedule import Schedule

MEMBERS = ("debater_a", "debater_b", "judge")
PHASES = ("propose", "critique", "final")
TEXTS = {
    "system": "SYSTEM of {{ viewer_id }}",
    "question": "QUESTION {{ task_prompt }} {{ answer }}",
    "instruction": "{{ phase }} {{ round_index }}/{{ num_rounds }} {{ is_first_round }} "
    "{{ is_last_round }}",
}
PIECES = (
    *("aloud", " ", "\n", "<thinking>", "</thinking>", "<think>", "</think>", "<answer>A</answer>"),
    *("<answer>B</answer>", "<decision>debater_a</decision>", "<decision>tie</decision>", "\u00e9"),
    *("<decision>debater_b</decision>", "<decision>nobody</decision>", "\x00", "\ud800"),
)
CONTENTS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
SAID = st.builds(Said, CONTENTS, st.none() | st.sampled_from(["", "reasoned", "SECRET"]))
SLOTS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(MEMBERS), min_size=1, max_size=3, unique=True),
        st.sampled_from(PHASES),
    ),
    min_size=1,
    max_size=5,
).map(lambda rows: [TurnSlot(i, tuple(m), phase) for i, (m, phase) in enumerate(rows)])


@lru_cache(maxsize=16)
def build_pack(visibility: str = "private", tag: str = "thinking") -> Pack:
    """A pack with a text for every member and phase."""
    user = {member: dict.fromkeys(PHASES, TEXTS["instruction"]) for member in MEMBERS}
    answer = {"answer": {"scoring": "choice"}}
    winners = {"mode": "enum", "values": ["debater_a", "debater_b", "tie"]}
    decision = {"decision": {"scoring": winners}}
    written = {
        "version": 2,
        "system": TEXTS["system"],
        "question": TEXTS["question"],
        "user": user,
        "think": {member: {"tag": tag, "visibility": visibility} for member in MEMBERS},
        "fields": {
            **{member: dict.fromkeys(PHASES, answer) for member in MEMBERS[:2]},
            "judge": dict.fromkeys(PHASES, decision),
        },
    }
    # JSON is YAML.
    return load_pack("test", json.dumps(written))


@dataclass(frozen=True)
class Game:
    """A schedule and what each member says in each of its turns."""

    slots: list[TurnSlot]
    said: Mapping[tuple[int, str], Said]

    @property
    def schedule(self) -> Schedule:
        """The slots as a schedule."""
        return Schedule.of_slots(self.slots)

    def play(self, pack: Pack, *, order: int = 0, up_to: int | None = None) -> DialogueState:
        """The state after so many slots; `order` shuffles who answers first."""
        channels = channels_of(pack, MEMBERS)
        state, program = DialogueState(), self.schedule.program
        draw = random.Random(order)
        for slot in self.slots[:up_to]:
            members = list(slot.members)
            if order:
                draw.shuffle(members)
            for member in members:
                said = self.said[slot.slot_id, member]
                state, _ = apply_action(state, program, member, said, 3, channels)
        return state

    def prompter(self, pack: Pack) -> Prompter:
        """Writes the prompts of this game."""
        return Prompter(pack, self.schedule, Case("7 or 12?", {"debater_a": "B"}))


@st.composite
def games(draw: st.DrawFn, slots: st.SearchStrategy[list[TurnSlot]] = SLOTS) -> Game:
    """A random game."""
    chosen = draw(slots)
    said = {(slot.slot_id, member): draw(SAID) for slot in chosen for member in slot.members}
    return Game(chosen, said)
