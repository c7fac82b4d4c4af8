"""Rewards and numbers of a finished episode, from its transcript alone.

Who wins is what the judge's last turn says, without a fallback. Everything else is a diagnosis and
never moves a reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from gradus_kit.multiagent.fields import FieldSpec, FieldValue, canonical
from gradus_kit.multiagent.kernel import DialogueState, Utterance
from gradus_kit.multiagent.pack import ANSWER, DECISION, JUDGE, Pack

TIE = "tie"


class MemberScores(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one member did. None is what cannot be known, e.g. without a known answer."""

    turns: int
    commits: int
    """Turns with an answer that can be read."""
    unique_commits: int
    """Different answers."""
    flipped: bool
    """True if the last answer is another than the first."""
    extraction_failed: int
    """Turns that should have had an answer and had none that can be read."""
    parse_errors: int
    """Turns without public text."""
    lost_turns: int
    """Turns of either kind."""
    initial_answer: str | None = None
    final_answer: str | None = None
    initial_correct: bool | None = None
    final_correct: bool | None = None

    def metrics(self) -> dict[str, float]:
        """As numbers by name."""
        values = msgspec.structs.asdict(self)
        names = [name for name in values if not name.endswith("_answer")]
        return {name: float(values[name]) for name in names if values[name] is not None}


class EpisodeScores(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of an episode."""

    members: dict[str, MemberScores]
    rewards: dict[str, float]
    """By member; empty when the judge decided nothing."""
    winner: str | None = None
    """A member, or `tie`; None without a judge, and when it decided nothing."""
    undecided: str | None = None
    """Why there are no rewards."""
    agreement: bool | None = None
    any_correct: bool | None = None
    all_correct: bool | None = None
    judge_selected_correct: bool | None = None
    truth_member_won: bool | None = None

    @property
    def judge_reward(self) -> float:
        """Of a judge that trains: 1 for the side, or the answer, that is right, as far as known."""
        won = self.truth_member_won
        return float((self.judge_selected_correct if won is None else won) or False)

    def metrics(self) -> dict[str, float]:
        """Numbers of the whole episode by name; what cannot be said is left out."""
        names = ("agreement", "any_correct", "all_correct", "judge_selected_correct")
        values = {name: getattr(self, name) for name in (*names, "truth_member_won")}
        return {
            f"episode/{name}": float(value) for name, value in values.items() if value is not None
        }

    def categories(self) -> dict[str, str]:
        """Values that are not numbers: the winner, and everybody's last answer."""
        found = {} if self.winner is None else {"winner": self.winner}
        answers = {f"answer/{name}": member.final_answer for name, member in self.members.items()}
        return found | {name: answer for name, answer in answers.items() if answer is not None}


@dataclass(frozen=True)
class Truth:
    """The truth of a task, as far as scoring knows it."""

    answer: str | None = None
    """The right answer; None when it is not known."""
    assigned_answers: Mapping[str, str] = field(default_factory=dict)
    read_choice: Callable[[str], str | None] | None = None
    """Finds the letter of an option in a text; None for a task without options."""


@dataclass(frozen=True)
class DialogueScorer:
    """Scores the episodes of one pack.

    >>> scores = DialogueScorer(pack, ("debater_a", "debater_b", "judge")).score(state, truth)
    ... # doctest: +SKIP
    """

    pack: Pack
    members: Sequence[str]

    @property
    def contestants(self) -> tuple[str, ...]:
        """Everyone but the judge."""
        return tuple(member for member in self.members if member != JUDGE)

    def score(self, state: DialogueState, truth: Truth) -> EpisodeScores:
        members = {member: self._member(state, member, truth) for member in self.members}
        decided = self._decide(state, members, truth)
        return self.with_outcome(msgspec.structs.replace(decided, members=members), truth)

    def with_outcome(
        self, scores: EpisodeScores, truth: Truth, *, agreement: bool | None = None
    ) -> EpisodeScores:
        """The scores with what follows from the members' correctness, which a grader may have
        changed; `agreement` is what a matcher said."""
        own = {member: scores.members[member] for member in self.contestants}
        answers = [member.final_answer for member in own.values()]
        if agreement is None and len(answers) > 1 and None not in answers:
            agreement = len({canonical(answer or "") for answer in answers}) == 1
        known = [it.final_correct for it in own.values() if it.final_correct is not None]
        right = [member for member, score in own.items() if score.final_correct]
        assigned = truth.assigned_answers
        if truth.answer is not None and assigned:
            right = [m for m in own if m in assigned and _same(assigned[m], truth.answer)]
        is_contest = scores.winner is not None and len(own) > 1
        return msgspec.structs.replace(
            scores,
            agreement=agreement,
            any_correct=any(known) if known else None,
            all_correct=all(known) if len(known) == len(own) > 0 else None,
            judge_selected_correct=self._selected_correct(scores),
            truth_member_won=scores.winner == right[0] if is_contest and len(right) == 1 else None,
        )

    def is_compared_by_models(self, member: str) -> bool:
        """Whether a member's answers are free text, which only a grader or matcher can compare."""
        specs = [
            by_tag[ANSWER]
            for (name, _), by_tag in self.pack.fields.items()
            if name == member and ANSWER in by_tag
        ]
        return bool(specs) and all(spec.mode == "binary" and spec.kind == "str" for spec in specs)

    def _member(self, state: DialogueState, member: str, truth: Truth) -> MemberScores:
        turns = state.turns_of(member)
        asked = [said for said in turns if ANSWER in self.pack.fields_of(member, said.phase)]
        answers = [self._answer(said, truth) for said in asked]
        given = [answer for answer in answers if answer is not None]
        failed = [said for said, answer in zip(asked, answers, strict=True) if answer is None]
        # What the last turn leaves open, an earlier one does not answer.
        ends = (answers[0], answers[-1]) if answers else (None, None)
        right = truth.answer
        # An answer that should have been given and was not is wrong.
        correct = [
            None if right is None or not asked else end is not None and _same(end, right)
            for end in ends
        ]
        return MemberScores(
            turns=len(turns),
            commits=len(given),
            unique_commits=len({canonical(answer) for answer in given}),
            flipped=None not in ends and canonical(ends[0] or "") != canonical(ends[1] or ""),
            extraction_failed=len(failed),
            parse_errors=sum(said.parse_error is not None for said in turns),
            lost_turns=sum(said.parse_error is not None or said in failed for said in turns),
            initial_answer=ends[0],
            final_answer=ends[1],
            initial_correct=correct[0],
            final_correct=correct[1],
        )

    def _answer(self, said: Utterance, truth: Truth) -> str | None:
        spec = self.pack.fields_of(said.member, said.phase)[ANSWER]
        value = spec.read(said.public)
        if spec.mode != "choice" or truth.read_choice is None:
            return _as_text(value)
        if value is None and _has_tag(said.public, spec):
            return None
        # Who was asked for a letter and wrote no tag may still have given one.
        return truth.read_choice(said.public if value is None else str(value))

    def _decide(
        self, state: DialogueState, members: Mapping[str, MemberScores], truth: Truth
    ) -> EpisodeScores:
        if self.pack.reward == "exact":
            rewards = {name: float(bool(end.final_correct)) for name, end in members.items()}
            return EpisodeScores({}, rewards)
        turns = state.turns_of(JUDGE)
        if self.pack.reward == "picked":
            picked = self._answer(turns[-1], truth) if turns else None
            if picked is None:
                return EpisodeScores({}, {}, undecided="the judge's last turn gives no answer")
            assigned = truth.assigned_answers
            rewards = {
                member: float(member in assigned and _same(assigned[member], picked))
                for member in self.contestants
            }
            return EpisodeScores({}, _with_judge(rewards, members))
        return self._contest(turns, members)

    def _contest(
        self, turns: Sequence[Utterance], members: Mapping[str, MemberScores]
    ) -> EpisodeScores:
        fields = self.pack.fields_of(JUDGE, turns[-1].phase) if turns else {}
        value = fields[DECISION].read(turns[-1].public) if DECISION in fields else None
        named = {canonical(name): name for name in (*self.contestants, TIE)}
        winner = named.get(canonical(str(value)))
        if value is None or winner is None:
            return EpisodeScores({}, {}, undecided="the judge's last turn names no winner")
        loss = -1.0 / max(1, len(self.contestants) - 1)
        rewards = {
            member: 0.0 if winner == TIE else 1.0 if member == winner else loss
            for member in self.contestants
        }
        return EpisodeScores({}, _with_judge(rewards, members), winner=winner)

    def _selected_correct(self, scores: EpisodeScores) -> bool | None:
        if self.pack.reward == "picked" and JUDGE in scores.members:
            return scores.members[JUDGE].final_correct
        if scores.winner is None:
            return None
        known = [scores.members[name].final_correct for name in self.contestants]
        if None in known:
            return None
        return scores.winner != TIE and bool(scores.members[scores.winner].final_correct)


def _with_judge(rewards: dict[str, float], members: Mapping[str, MemberScores]) -> dict[str, float]:
    return rewards | ({JUDGE: 0.0} if JUDGE in members else {})


def _has_tag(text: str, spec: FieldSpec) -> bool:
    return f"<{spec.tag.lower()}>" in text.lower()


def _as_text(value: FieldValue | None) -> str | None:
    if value is None:
        return None
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _same(one: str, other: str) -> bool:
    # Numbers first: as texts without the marks around them, .5 and 5 are the same.
    try:
        return math.isclose(float(one), float(other), rel_tol=1e-9)
    except ValueError:
        return canonical(one) == canonical(other)
