"""Generators of questions whose answer is a day, a person or a statement."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from gradus_gpqa.question import Question

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_PEOPLE = ("Ada", "Ben", "Cleo", "Dario", "Esme", "Farid", "Greta", "Hugo", "Iris", "Jonas")
_CLASSES = ("drons", "felps", "grells", "harps", "kints", "lomps", "morts", "plims", "quibs")
_TRAITS = (("taller", "tallest"), ("older", "oldest"), ("faster", "fastest"))


def calendar(draw: random.Random, level: int) -> Question:
    """Days of the week ahead, behind, and through a statement about another day."""
    today, steps = draw.randrange(7), draw.randint(2, 6 + 40 * (level - 1))
    if level == 1:
        text = f"Today is {DAYS[today]}. Which day is it in {steps} days?"
        right = today + steps
    elif level == 2:
        text = f"Today is {DAYS[today]}. Which day was it {steps} days ago?"
        right = today - steps
    else:
        back = draw.randint(2, 5)
        text = f"{back} days ago it was {DAYS[today]}. Which day is it {steps} days after tomorrow?"
        right = today + back + 1 + steps
    day = right % 7
    others = [(day + offset) % 7 for offset in draw.sample(range(1, 7), 3)]
    return Question("calendar", level, text, DAYS[day], tuple(DAYS[i] for i in others))


def ordering(draw: random.Random, level: int) -> Question:
    """Who comes first, or at a place, when neighbours are compared in any order."""
    count = 3 + level
    people = draw.sample(_PEOPLE, count)
    more, most = draw.choice(_TRAITS)
    clues = [f"{a} is {more} than {b}." for a, b in itertools.pairwise(people)]
    draw.shuffle(clues)
    place = 0 if level == 1 else draw.randrange(1, count)
    asked = most if place == 0 else f"number {place + 1} when all are sorted from the {most} down"
    text = f"{' '.join(clues)} Who is {asked}?"
    others = [person for i, person in enumerate(people) if i != place]
    wrong = tuple(draw.sample(others, 3))
    return Question("ordering", level, text, people[place], wrong)


def syllogism(draw: random.Random, level: int) -> Question:
    """Ask what follows from a chain of `all` and, from level 2 on, one `no`."""
    length = 2 + level
    chain = draw.sample(_CLASSES, length)
    facts = [f"All {a} are {b}." for a, b in itertools.pairwise(chain[: length - (level > 1)])]
    first, second, inner, last = chain[0], chain[1], chain[-2], chain[-1]
    # The form of an option must not tell which is right: all alike, or two of each form.
    if level == 1:
        right = f"All {first} are {last}."
        wrong = (
            f"All {last} are {first}.",
            f"All {second} are {first}.",
            f"All {last} are {second}.",
        )
    else:
        facts.append(f"No {inner} are {last}.")
        shared = (f"All {first} are {last}.", f"No {first} are {second}.")
        if draw.random() < 0.5:
            right, wrong = f"No {first} are {last}.", (*shared, f"All {inner} are {first}.")
        else:
            right, wrong = f"All {first} are {inner}.", (*shared, f"No {second} are {inner}.")
    draw.shuffle(facts)
    text = f"{' '.join(facts)} Which statement must be true?"
    return Question("syllogism", level, text, right, wrong)


def liars(draw: random.Random, level: int) -> Question:
    """Who always tells the truth; drawn again until exactly one assignment fits."""
    count = 2 if level == 1 else 3
    while True:
        people = draw.sample(_PEOPLE, count)
        claims = [_claim(draw, people, speaker) for speaker in range(count)]
        worlds = [
            world
            for world in itertools.product((True, False), repeat=count)
            if all(world[i] == _holds(claim, world) for i, claim in enumerate(claims))
        ]
        if len(worlds) == 1:
            break
    said = " ".join(f'{people[i]} says: "{_said(claim, people)}"' for i, claim in enumerate(claims))
    text = (
        f"Each of {', '.join(people[:-1])} and {people[-1]} either always tells the truth or "
        f"always lies. {said} Who tells the truth?"
    )
    options = [_named(people, world) for world in itertools.product((True, False), repeat=count)]
    right = _named(people, worlds[0])
    wrong = tuple(draw.sample([option for option in options if option != right], 3))
    return Question("liars", level, text, right, wrong)


Claim = tuple[int, int, bool]
"""Two people and whether the claim says that they are the same; one person twice is a claim about
that person alone, truthful or not."""


def _claim(draw: random.Random, people: Sequence[str], speaker: int) -> Claim:
    others = [i for i in range(len(people)) if i != speaker]
    if draw.random() < 0.5:
        other = draw.choice(others)
        return other, other, draw.random() < 0.5
    a, b = draw.sample(range(len(people)), 2)
    return a, b, draw.random() < 0.5


def _holds(claim: Claim, world: Sequence[bool]) -> bool:
    a, b, is_same = claim
    return world[a] == is_same if a == b else (world[a] == world[b]) == is_same


def _said(claim: Claim, people: Sequence[str]) -> str:
    a, b, is_same = claim
    if a == b:
        return f"{people[a]} {'tells the truth' if is_same else 'lies'}."
    kind = "of the same kind" if is_same else "of different kinds"
    return f"{people[a]} and {people[b]} are {kind}."


def _named(people: Sequence[str], world: Sequence[bool]) -> str:
    truthful = [person for person, is_truthful in zip(people, world, strict=True) if is_truthful]
    return " and ".join(truthful) if truthful else "nobody"
