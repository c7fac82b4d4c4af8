"""Reads proposals and numbers of replies, and rates a problem for its proposer."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gradus_kit.multiagent.answers import without_reasoning

MAX_PROBLEM_CHARS = 2000
MAX_DIGITS = 12
TOPICS = (
    *("a market", "a journey", "a garden", "a library", "a kitchen", "a race", "a workshop"),
    *("a school trip", "ages in a family", "a warehouse", "a bus line", "a collection"),
)
_NUMBER = re.compile(rf"(?<![\w.])-?\d{{1,{MAX_DIGITS}}}(?!\d|\.\d)", re.ASCII)
_CLAIM = re.compile(rf"-?\d{{1,{MAX_DIGITS}}}", re.ASCII)
_EXPRESSION = re.compile(r"[0-9+*() -]{1,80}", re.ASCII)
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
}


@dataclass(frozen=True)
class Proposal:
    """A problem, and the number that is its answer."""

    problem: str
    answer: int


def read_claim(reply: str) -> Proposal | None:
    """The problem and the answer that a proposer claims, after the last `Problem:` and `Answer:`.

    >>> read_claim("Problem: Three bags hold 4 nuts each. How many nuts?\\nAnswer: 12")
    Proposal(problem='Three bags hold 4 nuts each. How many nuts?', answer=12)
    >>> read_claim("Problem: Three bags.") is None
    True
    """
    before, _, after = without_reasoning(reply).rpartition("Answer:")
    before, found, problem = before.rpartition("Problem:")
    problem, claimed = problem.strip(), after.strip().rstrip(".")
    if not found or not 0 < len(problem) <= MAX_PROBLEM_CHARS or not _CLAIM.fullmatch(claimed):
        return None
    return Proposal(problem.encode("utf-8", "replace").decode(), int(claimed))


def read_expression(reply: str) -> Proposal | None:
    """The problem of a reply that is one expression of integers; its answer is computed.

    >>> read_expression("3 * (4 + 5)")
    Proposal(problem='3 * (4 + 5)', answer=27)
    >>> read_expression("7") is read_expression("2 +") is None
    True
    """
    text = without_reasoning(reply).strip()
    if not _EXPRESSION.fullmatch(text):
        return None
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError):
        return None
    if not isinstance(tree, ast.BinOp):
        return None
    value = _value(tree)
    return None if value is None else Proposal(text, value)


def _value(node: ast.expr) -> int | None:
    """The value of a tree of sums, differences and products; None for anything else."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            inner = _value(operand)
            negative = isinstance(sign, ast.USub)
            return None if inner is None else -inner if negative else inner
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            first, second = _value(left), _value(right)
            if first is None or second is None:
                return None
            value = _OPERATORS[type(operator)](first, second)
            return value if abs(value) < 10**MAX_DIGITS else None
    return None


def last_number(reply: str) -> int | None:
    """The last whole number of a reply, after its reasoning.

    >>> last_number("4 times 3 is 12, so 12."), last_number("none"), last_number("1,200")
    (12, None, 1200)
    """
    found = _NUMBER.findall(without_reasoning(reply).replace(",", ""))
    return int(found[-1]) if found else None


def learnability(solved: Sequence[bool]) -> float:
    """4p(1 - p) for the share p that solved it: 1 when half do, 0 when all or none do.

    >>> learnability([True, False]), learnability([True]), learnability([])
    (1.0, 0.0, 0.0)
    """
    if not solved:
        return 0.0
    share = sum(solved) / len(solved)
    return 4.0 * share * (1.0 - share)


def requests(num: int, *, seed: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """A topic and two numbers per task, so that proposals differ.

    >>> next(requests(1, seed=0)) == next(requests(9, seed=0))
    True
    """
    for index in range(num):
        draw = random.Random(f"request {seed} {index}")
        numbers = draw.randint(2, 60), draw.randint(2, 60)
        yield TOPICS[index % len(TOPICS)], numbers
