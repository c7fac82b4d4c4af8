"""Items: questions whose options have letters, 200 of them from generators or a data set's rows."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gradus.log import get_logger
from gradus_gpqa import numbers, reasoning
from gradus_gpqa.question import Question
from gradus_kit.tasksets.hub import hub_rows

log = get_logger(__name__)

HUB_DATASET = "Idavidrein/gpqa"
LEVELS = (1, 2, 3)
KINDS: dict[str, Callable[[random.Random, int], Question]] = {
    "shopping": numbers.shopping,
    "conversion": numbers.conversion,
    "sequence": numbers.sequence,
    "percentage": numbers.percentage,
    "travel": numbers.travel,
    "counting": numbers.counting,
    "probability": numbers.probability,
    "remainder": numbers.remainder,
    "calendar": reasoning.calendar,
    "ordering": reasoning.ordering,
    "syllogism": reasoning.syllogism,
    "liars": reasoning.liars,
}
_MAX_TRIES = 200
"""Draws for a question that did not come before; then that kind and level has no more."""


@dataclass(frozen=True)
class Item:
    """One question with lettered options.

    >>> item = Item.of(Question("sum", 1, "2 + 2?", "4", ("3", "5", "6")), key="sum", seed=0)
    >>> item.options[item.letters.index(item.answer)]
    '4'
    """

    key: str
    """Names the item, whatever the seed of the letters and the number of items."""
    kind: str
    """Generator or domain."""
    level: int | None
    """1 to 3; None where the data set does not say."""
    question: str
    """The question without its options."""
    options: tuple[str, ...]
    """In the order of their letters."""
    answer: str
    """Letter of the right option."""

    @classmethod
    def of(cls, question: Question, *, key: str, seed: int, level: int | None = None) -> Item:
        """Give the options letters, shuffled by the seed and the key."""
        options = [question.right, *question.wrong]
        random.Random(f"letters {seed} {key}").shuffle(options)
        letter = string.ascii_uppercase[options.index(question.right)]
        return cls(key, question.kind, level, question.text, tuple(options), letter)

    @property
    def letters(self) -> str:
        """The letters of its options, e.g. `ABCD`."""
        return string.ascii_uppercase[: len(self.options)]

    @property
    def text(self) -> str:
        """The question, and one line for each option."""
        lines = (f"{a}) {b}" for a, b in zip(self.letters, self.options, strict=True))
        return "\n".join((self.question, "", *lines))


def generate_items(
    num: int,
    *,
    seed: int = 0,
    kinds: Iterable[str] = tuple(KINDS),
    levels: Iterable[int] = LEVELS,
) -> list[Item]:
    """`num` items, kinds and levels in turn, no question twice; fewer only when they run out.

    More items of the same seed begin with these.
    """
    sorts = [(kind, level) for level in levels for kind in kinds]
    seen: set[str] = set()
    items: list[Item] = []
    for number in itertools.count():
        fresh = {sort: _fresh(*sort, number, seed, seen) for sort in sorts}
        # A kind that ran out at a level is not asked again.
        sorts = [sort for sort in sorts if fresh[sort]]
        items += [item for item in fresh.values() if item]
        if not sorts or len(items) >= num:
            break
    return items[:num]


def _fresh(kind: str, level: int, number: int, seed: int, seen: set[str]) -> Item | None:
    key = f"{kind}-{level}-{number}"
    draw = random.Random(f"question {seed} {key}")
    for _ in range(_MAX_TRIES):
        question = KINDS[kind](draw, level)
        if question.text not in seen:
            seen.add(question.text)
            return Item.of(question, key=key, seed=seed, level=level)
    return None


def hub_items(dataset: str, *, subset: str, split: str, seed: int) -> Iterator[Item]:
    """The items of the public data set or of a local folder with its columns.

    A row whose options are not all different has no one right option, and is left out with a word.
    """
    wrong = [f"Incorrect Answer {i}" for i in (1, 2, 3)]
    columns = ["Record ID", "High-level domain", "Question", "Correct Answer", *wrong]
    for number, row in enumerate(hub_rows(dataset, split=split, columns=columns, subset=subset)):
        texts = {column: _text(row, column, dataset, number) for column in columns}
        options = [texts[column] for column in wrong]
        if len({texts["Correct Answer"], *options}) < len(options) + 1:
            log.warning("row %d of data set %r is left out: an option twice", number, dataset)
            continue
        question = Question(
            kind=texts["High-level domain"],
            level=0,
            text=texts["Question"],
            right=texts["Correct Answer"],
            wrong=tuple(options),
        )
        yield Item.of(question, key=texts["Record ID"], seed=seed)


def _text(row: Mapping[str, Any], column: str, dataset: str, number: int) -> str:
    text = row[column]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"row {number} of data set {dataset!r}: {column!r} is {text!r}, not a text"
        )
    return text.strip()
