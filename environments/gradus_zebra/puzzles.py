"""Puzzles from reasoning-gym's generator, kept only where our solver finds one solution."""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from gradus.errors import ConfigError
from gradus.log import get_logger
from gradus_zebra.solver import Rule, only_solution

ASK = "Who lives where? Give the names in the order of the houses, from the first to the last."

log = get_logger(__name__)


@dataclass(frozen=True)
class ZebraPuzzle:
    """A puzzle with exactly one solution."""

    text: str
    """Houses, people and clues."""
    names: tuple[str, ...]
    """Who lives in the first house, in the second, and so on; in lower case."""
    size: tuple[int, int]
    """People and kinds of characteristics, names included."""


def make_puzzles(sizes: Sequence[tuple[int, int]], *, seed: int) -> Iterator[ZebraPuzzle]:
    """Endless puzzles of these sizes in turn; ConfigError without the package.

    One that has not exactly one solution is left out with a warning.
    """
    generate = _generator()
    number = 0
    while True:
        people, kinds = sizes[number % len(sizes)]
        puzzle = _make(generate, people, kinds, f"zebra {seed} {number}")
        number += 1
        if puzzle is not None:
            yield puzzle


def _make(generate: Any, people: int, kinds: int, seed: str) -> ZebraPuzzle | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, made = generate(random.Random(seed), people, kinds)
    groups = [
        [item.value for item in made.literals if isinstance(item, kind)]
        for kind in made.element_classes
    ]
    houses = only_solution(groups, [_rule(clue) for clue in made.clues])
    if houses is None or any(houses[item.value] != at for item, at in made.solution.items()):
        log.warning("left out the zebra puzzle %r: its clues do not have one solution", seed)
        return None
    names = sorted((name.lower() for name in groups[0]), key=lambda name: houses[name.title()])
    return ZebraPuzzle(f"{made}\n{ASK}", tuple(names), (people, kinds))


def _rule(clue: Any) -> Rule:
    kind = type(clue).__name__
    if hasattr(clue, "house"):
        return Rule(kind, clue.value.value, house=clue.house)
    return Rule(kind, clue.value1.value, clue.value2.value)


@cache
def _generator() -> Any:
    try:
        module = importlib.import_module("reasoning_gym.logic.contrib.logic_puzzle.generate")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "zebra puzzles need the package `reasoning-gym`; install gradus with its extra: "
            "pip install 'gradus-rl[reasoning]'"
        ) from error
    return module.generate_puzzle
