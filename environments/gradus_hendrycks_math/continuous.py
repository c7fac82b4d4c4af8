"""Problems about expressions, functions and shapes: five levels of four subjects."""

from __future__ import annotations

import random
from fractions import Fraction

from gradus_hendrycks_math.latex import fraction, plus, root, signed, times

Drawn = tuple[str, str]
"""A problem and its answer."""


def nonzero(rng: random.Random, low: int, high: int) -> int:
    """An integer between both, not 0."""
    return rng.choice([n for n in range(low, high + 1) if n != 0])


def prealgebra(rng: random.Random, level: int) -> Drawn:
    """Arithmetic, fractions, percentages."""
    a, b, c = rng.randint(3, 40), rng.randint(3, 30), rng.randint(2, 9)
    if level == 1:
        return f"What is ${a} + {b} \\times {c}$?", str(a + b * c)
    if level == 2:
        d = rng.randint(2, 9)
        value = Fraction(a, c) + Fraction(b, d)
        asked = f"What is $\\frac{{{a}}}{{{c}}} + \\frac{{{b}}}{{{d}}}$? Answer in lowest terms."
        return asked, fraction(value)
    if level == 3:
        price, cut, tax = 20 * rng.randint(3, 40), 5 * rng.randint(2, 10), 5 * rng.randint(1, 4)
        value = Fraction(price) * (100 - cut) / 100 * (100 + tax) / 100
        return (
            f"A coat costs ${price}$ dollars. It is reduced by ${cut}\\%$, and then a tax of "
            f"${tax}\\%$ is added. How many dollars must be paid?",
            fraction(value),
        )
    if level == 4:
        one, two = rng.randint(2, 12), rng.randint(13, 30)
        return (
            f"One pipe fills a tank in ${one}$ hours, another in ${two}$ hours. How many hours do "
            "both need together? Answer as a fraction in lowest terms.",
            fraction(Fraction(one * two, one + two)),
        )
    numbers = [rng.randint(10, 60) for _ in range(5)]
    mean = Fraction(sum(numbers) + a, 6)
    shown = ", ".join(map(str, numbers))
    return (
        f"The mean of ${shown}$ and one more number is ${fraction(mean)}$. What is that number?",
        str(a),
    )


def algebra(rng: random.Random, level: int) -> Drawn:
    """Equations and lines."""
    a, b, x = rng.randint(2, 12), nonzero(rng, -20, 20), nonzero(rng, -15, 15)
    if level == 1:
        return f"Solve for $x$: ${a}x{signed(b)} = {a * x + b}$.", str(x)
    if level == 2:
        c = nonzero(rng, -12, 12)
        while c == a:
            c = nonzero(rng, -12, 12)
        right = f"{times(c, 'x')}{signed((a - c) * x + b)}"
        return f"Solve for $x$: ${a}x{signed(b)} = {right}$.", str(x)
    y = nonzero(rng, -9, 9)
    if level == 3:
        p, q = rng.randint(2, 7), nonzero(rng, -7, -1)
        return (
            f"If ${a}x + {p}y = {a * x + p * y}$ and ${a}x{plus(q, 'y')} = {a * x + q * y}$, "
            "what is $x + y$?",
            str(x + y),
        )
    if level == 4:
        total, product = x + y, x * y
        return (
            f"What is the sum of the squares of the roots of $x^2{plus(-total, 'x')}"
            f"{signed(product)}$?"
            if total
            else f"What is the sum of the squares of the roots of $x^2{signed(product)}$?",
            str(x * x + y * y),
        )
    k = rng.randint(2, 9)
    return (
        f"For which value of $c$ does $y = x^2{plus(2 * b, 'x')} + c$ touch the line $y = {k}$ in "
        "exactly one point?",
        str(b * b + k),
    )


def intermediate_algebra(rng: random.Random, level: int) -> Drawn:
    """Polynomials, logarithms, series."""
    a, b, c = nonzero(rng, -9, 9), nonzero(rng, -9, 9), nonzero(rng, -9, 9)
    polynomial = f"x^3{plus(a, 'x^2')}{plus(b, 'x')}{signed(c)}"
    if level == 1:
        x = rng.randint(2, 5)
        return f"If $f(x) = {polynomial}$, what is $f({x})$?", str(x**3 + a * x * x + b * x + c)
    if level == 2:
        r = nonzero(rng, -4, 4)
        return (
            f"What is the remainder when ${polynomial}$ is divided by $x{signed(-r)}$?",
            str(r**3 + a * r * r + b * r + c),
        )
    if level == 3:
        base, power = rng.choice([2, 3, 5]), rng.randint(3, 6)
        shift = rng.randint(1, 50)
        return (
            f"Solve for $x$: $\\log_{{{base}}}(x + {shift}) = {power}$.",
            str(base**power - shift),
        )
    if level == 4:
        first, low, high = rng.randint(1, 30), rng.randint(1, 4), rng.randint(5, 9)
        ratio = Fraction(low, high)
        return (
            f"A geometric series begins with ${first}$ and has the ratio ${fraction(ratio)}$. What "
            "is its infinite sum?",
            fraction(first / (1 - ratio)),
        )
    return (
        f"The roots of ${polynomial}$ are $r$, $s$ and $t$. What is "
        "$\\frac{1}{r} + \\frac{1}{s} + \\frac{1}{t}$?",
        fraction(Fraction(-b, c)),
    )


def precalculus(rng: random.Random, level: int) -> Drawn:
    """Vectors, complex numbers, matrices, angles."""
    a, b, c, d = (nonzero(rng, -9, 9) for _ in range(4))
    if level == 1:
        return f"What is the dot product of $({a}, {b})$ and $({c}, {d})$?", str(a * c + b * d)
    if level == 2:
        matrix = f"\\begin{{pmatrix}} {a} & {b} \\\\ {c} & {d} \\end{{pmatrix}}"
        return f"What is the determinant of ${matrix}$?", str(a * d - b * c)
    if level == 3:
        return f"What is $|{a}{plus(b, 'i')}|$?", root(a * a + b * b)
    if level == 4:
        (leg, other, long) = rng.choice([(3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25)])
        (leg2, other2, long2) = rng.choice([(3, 4, 5), (12, 5, 13), (15, 8, 17), (24, 7, 25)])
        value = Fraction(leg * other2 + other * leg2, long * long2)
        return (
            f"Two acute angles have $\\sin \\alpha = {fraction(Fraction(leg, long))}$ and "
            f"$\\sin \\beta = {fraction(Fraction(leg2, long2))}$. "
            "What is $\\sin(\\alpha + \\beta)$?",
            fraction(value),
        )
    square = (a * a - b * b, 2 * a * b)
    real = square[0] * a - square[1] * b
    return f"What is the real part of $({a}{plus(b, 'i')})^3$?", str(real)


def geometry(rng: random.Random, level: int) -> Drawn:
    """Lengths, areas, volumes."""
    a, b, c = rng.randint(3, 30), rng.randint(3, 30), rng.randint(2, 12)
    if level == 1:
        return f"A rectangle has sides of length ${a}$ and ${b}$. What is its perimeter?", str(
            2 * (a + b)
        )
    if level == 2:
        return (
            f"The legs of a right triangle have lengths ${a}$ and ${b}$. What is the length of its "
            "hypotenuse? Simplify the root.",
            root(a * a + b * b),
        )
    if level == 3:
        return (
            f"A cone has the radius ${a}$ and the height ${b}$. What is its volume, divided by "
            "$\\pi$?",
            fraction(Fraction(a * a * b, 3)),
        )
    if level == 4:
        return (
            f"A box has edges of lengths ${a}$, ${b}$ and ${c}$. How long is its longest diagonal?",
            root(a * a + b * b + c * c),
        )
    x, y, z, w = (rng.randint(-9, 9) for _ in range(4))
    area = Fraction(abs(x * w - y * z), 2)
    if not area:
        x, y, z, w, area = a, 0, 0, b, Fraction(a * b, 2)
    return (
        f"What is the area of the triangle with the corners $(0, 0)$, $({x}, {y})$ and "
        f"$({z}, {w})$?",
        fraction(area),
    )
