"""Generators of questions whose answer is a number."""

from __future__ import annotations

import random
from collections.abc import Iterable
from fractions import Fraction
from math import comb, factorial

from gradus_gpqa.question import Question, numeric_wrong

_NAMES = ("Ada", "Ben", "Cleo", "Dario", "Esme", "Farid", "Greta", "Hugo", "Iris", "Jonas")
_GOODS = ("pencils", "apples", "stamps", "bolts", "tickets", "marbles", "tiles", "candles")
_UNITS = (
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("kilometres", "metres", 1000),
    ("metres", "centimetres", 100),
    ("kilograms", "grams", 1000),
    ("litres", "millilitres", 1000),
    ("dozens", "pieces", 12),
    ("feet", "inches", 12),
    ("yards", "feet", 3),
)


def _numeric(
    kind: str,
    level: int,
    text: str,
    right: int,
    slips: Iterable[int],
    *,
    lowest: int = 1,
    unit: str = "",
) -> Question:
    wrong = numeric_wrong(random.Random(f"wrong {text}"), right, slips, lowest=lowest, step=1)
    shown = [f"{number} {unit}".strip() for number in (right, *wrong)]
    return Question(kind, level, text, shown[0], tuple(shown[1:]))


def shopping(draw: random.Random, level: int) -> Question:
    """Prices times amounts; from level 2 on something is given back, at level 3 shared."""
    name, other = draw.sample(_NAMES, 2)
    good = draw.choice(_GOODS)
    boxes, each = draw.randint(3, 4 + 4 * level), draw.randint(4, 6 + 5 * level)
    total = boxes * each
    text = f"{name} buys {boxes} boxes with {each} {good} each."
    if level == 1:
        text += f" How many {good} are that?"
        return _numeric("shopping", level, text, total, [boxes + each, total + each, total - boxes])
    gone = draw.randint(2, each)
    text += f" {name} gives {gone} {good} to {other}"
    if level == 2:
        text += f". How many {good} does {name} have left?"
        slips = [total + gone, total, boxes * (each - gone)]
        return _numeric("shopping", level, text, total - gone, slips)
    people = draw.randint(4, 9)
    left = (total - gone) % people
    text += (
        f" and shares the rest equally among {people} children, as far as whole {good} go. "
        f"How many {good} are left over?"
    )
    slips = [total % people, people, (total + 1) % people]
    return _numeric("shopping", level, text, left, slips, lowest=0)


def conversion(draw: random.Random, level: int) -> Question:
    """Units: one step, then with a rest, then backwards."""
    big, small, factor = draw.choice(_UNITS)
    count, rest = draw.randint(2, 5 + 6 * level), draw.randint(1, factor - 1)
    if level == 1:
        text = f"How many {small} are {count} {big}?"
        right, slips = count * factor, [count + factor, count * factor + factor, count * 10]
    elif level == 2:
        text = f"How many {small} are {count} {big} and {rest} {small} together?"
        right = count * factor + rest
        slips = [count * factor, count * factor - rest, (count + rest) * factor]
    else:
        total = count * factor + rest
        text = f"{total} {small} are {count} {big} and how many {small}?"
        right, slips = rest, [factor - rest, rest * 10, rest + factor]
    return _numeric("conversion", level, text, right, slips, unit=small)


def sequence(draw: random.Random, level: int) -> Question:
    """The next number: equal steps, equal factors, steps that grow."""
    start, step = draw.randint(1, 9), draw.randint(2, 9)
    if level == 1:
        shown = [start + step * i for i in range(6)]
        rule = "Each number is the one before plus the same number."
    elif level == 2:
        step = draw.randint(2, 4)
        shown = [start * step**i for i in range(6)]
        rule = "Each number is the one before times the same number."
    else:
        shown, growth = [start], draw.randint(1, 5)
        for i in range(5):
            shown.append(shown[-1] + step + i * growth)
        rule = "Each step is larger than the step before by the same amount."
    numbers, right = shown[:-1], shown[-1]
    text = f"{rule} Which number comes next: {', '.join(map(str, numbers))}?"
    last = numbers[-1] - numbers[-2]
    slips = [numbers[-1] + last, right + last, right + step, numbers[-1] + step]
    return _numeric("sequence", level, text, right, slips)


def percentage(draw: random.Random, level: int) -> Question:
    """A share of a price, a price after a change, and the price before it."""
    percent = draw.choice((10, 20, 25, 40, 50, 75))
    whole = 20 * draw.randint(2, 10 * level)
    part = whole * percent // 100
    if level == 1:
        text = f"What is {percent} % of {whole}?"
        return _numeric("percentage", level, text, part, [whole - part, part * 2, part + 10])
    text = f"A coat costs {whole} euros. Its price falls by {percent} %."
    if level == 2:
        text += " What does it cost then, in euros?"
        return _numeric("percentage", level, text, whole - part, [part, whole - percent, whole])
    text = (
        f"After its price fell by {percent} %, a coat costs {whole - part} euros. "
        "What did it cost before, in euros?"
    )
    slips = [whole - part + percent, (whole - part) * (100 + percent) // 100, whole - part]
    return _numeric("percentage", level, text, whole, slips)


def travel(draw: random.Random, level: int) -> Question:
    """Distance, time and speed; at level 3 two trains meet."""
    speed, hours = 10 * draw.randint(3, 12), draw.randint(2, 3 + 2 * level)
    distance = speed * hours
    if level == 1:
        text = (
            f"A train goes {speed} kilometres per hour for {hours} hours. "
            "How many kilometres does it go?"
        )
        return _numeric("travel", level, text, distance, [speed + hours, distance + speed])
    if level == 2:
        text = (
            f"A train goes {distance} kilometres at {speed} kilometres per hour. "
            "How many hours does it need?"
        )
        return _numeric("travel", level, text, hours, [hours + 2, speed // hours, hours * 2])
    other = 10 * draw.randint(3, 12)
    apart = (speed + other) * hours
    text = (
        f"Two stations are {apart} kilometres apart. Two trains leave them at the same time "
        f"towards each other, one at {speed} and one at {other} kilometres per hour. "
        "After how many hours do they meet?"
    )
    return _numeric("travel", level, text, hours, [apart // speed, apart // other, hours * 2])


def counting(draw: random.Random, level: int) -> Question:
    """Choices: independent ones, orders, and groups without order."""
    if level == 1:
        a, b = draw.randint(2, 9), draw.randint(3, 9)
        text = (
            f"A menu has {a} soups and {b} main dishes. How many meals of one soup and one main "
            "dish are there?"
        )
        return _numeric("counting", level, text, a * b, [a + b, a * b - 1, a * (b + 1)])
    if level == 2:
        n, good = draw.randint(3, 6), draw.choice(_GOODS)
        text = f"In how many orders can {n} different {good} lie in a row?"
        return _numeric("counting", level, text, factorial(n), [n * n, factorial(n - 1), 2**n])
    n, k = draw.randint(5, 9), draw.randint(2, 3)
    text = f"How many different teams of {k} can be formed from {n} people?"
    ordered = factorial(n) // factorial(n - k)
    return _numeric("counting", level, text, comb(n, k), [ordered, n * k, n**k])


def probability(draw: random.Random, level: int) -> Question:
    """One draw from a bag; two draws with and without putting back."""
    red, blue = draw.randint(2, 3 + 2 * level), draw.randint(3, 4 + 2 * level)
    both = red + blue
    bag = f"A bag holds {red} red and {blue} blue balls, and nothing else."
    once = Fraction(red, both)
    if level == 1:
        text = f"{bag} One ball is drawn at random. How likely is it red?"
        right, slips = once, [Fraction(blue, both), Fraction(1, both), Fraction(red, both + 1)]
    elif level == 2:
        text = (
            f"{bag} A ball is drawn at random, put back, and a ball is drawn again. "
            "How likely are both red?"
        )
        right = once**2
        slips = [once, Fraction(red * (red - 1), both * (both - 1)), Fraction(blue**2, both**2)]
    else:
        text = (
            f"{bag} Two balls are drawn at random, the first is not put back. "
            "How likely are both red?"
        )
        right = Fraction(red * (red - 1), both * (both - 1))
        slips = [once**2, once, Fraction(red * (red - 1), both * both)]
    step = Fraction(1, (both, both * both, both * (both - 1))[level - 1])
    wrong = numeric_wrong(
        random.Random(f"wrong {text}"), right, slips, lowest=step, highest=1 - step, step=step
    )
    return Question("probability", level, text, str(right), tuple(map(str, wrong)))


def remainder(draw: random.Random, level: int) -> Question:
    """Remainders of a number, a product and a power."""
    divisor = draw.randint(6, 8 + 3 * level)
    a, b = draw.randint(20, 40 * level), draw.randint(11, 20 * level)
    if level == 1:
        text = f"What remains when {a} is divided by {divisor}?"
        right, slips = a % divisor, [a // divisor, divisor - a % divisor]
    elif level == 2:
        text = f"What remains when the product of {a} and {b} is divided by {divisor}?"
        right, slips = a * b % divisor, [(a % divisor) * (b % divisor), (a + b) % divisor]
    else:
        base, power = draw.randint(2, 9), draw.randint(4, 9)
        text = f"What remains when {base} to the power of {power} is divided by {divisor}?"
        right, slips = base**power % divisor, [base * power % divisor, base % divisor]
    return _numeric("remainder", level, text, right, slips, lowest=0)
