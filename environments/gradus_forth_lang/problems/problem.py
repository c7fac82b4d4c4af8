"""A problem, and the worth of a submission."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gradus_forth_lang.dictionary import build_machine
from gradus_forth_lang.machine import ForthError, Limits

Input: TypeAlias = int | str | list[int]
"""A number, a string (address and length), or cells (address and count)."""
CASE_LIMITS = Limits(steps=50_000)
NUM_CASES = 8


@dataclass(frozen=True)
class Case:
    """One call of the word and what it must leave."""

    inputs: tuple[Input, ...]
    stack: tuple[int, ...] = ()
    """The whole stack after the call, top last."""
    output: str = ""
    """What it prints, blanks at the ends aside."""

    @property
    def text(self) -> str:
        """The case in a line, as the model reads it."""
        shown = " ".join(_shown(value) for value in self.inputs)
        result = " ".join(map(str, self.stack))
        printed = f" and prints {self.output.strip()!r}" if self.output else ""
        return f"{shown} -> {result or 'an empty stack'}{printed}"


@dataclass(frozen=True)
class Template:
    """A family of problems of one tier."""

    tier: int
    name: str
    build: Callable[..., Problem]


@dataclass(frozen=True)
class Problem:
    """A word to define."""

    effect: str
    """Its stack effect."""
    text: str
    """The task, in words."""
    reference: str
    """The body of a right definition; `{name}` is the word's own name."""
    cases: tuple[Case, ...]
    helpers: str = ""
    """Definitions that must come before it."""
    formula: str = ""
    """The task in a few characters, for small models; empty where there is no such form."""

    @property
    def needs_its_input(self) -> bool:
        """True if two cases leave different things, so that no constant solves it."""
        return len({(case.stack, case.output) for case in self.cases}) > 1

    def solution(self, name: str) -> str:
        return f"{self.helpers} : {name} {self.reference} ;".strip()


@dataclass(frozen=True)
class Grade:
    """How a submission did."""

    num_passed: int
    num_cases: int
    reason: str = ""
    """Of the first case that failed."""

    @property
    def is_right(self) -> bool:
        return self.num_passed == self.num_cases


def build_cases(
    inputs: Sequence[tuple[Input, ...]], solve: Callable[..., int | tuple[int, ...] | str]
) -> tuple[Case, ...]:
    """The cases of some inputs; `solve` gives the stack, or the text that is printed."""
    cases = []
    for values in inputs:
        result = solve(*values)
        if isinstance(result, str):
            cases.append(Case(values, output=result))
        else:
            cases.append(Case(values, (result,) if isinstance(result, int) else result))
    return tuple(cases)


def grade(code: str, name: str, cases: Sequence[Case]) -> Grade:
    """Run a submission on every case, each on a new machine; it never raises.

    >>> grade(": twice 2* ;", "twice", [Case((2,), (4,))]).is_right
    True
    """
    reasons = [reason for case in cases if (reason := _failure(code, name, case)) is not None]
    return Grade(len(cases) - len(reasons), len(cases), reasons[0] if reasons else "")


def _failure(code: str, name: str, case: Case) -> str | None:
    machine = build_machine(CASE_LIMITS)
    try:
        machine.run(code)
        machine.base = 10
        machine.stack.clear()
        before = len(machine.text)
        for value in case.inputs:
            if isinstance(value, int):
                machine.push(value)
            elif isinstance(value, str):
                machine.push_many([*machine.keep_text(value)])
            else:
                start = machine.allot(len(value) * 8)
                for place, cell in enumerate(value):
                    machine.store(start + place * 8, cell)
                machine.push_many([start, len(value)])
        if name.upper() not in machine.names:
            return f"the word {name} is not defined"
        machine.execute(machine.words[machine.names[name.upper()]])
    except ForthError as error:
        return f"{case.text}, but it failed: {error}"
    if tuple(machine.stack) != case.stack:
        found = " ".join(map(str, machine.stack[-8:])) or "an empty stack"
        return f"{case.text}, but it left {found}"
    printed = machine.text[before:]
    if printed.split() != case.output.split():
        return f"{case.text}, but it printed {printed.strip()[:80]!r}"
    return None


def _shown(value: Input) -> str:
    if isinstance(value, str):
        return f's" {value}"'
    if isinstance(value, list):
        return f"<the address of {' '.join(map(str, value))}> {len(value)}"
    return str(value)
