"""A solver of zebra puzzles that counts solutions; pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Houses = dict[str, int]
"""Item → house, counted from 1."""


@dataclass(frozen=True)
class Rule:
    """One clue: where an item is, or how two of them stand to each other.

    >>> Rule("consecutive", "Ann", "the cat").holds({"Ann": 1, "the cat": 2})
    True
    """

    kind: str
    """`found_at`, `not_at`, `same_house`, `consecutive`, `beside`, `left_of`, `right_of`,
    `one_between` or `two_between`."""
    first: str
    second: str = ""
    house: int = 0
    """Of `found_at` and `not_at`."""

    @property
    def items(self) -> tuple[str, ...]:
        """The items that the clue speaks of."""
        return (self.first, self.second) if self.second else (self.first,)

    def holds(self, houses: Mapping[str, int]) -> bool:
        """Tell whether it is true when its items stand in these houses."""
        at = houses[self.first]
        if self.kind == "found_at":
            return at == self.house
        if self.kind == "not_at":
            return at != self.house
        step = houses[self.second] - at
        match self.kind:
            case "same_house":
                return step == 0
            case "consecutive":
                return step == 1
            case "beside":
                return abs(step) == 1
            case "left_of":
                return step > 0
            case "right_of":
                return step < 0
            case "one_between":
                return abs(step) == 2
            case "two_between":
                return abs(step) == 3
        raise ValueError(f"there is no clue of kind {self.kind!r}")


def solutions(groups: Sequence[Sequence[str]], rules: Sequence[Rule]) -> Iterator[Houses]:
    """Every way to give each house one item of each group so that all rules hold.

    >>> rules = [Rule("found_at", "Ann", house=2), Rule("same_house", "Ann", "the cat")]
    >>> list(solutions([["Ann", "Bob"], ["the cat", "the dog"]], rules))
    [{'Ann': 2, 'Bob': 1, 'the cat': 2, 'the dog': 1}]
    """
    yield from _place(groups, list(rules), {})


def _place(groups: Sequence[Sequence[str]], rules: list[Rule], houses: Houses) -> Iterator[Houses]:
    """Place the first group in every order that breaks no rule about what is placed by then."""
    if not groups:
        yield dict(houses)
        return
    group, rest = groups[0], groups[1:]
    known = houses.keys() | set(group)
    due = [rule for rule in rules if known.issuperset(rule.items)]
    later = [rule for rule in rules if rule not in due]
    for order in itertools.permutations(range(1, len(group) + 1)):
        placed = {**houses, **dict(zip(group, order, strict=True))}
        if all(rule.holds(placed) for rule in due):
            yield from _place(rest, later, placed)


def only_solution(groups: Sequence[Sequence[str]], rules: Sequence[Rule]) -> Houses | None:
    """The solution where there is exactly one, else None."""
    found = list(itertools.islice(solutions(groups, rules), 2))
    return found[0] if len(found) == 1 else None
