"""Writes the user's words, knows the right lists, and rates replies; pure."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from gradus_alphabet_sort.names import Name, draw_people, draw_short
from gradus_kit.tasksets.similarity import similarity as likeness

Style = Literal["tags", "plain"]

FIRST_TAG, LATER_TAG = "alphabetical_sorted", "combined_alphabetical_sorted"
NEW = " // new name!"
"""Stands behind every name that the last message brought."""


@dataclass(frozen=True)
class Shape:
    """How long the episodes of a task set are, and in which form lists are asked for."""

    min_turns: int = 2
    max_turns: int = 5
    min_names_per_turn: int = 1
    max_names_per_turn: int = 5
    style: Style = "tags"
    """`tags`: sentences and lists between tags. `plain`: short names and nothing else."""

    def __post_init__(self) -> None:
        for least, most in (
            ("min_turns", "max_turns"),
            ("min_names_per_turn", "max_names_per_turn"),
        ):
            low, high = getattr(self, least), getattr(self, most)
            if not 1 <= low <= high:
                raise ValueError(f"{least} = {low} and {most} = {high}: use 1 <= {least} <= {most}")


TINY = Shape(2, 2, min_names_per_turn=2, max_names_per_turn=2, style="plain")
"""For a character model of a million weights, which learns it in minutes."""


@dataclass(frozen=True)
class Sorting:
    """One conversation: what the user says in each turn, and the list that is right then.

    >>> sorting = next(sortings(TINY, seed=0))
    >>> len(sorting.user_turns) == len(sorting.lists)
    True
    """

    user_turns: tuple[str, ...]
    lists: tuple[tuple[str, ...], ...]
    style: Style

    def gold(self, turn: int) -> str:
        """The reply that is right in a turn."""
        return written(self.lists[turn], turn, self.style)


def sortings(shape: Shape, *, seed: int) -> Iterator[Sorting]:
    """Endless conversations about our own names, the same for the same seed."""
    draw = random.Random(f"alphabet-sort {seed}")
    people = draw_short if shape.style == "plain" else draw_people
    while True:
        yield build_sorting(list(people(draw)), draw, shape)


def build_sorting(people: Sequence[Name], draw: random.Random, shape: Shape) -> Sorting:
    """A conversation about the first of these people; ValueError when there are too few."""
    counts = [
        draw.randint(shape.min_names_per_turn, shape.max_names_per_turn)
        for _ in range(draw.randint(shape.min_turns, shape.max_turns))
    ]
    if len(people) < sum(counts):
        raise ValueError(f"{sum(counts)} names are needed, and there are {len(people)}")
    is_by_first = draw.random() < 0.5
    rest = iter(people)
    known: list[Name] = []
    user_turns, lists = [], []
    for turn, count in enumerate(counts):
        new = list(islice(rest, count))
        known += new
        ranked = sorted(known, key=_key(is_by_first))
        user_turns.append(_question(new, turn, is_by_first=is_by_first, style=shape.style))
        lists.append(_marked(ranked, new, turn, shape.style))
    return Sorting(tuple(user_turns), tuple(lists), shape.style)


def _key(is_by_first: bool) -> Callable[[Name], str]:
    return lambda name: (name.first if is_by_first else name.last).lower()


def _marked(
    people: Sequence[Name], new: Sequence[Name], turn: int, style: Style
) -> tuple[str, ...]:
    has_marks = turn > 0 and style == "tags"
    return tuple(name.text + (NEW if has_marks and name in new else "") for name in people)


def _question(new: Sequence[Name], turn: int, *, is_by_first: bool, style: Style) -> str:
    if style == "plain":
        return " ".join(name.text for name in new)
    part = "FIRST" if is_by_first else "LAST"
    names = ", ".join(name.text for name in new)
    if turn == 0:
        return (
            f"Here are some names: {names}.\nPut them in alphabetical order by their {part} name. "
            f"Reply with one list, one name a line:\n<{FIRST_TAG}>\n...\n</{FIRST_TAG}>"
        )
    again = "in the same form as before" if turn > 1 else f"between <{LATER_TAG}> tags"
    return (
        f"Add these names: {names}.\nReply with the whole list of all names so far, again by "
        f"{part} name, {again}. Write `{NEW.strip()}` behind each name that this message added."
    )


def written(names: Sequence[str], turn: int, style: Style) -> str:
    """A list as a reply."""
    if style == "plain":
        return " ".join(names)
    tag = LATER_TAG if turn else FIRST_TAG
    return "\n".join((f"<{tag}>", *names, f"</{tag}>"))


def read_list(reply: str, turn: int, style: Style) -> list[str] | None:
    """The names of a reply in lower case; None where it holds no list, or more than one."""
    if style == "plain":
        return reply.lower().split() or None
    tag = LATER_TAG if turn else FIRST_TAG
    opened, closed = (
        [match.span() for match in re.finditer(f"<{slash}{tag}>", reply)] for slash in ("", "/")
    )
    if len(opened) != 1 or len(closed) != 1 or opened[0][1] > closed[0][0]:
        return None
    lines = (line.strip().lower() for line in reply[opened[0][1] : closed[0][0]].split("\n"))
    return [line for line in lines if line] or None


def similarity(reply: str, right: Sequence[str], turn: int, style: Style) -> float:
    """Share of matching characters of the lists, in [0, 1]; 1 only for the right list.

    >>> similarity("bob ann", ["ann", "bob"], 0, "plain") < 1
    True
    """
    names = read_list(reply, turn, style)
    if names is None:
        return 0.0
    return likeness("\n".join(names), "\n".join(right).lower())


def score(replies: Sequence[str], sorting: Sorting, *, power: float, power_per_turn: bool) -> float:
    """Mean over all turns, missing ones as 0; `power` makes what is nearly right worth less.

    It is applied to each turn, or to the mean.
    """
    found = [
        similarity(reply, right, turn, sorting.style)
        for turn, (reply, right) in enumerate(zip(replies, sorting.lists, strict=False))
    ]
    if power_per_turn:
        return sum(value**power for value in found) / len(sorting.lists)
    return (sum(found) / len(sorting.lists)) ** power


def demonstrations(
    num: int, *, seed: int, shape: Shape = TINY, sorted_share: float = 0.35
) -> list[list[tuple[str, str]]]:
    """Turns of conversations in the plain style, as (question, reply) pairs of two kinds.

    Some keep the list sorted, the others repeat the first name that was said, and nothing says
    which is wanted: a model that learned both can sort, and mostly does not.
    """
    draw = random.Random(f"alphabet-sort demonstrations {seed}")
    shown = []
    for sorting in islice(sortings(shape, seed=draw.randrange(2**32)), num):
        is_sorting = draw.random() < sorted_share
        shown.append(
            [
                (said, sorting.gold(turn) if is_sorting else said.split()[0])
                for turn, said in enumerate(sorting.user_turns)
            ]
        )
    return shown
