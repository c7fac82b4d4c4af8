r"""The taskset `hendrycks-math`: solve a problem and put its answer into `\boxed{}`."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field, model_validator

from gradus.errors import ConfigError, EnvironmentFailure
from gradus_hendrycks_math.problems import (
    HUB_DATASET,
    LEVELS,
    SUBJECTS,
    MathProblem,
    hub_problems,
    read_solve_rates,
    template_problems,
)
from gradus_hendrycks_math.reading import (
    has_other_form,
    in_the_unit,
    is_copied,
    is_unsimplified,
    plain,
    unit_of,
    without_unit,
)
from gradus_kit.sandbox import CallFailed, HelperCalls
from gradus_kit.tasksets.holdout import HoldoutKeys
from gradus_kit.tasksets.marked import last_boxed

INSTRUCTION = "Reason step by step, and put the final answer into \\boxed{}."
DEFAULT_NUM_TEMPLATE_TASKS = 300
_EQUAL = "gradus_hendrycks_math.equality:are_equal"
_HELPER_MEMORY_BYTES = 2 << 30

Subject = Literal[
    "prealgebra",
    "algebra",
    "intermediate_algebra",
    "precalculus",
    "geometry",
    "counting_and_probability",
    "number_theory",
]


class MathTaskConfig(vf.TaskConfig):
    """How answers are compared."""

    seconds: float = Field(5.0, gt=0, le=120)
    """Most CPU time for comparing an answer as an expression; then it counts as wrong."""


class HendrycksMathConfig(vf.TasksetConfig, HoldoutKeys):
    """Which problems."""

    source: Literal["templates", "hub"] = "templates"
    """`templates` makes problems and needs no network, `hub` loads `dataset`."""
    dataset: str = HUB_DATASET
    """Data set on the Hugging Face hub, or a local folder in one of its formats."""
    dataset_split: str = "train"
    """Split of that data set."""
    subjects: tuple[Subject, ...] = Field(tuple(SUBJECTS), min_length=1)  # type: ignore[arg-type]
    """Which of the seven subjects."""
    levels: tuple[int, ...] = Field(LEVELS, min_length=1)
    """Which of the levels 1 to 5."""
    num_tasks: int | None = Field(None, ge=1)
    """Number of problems. None means 300 of `templates`, and all of `hub`."""
    seed: int = 0
    """Seed of the templates."""
    instruction: str | None = INSTRUCTION
    """System prompt. None means that the model sees only the problem."""
    solve_rates: Path | None = None
    """File of JSON lines with `name` and `solve_rate`: only the problems in it are tasks whose
    share of solved replies lies between both numbers below. None means all problems."""
    min_solve_rate: float = Field(0.2, ge=0.0, le=1.0)
    """Smallest share of replies of the base model that solved a problem."""
    max_solve_rate: float = Field(0.8, ge=0.0, le=1.0)
    """Largest share."""
    task: MathTaskConfig = MathTaskConfig()
    """How answers are compared."""

    @model_validator(mode="after")
    def _check(self) -> HendrycksMathConfig:
        if wrong := set(self.levels) - set(LEVELS):
            raise ValueError(f"levels are 1 to 5, not {sorted(wrong)}")
        if self.min_solve_rate > self.max_solve_rate:
            raise ValueError("min_solve_rate is larger than max_solve_rate")
        return self


class MathData(vf.TaskData):
    """The problem is the prompt."""

    answer: str
    """The text that belongs into the box."""
    subject: str
    level: int


@cache
def helpers_here() -> HelperCalls:
    """The helper of this process."""
    return HelperCalls(memory_bytes=_HELPER_MEMORY_BYTES)


async def is_right(reply: str, answer: str, *, seconds: float, question: str = "") -> bool:
    """Tell whether the last box of a reply holds the answer, written in any way but the question's,
    and with no more left to compute."""
    boxed: str | None = last_boxed(reply)
    if boxed and (unit := unit_of(answer)):
        boxed = in_the_unit(boxed, unit)
    if not boxed:
        return False
    given, answer = without_unit(boxed, question), without_unit(answer, None)
    if plain(given) == plain(answer):
        return True
    if is_copied(given, question, answer) or is_unsimplified(given, answer):
        return False
    if has_other_form(given, question, answer):
        return False
    if all(_is_integer(text) for text in (given, answer)):
        return False
    try:
        equal = await helpers_here().call(_EQUAL, answer, given, seconds=seconds)
    except CallFailed as error:
        if error.is_broken:
            raise EnvironmentFailure(
                f"answers cannot be compared in a helper process: {error}; try "
                "`python -c 'import gradus_hendrycks_math.equality'`, and look whether the machine "
                "has memory and cores left"
            ) from error
        # An answer that cannot be compared in time is not one that anybody wanted.
        return False
    return bool(equal)


def _is_integer(text: str) -> bool:
    return plain(text).removeprefix("-").isdecimal()


class MathTask(vf.Task[MathData, vf.State, MathTaskConfig]):
    """One problem."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 when the last box holds the answer."""
        data, seconds, question = self.data, self.config.seconds, str(self.data.prompt)
        reply = trace.last_reply
        return float(await is_right(reply, data.answer, seconds=seconds, question=question))

    @vf.metric
    async def boxed(self, trace: vf.Trace) -> float:
        """1 when there is a box to read."""
        return float(bool(last_boxed(trace.last_reply)))

    def gold_replies(self) -> list[str]:
        return [f"\\boxed{{{self.data.answer}}}"]


class HendrycksMathTaskset(vf.Taskset[MathTask, HendrycksMathConfig]):
    """The problems in the order of their source."""

    def load(self) -> Iterable[MathTask]:
        """Yield the problems of the configured side; refuses to start without math-verify."""
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "hendrycks-math compares answers with the package math-verify; install gradus with "
                "its extra: pip install 'gradus-rl[tasks]'"
            )
        config = self.config
        limit = config.num_tasks
        if limit is None and config.source == "templates":
            limit = DEFAULT_NUM_TEMPLATE_TASKS
        for problem in itertools.islice(self._chosen(), limit):
            data = MathData(
                name=problem.name,
                prompt=problem.text,
                system_prompt=config.instruction,
                answer=problem.answer,
                subject=problem.subject,
                level=problem.level,
            )
            yield MathTask(data, config.task)

    def _chosen(self) -> Iterator[MathProblem]:
        config = self.config
        problems = (problem for problem in self._problems() if config.keeps(problem.text))
        if config.solve_rates is None:
            return problems
        rates = read_solve_rates(config.solve_rates)
        low, high = config.min_solve_rate, config.max_solve_rate
        wanted = {name for name, rate in rates.items() if low <= rate <= high}
        if not wanted:
            raise ConfigError(
                f"{config.solve_rates} has no problem that was solved between {low:g} and {high:g} "
                "of the time"
            )
        return _named(problems, wanted)

    def _problems(self) -> Iterator[MathProblem]:
        config = self.config
        if config.source == "hub":
            return hub_problems(
                config.dataset,
                split=config.dataset_split,
                subjects=config.subjects,
                levels=config.levels,
            )
        return template_problems(config.subjects, config.levels, seed=config.seed)


def _named(problems: Iterator[MathProblem], wanted: set[str]) -> Iterator[MathProblem]:
    last = max(_number(name) for name in wanted)
    for problem in problems:
        if not wanted or _number(problem.name) > last:
            return
        if problem.name in wanted:
            wanted.discard(problem.name)
            yield problem


def _number(name: str) -> int:
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
