"""Problems by seed; adding more of them changes none that were there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from gradus_forth_lang.problems import hard, loops, simple
from gradus_forth_lang.problems.problem import Problem

TEMPLATES = (*simple.TEMPLATES, *loops.TEMPLATES, *hard.TEMPLATES)
NUM_TIERS = 6
SOLUTION = "answer"
"""The word that a submission defines."""


@dataclass(frozen=True)
class Numbered:
    """A problem with its name, like `t3-powers-12`."""

    name: str
    tier: int
    problem: Problem


def build_problems(tiers: Sequence[int], per_tier: int, *, seed: int = 0) -> Iterator[Numbered]:
    """`per_tier` different problems of each tier, templates in turn, or as many as there are.

    >>> [one.name for one in build_problems([0], 3)]
    ['t0-linear-0', 't0-two-weights-0', 't0-rest-0']
    """
    for tier in tiers:
        templates = [template for template in TEMPLATES if template.tier == tier]
        seen: set[str] = set()
        found = number = 0
        # Parameters repeat; after as many draws there are hardly any new ones left.
        while found < per_tier and number < 20 * per_tier + 20:
            template = templates[number % len(templates)]
            index = number // len(templates)
            problem = template.build(Random(f"{seed} {template.name} {index}"))
            number += 1
            if problem.needs_its_input and problem.effect + problem.text not in seen:
                seen.add(problem.effect + problem.text)
                found += 1
                yield Numbered(f"t{tier}-{template.name}-{index}", tier, problem)
