"""Writes what is new to a member at a turn.

The prompt of a turn continues the prompt and the reply of the turn before, so only the new text is
sent and all turns of a member are one branch of its trace. What a member is told between two of its
replies is one user message: chat templates refuse two in a row, and renderers continue by one.
Inside it, what others said is fenced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gradus.errors import ConfigError
from gradus_kit.multiagent.channels import Channel, Fenced, fence
from gradus_kit.multiagent.kernel import DialogueState, TurnSlot, Utterance
from gradus_kit.multiagent.pack import JUDGE, Pack
from gradus_kit.multiagent.schedule import Schedule

BETWEEN = "\n\n"
"""Stands between the parts of a message."""
_TEXT = "\x00"
"""Where a wrap puts what was said."""


@dataclass(frozen=True)
class Case:
    """A task as the members see it."""

    task_prompt: str
    assigned_answers: Mapping[str, str] = field(default_factory=dict)
    """What a member is told to argue for."""


@dataclass(frozen=True)
class Prompter:
    """Writes the prompts of one episode.

    >>> prompter = Prompter(pack, schedule, Case("Is 7 prime?"))  # doctest: +SKIP
    >>> prompter.delta(DialogueState(), "debater_a", slot)  # doctest: +SKIP
    'Is 7 prime?\n\nArgue for your answer.'
    """

    pack: Pack
    schedule: Schedule
    case: Case

    def system(self, member: str) -> str:
        template = self.pack.text(self.pack.system, member)
        assert template is not None, f"the pack was not checked for {member}"
        return template.render(self._constants(member))

    def delta(self, state: DialogueState, member: str, slot: TurnSlot) -> str:
        """Tell a member what is new, up to the instruction of its turn."""
        own = state.turns_of(member)
        texts: list[str] = list(_notices(own[-1])) if own else [self._question(member)]
        since = own[-1].turn_index if own else 0
        texts += [
            self._heard(said, member)
            for said in state.transcript
            if said.turn_index >= since and said.member != member
        ]
        texts.append(self._instruction(member, slot.phase, len(own)))
        return BETWEEN.join(texts)

    def _question(self, member: str) -> str:
        template = self.pack.text(self.pack.question, member)
        assert template is not None, f"the pack was not checked for {member}"
        return template.render(self._constants(member))

    def _instruction(self, member: str, phase: str, round_index: int) -> str:
        num_rounds = max(self.schedule.num_rounds(member), round_index + 1)
        template = self.pack.user.get(member, {}).get(phase)
        if template is None:
            # Only a function as schedule can come to it: the slots of a list are checked before.
            raise ConfigError(
                f"pack {self.pack.name!r} has no instruction of {member} for the phase {phase!r}"
            )
        return template.render(
            **self._constants(member),
            phase=phase,
            round_index=round_index,
            num_rounds=num_rounds,
            is_first_round=round_index == 0,
            is_last_round=round_index == num_rounds - 1,
        )

    def _heard(self, said: Utterance, viewer: str) -> str:
        shows = self.pack.channel(said.member).shows(is_judge=viewer == JUDGE)
        private = said.private if shows else None
        if said.is_quarantined:
            return f"[{said.member}, {said.phase}] The reply could not be read."
        if not said.public and not private:
            return f"[{said.member}, {said.phase}] Nothing was said aloud."
        template = self.pack.text(self.pack.opponent_wrap, viewer)
        assert template is not None
        return template.render(
            **self._constants(viewer),
            member_id=said.member,
            slot_id=said.slot_id,
            phase=said.phase,
            text=self._fenced(said, said.public).text if said.public else "",
            private=self._fenced(said, private).text if private else "",
        )

    def attempts(self, said: Utterance) -> int:
        """How often what others read of an utterance tried to pass for what the pack writes."""
        is_read = said.public and not said.is_quarantined
        return self._fenced(said, said.public).attempts if is_read else 0

    def _fenced(self, said: Utterance, text: str) -> Fenced:
        return fence(text, member=said.member, heads=self._heads)

    @cached_property
    def _heads(self) -> frozenset[str]:
        """How the lines begin that the pack puts around what somebody said."""
        phases = {phase for by_phase in self.pack.user.values() for phase in by_phase}
        found = {f"[{member}, {phase}]" for member in self.schedule.members for phase in phases}
        for viewer in self.schedule.members:
            template = self.pack.text(self.pack.opponent_wrap, viewer)
            assert template is not None
            for member in self.schedule.members:
                for phase in phases:
                    written = template.render(
                        **self._constants(viewer),
                        **{"member_id": member, "phase": phase, "slot_id": 0},
                        **{"text": _TEXT, "private": _TEXT},
                    )
                    found.update(line.partition(_TEXT)[0] for line in written.splitlines())
        return frozenset(found)

    def _constants(self, member: str) -> dict[str, Any]:
        assigned = self.case.assigned_answers.get(member)
        return {
            "task_prompt": self.case.task_prompt,
            "viewer_id": member,
            "answer": assigned or "",
            "has_assigned_answer": assigned is not None,
            "schedule_explainer": self.schedule.explained(),
        }


def _notices(said: Utterance) -> Iterator[str]:
    """One line to the author of a reply that the others did not get."""
    if said.parse_error is not None:
        yield f"The others did not see your last reply: {said.parse_error}."


def channels_of(pack: Pack, members: tuple[str, ...]) -> dict[str, Channel]:
    return {member: pack.channel(member) for member in members}
