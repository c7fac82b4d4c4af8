"""A question with one right answer and wrong ones that somebody who slips would give."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

Number = TypeVar("Number", int, Fraction)

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


def numeric_wrong(
    draw: random.Random,
    right: Number,
    slips: Iterable[Number],
    *,
    lowest: Number,
    highest: Number | None = None,
    step: Number,
) -> tuple[Number, ...]:
    """Three numbers that are not `right`: what slips give, then some at a few steps from it.

    How many of them are smaller is drawn, so that no place in their order is the right one: a slip
    on a side that is full is mirrored to the other.

    >>> numeric_wrong(random.Random(4), 12, [21, 12, 12, 9], lowest=1, step=1)
    (21, 9, 17)
    """
    num_below = draw.randint(0, NUM_WRONG)
    chosen: list[Number] = []

    def is_taken(number: Number, *, on_either_side: bool = False) -> bool:
        if number in (right, *chosen) or number < lowest:
            return False
        if highest is not None and number > highest:
            return False
        is_below = number < right
        side = sum((other < right) == is_below for other in chosen)
        if on_either_side or side < (num_below if is_below else NUM_WRONG - num_below):
            chosen.append(number)
            return True
        return False

    # Never a number and its mirror image: the right one would lie in their middle.
    distances = draw.sample(range(1, 10), 9)
    pairs = [(slip, 2 * right - slip) for slip in slips]
    pairs += [(right - step * i, right + step * i) for i in distances]
    for on_either_side in (False, True):
        for pair in pairs:
            if len(chosen) < NUM_WRONG and not any(2 * right - wrong in chosen for wrong in pair):
                any(is_taken(number, on_either_side=on_either_side) for number in pair)
    return tuple(chosen)
