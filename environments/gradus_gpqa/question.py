"""A question with one right answer and wrong ones that somebody who slips would give."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NUM_WRONG = 3
"""Wrong answers of a generated question."""


@dataclass(frozen=True)
class Question:
    """A question before its options have letters.

    >>> Question("sum", 1, "What is 2 + 2?", "4", ("3", "5", "22")).right
    '4'
    """

    kind: str
    """What it asks for, e.g. `calendar`."""
    level: int
    """1 is easy, 3 is hard."""
    text: str
    """The question without its options."""
    right: str
    """The one right answer."""
    wrong: tuple[str, ...]
    """Wrong answers, all different."""


def numeric_wrong(right: int, slips: Iterable[int], *, lowest: int = 0) -> tuple[int, ...]:
    """Three numbers that are not `right`: what slips give, then neighbours.

    >>> numeric_wrong(12, [21, 12, 12, 9])
    (21, 9, 13)
    """
    chosen: list[int] = []
    near = (right + sign * step for step in range(1, 10) for sign in (1, -1))
    for number in [*slips, *near]:
        if number != right and number >= lowest and number not in chosen:
            chosen.append(number)
        if len(chosen) == NUM_WRONG:
            break
    return tuple(chosen)
