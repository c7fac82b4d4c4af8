"""The task set `debate`: two-sided questions that it makes, and the data of every debate."""

from __future__ import annotations

from collections.abc import Iterable
from string import ascii_uppercase
from typing import Literal, Self

import verifiers.v1 as vf
from pydantic import Field, model_validator

from gradus_debate.questions import build_questions
from gradus_kit.multiagent.seats import check_learner_seat, draw_learner_seat, stable_hash

SEATS = ("debater_a", "debater_b")


class DebateData(vf.TaskData):
    """One question over which the members argue.

    >>> DebateData(question="Which is larger?", options=["7", "12"], answer="B").letters
    'AB'
    """

    question: str
    """The question without its options."""
    options: list[str] = Field(default_factory=list, max_length=26)
    """What may be answered, lettered from A. Empty for a question with a free answer."""
    answer: str | None = None
    """The letter of the right option, or the right text. None when it is not known."""
    assigned_answers: dict[str, str] = Field(default_factory=dict)
    """Member → the answer that it is told to argue for."""
    learner_seat: str | None = None
    """The one member that trains. None means that all do."""

    @property
    def letters(self) -> str:
        return ascii_uppercase[: len(self.options)]


class DebateTask(vf.Task[DebateData, vf.State, vf.TaskConfig]):
    """One question; the environment rewards the members at the end."""

    def gold_replies(self) -> dict[str, list[str]]:
        """What each member says who argues for its answer, and a judge who decides."""
        data = self.data
        assigned = data.assigned_answers
        says = {
            seat: [f"<answer>{assigned.get(seat) or data.answer}</answer>"]
            for seat in (*SEATS, "consultant", "opponent")
        }
        verdict = f"<answer>{assigned.get('consultant') or data.answer}</answer>"
        return {**says, "judge": [f"{verdict} <decision>{SEATS[0]}</decision>"]}


class DebateTasksetConfig(vf.TasksetConfig):
    """How many questions, and who learns in each."""

    num_tasks: int = Field(200, ge=1, le=100_000)
    """Number of questions."""
    kinds: list[Literal["larger", "sum", "earlier", "longer", "digits"]] = Field(
        default_factory=list
    )
    """Kinds of questions. Empty means all but `digits`, which asks for the larger of two digits,
    for models that hardly read."""
    seed: int = Field(0, ge=0)
    """Which questions, and which coin draws the learner."""
    assign_sides: bool = False
    """True if each debater is told which answer to argue for; half of the time it is the right
    one for debater_a."""
    learner_seat: str | None = None
    """The seat that trains: "bernoulli", "round_robin", "hash", debater_a or debater_b. None means
    both."""

    @model_validator(mode="after")
    def _check_seat(self) -> Self:
        check_learner_seat(self.learner_seat, (*SEATS, "consultant"))
        return self


class DebateTaskset(vf.Taskset[DebateTask, DebateTasksetConfig]):
    """Questions with two options, of which one is right."""

    def load(self) -> Iterable[DebateTask]:
        """Yield the questions in order."""
        config = self.config
        questions = build_questions(config.num_tasks, seed=config.seed, kinds=config.kinds)
        for index, made in enumerate(questions):
            # Many questions share their text and differ in their options alone.
            key = "\n".join((made.question, *made.options))
            seats = SEATS if config.learner_seat != "consultant" else ("consultant",)
            learner = draw_learner_seat(
                config.learner_seat,
                seats,
                seed=config.seed,
                task_key=key,
                task_index=index,
            )
            data = DebateData(
                name=f"question {index}",
                question=made.question,
                options=list(made.options),
                answer=made.answer,
                assigned_answers=_sides(key) if config.assign_sides else {},
                learner_seat=learner,
            )
            yield DebateTask(data, config.task)


def _sides(key: str) -> dict[str, str]:
    first, second = ("A", "B") if stable_hash(f"sides {key}") % 2 else ("B", "A")
    return {SEATS[0]: first, SEATS[1]: second, "consultant": first}
