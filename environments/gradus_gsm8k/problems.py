"""Word problems of two to four steps, made from templates of ours."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

_NAMES = (
    *("Ada", "Ben", "Clara", "David", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kofi"),
    *("Lena", "Mei", "Nils", "Olga", "Priya", "Rosa", "Sami", "Tara", "Viktor"),
)
_THINGS = (
    *("apples", "books", "buttons", "cards", "cookies", "eggs", "lemons", "marbles", "pencils"),
    *("postcards", "shells", "stamps", "stickers", "tickets"),
)
_DRAWS = 200
"""Problems that are drawn for each new one, at most."""

Problem = tuple[str, int]
Template = Callable[[random.Random], Problem]


def make_problems(seed: int = 0) -> Iterator[Problem]:
    """Different problems with their answers, all above zero, until hardly any are left.

    >>> text, answer = next(make_problems())
    >>> text.endswith("?"), answer > 0
    (True, True)
    """
    draw = random.Random(f"gsm8k {seed}")
    seen: set[str] = set()
    failed = 0
    while failed < _DRAWS:
        text, answer = draw.choice(_TEMPLATES)(draw)
        if text in seen:
            failed += 1
            continue
        failed = 0
        seen.add(text)
        yield text, answer


def _boxes(draw: random.Random) -> Problem:
    name, thing = draw.choice(_NAMES), draw.choice(_THINGS)
    boxes, each, given = draw.randint(3, 12), draw.randint(4, 20), draw.randint(2, 11)
    text = (
        f"{name} has {boxes} boxes with {each} {thing} in each. {name} gives {given} {thing} away. "
        f"How many {thing} are left?"
    )
    return text, boxes * each - given


def _shopping(draw: random.Random) -> Problem:
    name = draw.choice(_NAMES)
    first, second = draw.sample(_THINGS, 2)
    num_first, num_second = draw.randint(2, 9), draw.randint(2, 9)
    price_first, price_second = draw.randint(2, 8), draw.randint(2, 8)
    change = draw.randint(1, 20)
    paid = num_first * price_first + num_second * price_second + change
    text = (
        f"{name} buys {num_first} {first} at ${price_first} each and {num_second} {second} at "
        f"${price_second} each, and pays with ${paid}. How many dollars does {name} get back?"
    )
    return text, change


def _earnings(draw: random.Random) -> Problem:
    name, other = draw.sample(_NAMES, 2)
    hours, wage, days, more = (draw.randint(*span) for span in ((2, 8), (9, 25), (3, 6), (2, 4)))
    text = (
        f"{name} works {hours} hours a day for ${wage} an hour, {days} days a week. {other} earns "
        f"{more} times as much in a week. How many dollars do they earn together in a week?"
    )
    return text, hours * wage * days * (1 + more)


def _share(draw: random.Random) -> Problem:
    name, thing = draw.choice(_NAMES), draw.choice(_THINGS)
    friends, each, kept = draw.randint(3, 9), draw.randint(3, 15), draw.randint(2, 12)
    found = draw.randint(1, friends * each + kept - 1)
    had = friends * each + kept - found
    text = (
        f"{name} had {had} {thing} and found {found} more. {name} keeps {kept} of them and shares "
        f"the rest equally among {friends} friends. How many {thing} does each friend get?"
    )
    return text, each


def _pages(draw: random.Random) -> Problem:
    name = draw.choice(_NAMES)
    first, days, left = draw.randint(8, 30), draw.randint(3, 7), draw.randint(2, 9)
    pages = first + 2 * first + left * days
    text = (
        f"A book has {pages} pages. {name} reads {first} pages on Monday and twice as many on "
        f"Tuesday. How many pages a day must {name} read to finish it in {days} more days?"
    )
    return text, left


def _ages(draw: random.Random) -> Problem:
    young, old = draw.sample(_NAMES, 2)
    age, times, years = draw.randint(4, 14), draw.randint(2, 5), draw.randint(2, 15)
    text = (
        f"{old} is {times} times as old as {young}, who is {age}. How old will the two be together "
        f"in {years} years?"
    )
    return text, age * (1 + times) + 2 * years


def _percent(draw: random.Random) -> Problem:
    name, thing = draw.choice(_NAMES), draw.choice(_THINGS)
    percent, hundreds, price = (
        draw.choice((10, 20, 25, 40, 50)),
        draw.randint(1, 6),
        draw.randint(2, 6),
    )
    sold = percent * hundreds
    text = (
        f"{name} brings {100 * hundreds} {thing} to the market and sells {percent}% of them for "
        f"${price} each. How many dollars does {name} take?"
    )
    return text, sold * price


def _travel(draw: random.Random) -> Problem:
    name = draw.choice(_NAMES)
    fast, hours, slow, more = (draw.randint(*span) for span in ((40, 90), (2, 5), (8, 25), (2, 4)))
    text = (
        f"{name} drives for {hours} hours at {fast} km an hour and then rides a bicycle for {more} "
        f"hours at {slow} km an hour. How many km does {name} travel?"
    )
    return text, fast * hours + slow * more


_TEMPLATES: tuple[Template, ...] = (
    *(_boxes, _shopping, _earnings, _share, _pages, _ages, _percent, _travel),
)
