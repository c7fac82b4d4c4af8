"""Judges a program: it answers in one box, and its answers are checked outside of it."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gradus.errors import EnvironmentFailure
from gradus_code.problems import (
    Problem,
    assemble,
    is_python,
    plain_output,
    plain_value,
    read_program,
    same_output,
    same_value,
)
from gradus_kit.sandbox import Ended, Limits, Reason, Sandbox, UntrustedProgram

_HERE = Path(__file__).parent
_ANY_LENGTH = 1_000
_MOST_LONGER = 12
"""An answer that is longer by this factor is wrong; an escaped character has 10."""
_CHECK_LIMITS = Limits(seconds=90.0, cpu_seconds=30, memory_bytes=1 << 30)


@dataclass(frozen=True)
class Floor:
    """What the best program passes that solves nothing: one that raises, that says the same to
    every call, or that gives an argument back."""

    passed: int
    total: int
    """Tests that a right program meets; one that raises between them may end them sooner."""


@dataclass(frozen=True)
class Verdict:
    """How many tests a program passed, and how its run ended."""

    passed: int
    total: int
    program: str
    """As it was read from the reply; empty when there was none."""
    ended: Ended | None = None
    """Its run; None when it was not Python."""
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Of the tests, between 0 and 1."""
        return self.passed / self.total if self.total else 0.0

    def beyond(self, floor: Floor) -> float:
        """The share of the tests beyond those that a program passes which solves nothing."""
        total = max(self.total, floor.total)
        if self.is_right or floor.passed >= total:
            return float(self.is_right)
        return max(0.0, (self.passed - floor.passed) / (total - floor.passed))

    @property
    def is_right(self) -> bool:
        """All tests passed."""
        return self.total > 0 and self.passed == self.total


class Judge:
    """Runs programs in a sandbox; one for a process, and one call of a problem's checks each."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._calls: dict[str, str] = {}
        self._floors: dict[str, Floor] = {}

    async def judge(self, problem: Problem, reply: str, limits: Limits) -> Verdict:
        """Rate a reply; never an exception for anything that a model can write."""
        program = read_program(reply)
        source = assemble(problem, program)
        if not program or not is_python(source):
            return Verdict(
                0, 1, program, info={"reason": "no program" if not program else "syntax"}
            )
        calls = await self._calls_of(problem)
        ended, answers = await self._answers(problem, source, calls, limits)
        passed, total = await self._count(problem, calls, answers)
        return Verdict(passed, total, program, ended, ended.info())

    async def floor(self, problem: Problem, limits: Limits) -> Floor:
        """Count what can be passed for nothing.

        Checks in Python without a known solution do not say which constants to try.
        """
        if problem.kind != "checks":
            return _floor_of_values(problem)
        if problem.name not in self._floors:
            calls = await self._calls_of(problem)
            right: list[str] = []
            if problem.solution:
                source = assemble(problem, problem.solution)
                _, right = await self._answers(problem, source, calls, limits)
            self._floors[problem.name] = Floor(
                *await self._check(problem, calls, right, order="trivial")
            )
        return self._floors[problem.name]

    async def _answers(
        self, problem: Problem, source: str, calls: str, limits: Limits
    ) -> tuple[Ended, list[str]]:
        """How the run of a program ended, and its answer to each call up to there."""
        total = calls.count("\n")
        option = problem.function
        if problem.kind == "program":
            option = str(max(1.0, limits.seconds / 2))
        files = {"answering.py": _text("answering.py"), "solution.py": source, "calls.txt": calls}
        kind = "program" if problem.kind == "program" else "function"
        command = ("python", "-I", "answering.py", kind, option)
        ended = await self._sandbox.run(UntrustedProgram(command, files), limits)
        return ended, ended.stdout.split("\n")[:total]

    async def _count(self, problem: Problem, calls: str, answers: list[str]) -> tuple[int, int]:
        if problem.kind == "checks":
            return await self._check(problem, calls, answers)
        right = 0
        for found, expected in zip(answers, problem.expected, strict=False):
            # Reading it takes hundreds of times its size, in this process.
            if len(found) > _MOST_LONGER * (len(expected) + _ANY_LENGTH):
                continue
            if problem.kind == "function":
                right += same_value(found, expected)
            else:
                right += same_output(_as_text(found), expected)
        return right, len(problem.expected)

    async def _calls_of(self, problem: Problem) -> str:
        """A line for each call. Checks written in Python are run once to find their calls."""
        if problem.kind == "function":
            return "".join(f"{line}\n" for line in problem.inputs)
        if problem.kind == "program":
            return "".join(f"{text!r}\n" for text in problem.inputs)
        if problem.name not in self._calls:
            self._calls[problem.name] = await self._run_checks(problem, "calls", {})
        return self._calls[problem.name]

    async def _check(
        self, problem: Problem, calls: str, answers: list[str], *, order: str = "judge"
    ) -> tuple[int, int]:
        files = {"calls.txt": calls, "answers.txt": "\n".join(answers)}
        printed = await self._run_checks(problem, order, files)
        held, total = printed.split()
        return int(held), int(total)

    async def _run_checks(self, problem: Problem, order: str, given: dict[str, str]) -> str:
        files = {"checking.py": _text("checking.py"), "checks.py": problem.checks, **given}
        command = ("python", "-I", "-S", "checking.py", order, problem.function)
        ended = await self._sandbox.run(UntrustedProgram(command, files), _CHECK_LIMITS)
        if not ended.succeeded or not ended.stdout.strip():
            if order != "calls" and ended.reason not in (Reason.EXITED, Reason.DEADLINE):
                # Answers so large that the checks cannot read them are wrong answers; a deadline
                # by the clock, before that of processor time, says that the machine is busy.
                return "0 1"
            raise EnvironmentFailure(
                f"the checks of {problem.name} failed ({ended.reason}): {ended.stderr[-300:]}"
            )
        return ended.stdout


@cache
def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _floor_of_values(problem: Problem) -> Floor:
    """The most that one constant, or one argument given back, is right for."""
    is_function = problem.kind == "function"
    constants = Counter(
        plain_value(expected) if is_function else plain_output(expected)
        for expected in problem.expected
    )
    echoes: Counter[int] = Counter()
    for given, expected in zip(problem.inputs, problem.expected, strict=True):
        if is_function:
            arguments = ast.literal_eval(given)
            right = [same_value(repr(argument), expected) for argument in arguments]
        else:
            right = [same_output(given, expected)]
        echoes.update(place for place, is_right in enumerate(right) if is_right)
    most = max([*constants.values(), *echoes.values()], default=0)
    return Floor(most, len(problem.expected))


def _as_text(answer: str) -> str:
    """The text that an answer means; nothing for anything else."""
    try:
        value = ast.literal_eval(answer)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "\0"
    return value if isinstance(value, str) else "\0"
