"""Problems about counting, chance and integers: five levels of two subjects."""

from __future__ import annotations

import math
import random
from fractions import Fraction

from gradus_hendrycks_math.latex import fraction

_WORDS = (
    *("banana", "letter", "pepper", "little", "cheese", "summer", "parrot", "rabbit", "coffee"),
    *("balloon", "success", "pattern", "village", "mammoth", "referee", "terrace", "address"),
)

_PRIMES = (5, 7, 11, 13, 17, 19, 23)


def counting_and_probability(rng: random.Random, level: int) -> tuple[str, str]:
    """How many ways, and how likely."""
    n, k = rng.randint(6, 16), rng.randint(2, 4)
    if level == 1:
        return (
            f"In how many ways can ${k}$ of ${n}$ different books be chosen?",
            str(math.comb(n, k)),
        )
    if level == 2:
        red, blue = rng.randint(2, 12), rng.randint(2, 12)
        chance = Fraction(red * (red - 1), (red + blue) * (red + blue - 1))
        return (
            f"A bag holds ${red}$ red and ${blue}$ blue marbles. Two are drawn without being put "
            "back. What is the probability that both are red? Answer in lowest terms.",
            fraction(chance),
        )
    if level == 3:
        word = rng.choice(_WORDS)
        ways = math.factorial(len(word))
        for letter in set(word):
            ways //= math.factorial(word.count(letter))
        return f"How many different words can be written with the letters of {word}?", str(ways)
    if level == 4:
        wanted = rng.randint(3, 18)
        rolls = [(a, b, c) for a in range(1, 7) for b in range(1, 7) for c in range(1, 7)]
        right = sum(sum(roll) == wanted for roll in rolls)
        return (
            f"Three fair dice are rolled. What is the probability that their sum is ${wanted}$? "
            "Answer in lowest terms.",
            fraction(Fraction(right, len(rolls))),
        )
    children, most = rng.randint(3, 5), rng.randint(7, 15)
    return (
        f"In how many ways can ${most}$ equal coins be given to ${children}$ children so that each "
        "gets at least one?",
        str(math.comb(most - 1, children - 1)),
    )


def number_theory(rng: random.Random, level: int) -> tuple[str, str]:
    """Divisors, remainders, digits."""
    a, b = rng.randint(24, 400), rng.randint(24, 400)
    # Most numbers share no divisor, and have two or four: one answer would be right for many.
    if level == 1:
        common = rng.randint(2, 24)
        a, b = common * rng.randint(2, 16), common * rng.randint(2, 16)
        return f"What is the greatest common divisor of ${a}$ and ${b}$?", str(math.gcd(a, b))
    if level == 2:
        a = 2 ** rng.randint(0, 4) * 3 ** rng.randint(0, 3) * rng.choice((*_PRIMES, 25, 35, 49))
        count = sum(a % n == 0 for n in range(1, a + 1))
        return f"How many positive divisors does ${a}$ have?", str(count)
    if level == 3:
        base, power, modulus = rng.randint(2, 12), rng.randint(20, 200), rng.randint(7, 30)
        return (
            f"What is the remainder when ${base}^{{{power}}}$ is divided by ${modulus}$?",
            str(pow(base, power, modulus)),
        )
    if level == 4:
        base = rng.randint(3, 9)
        digits, rest = "", a
        while rest:
            digits, rest = str(rest % base) + digits, rest // base
        return (
            f"What is ${a}$ written in base ${base}$? Answer with its digits only.",
            digits,
        )
    p, q = rng.sample([5, 7, 8, 9, 11, 13], 2)
    r, s = rng.randrange(p), rng.randrange(q)
    found = next(n for n in range(1, p * q + 1) if n % p == r and n % q == s)
    return (
        f"What is the smallest positive integer that leaves the remainder ${r}$ when divided by "
        f"${p}$, and ${s}$ when divided by ${q}$?",
        str(found),
    )
