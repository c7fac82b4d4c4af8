"""Small questions with two options, made from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_WORDS = (
    *("amber", "bridge", "candle", "dune", "ember", "fern", "gravel", "harbor", "island", "jar"),
    *("kettle", "lantern", "meadow", "needle", "orchard", "pebble", "quill", "river", "saddle"),
    *("timber", "umbrella", "valley", "willow", "yarn", "zephyr"),
)


@dataclass(frozen=True)
class Question:
    """A question, its two options, and the letter of the right one."""

    question: str
    options: tuple[str, str]
    answer: str


def build_questions(num: int, *, seed: int, kinds: Sequence[str] = ()) -> Iterator[Question]:
    """So many questions of some kinds, by default `DEFAULT_KINDS`; the first ones are the same for
    every larger number.

    >>> next(build_questions(1, seed=0)).answer in "AB"
    True
    """
    for index in range(num):
        draw = random.Random(f"{seed}/{index}")
        text, right, wrong = KINDS[draw.choice(kinds or DEFAULT_KINDS)](draw)
        answer = draw.choice("AB")
        options = (right, wrong) if answer == "A" else (wrong, right)
        yield Question(text, options, answer)


def _larger(draw: random.Random) -> tuple[str, str, str]:
    low, high = sorted(draw.sample(range(10, 1000), 2))
    return "Which number is larger?", str(high), str(low)


def _sum(draw: random.Random) -> tuple[str, str, str]:
    one, other = draw.randint(2, 99), draw.randint(2, 99)
    right = one + other
    wrong = right + draw.choice((-10, -2, -1, 1, 2, 10))
    return f"What is {one} + {other}?", str(right), str(wrong)


def _earlier(draw: random.Random) -> tuple[str, str, str]:
    first, second = sorted(draw.sample(_WORDS, 2))
    return "Which word comes first in the dictionary?", first, second


def _longer(draw: random.Random) -> tuple[str, str, str]:
    while True:
        short, long = sorted(draw.sample(_WORDS, 2), key=len)
        if len(short) < len(long):
            return "Which word has more letters?", long, short


def _digits(draw: random.Random) -> tuple[str, str, str]:
    low, high = sorted(draw.sample(range(10), 2))
    return "max", str(high), str(low)


KINDS: dict[str, Callable[[random.Random], tuple[str, str, str]]] = {
    "larger": _larger,
    "sum": _sum,
    "earlier": _earlier,
    "longer": _longer,
    "digits": _digits,
}
DEFAULT_KINDS = ("larger", "sum", "earlier", "longer")
"""All but `digits`, which are for models that hardly read."""
