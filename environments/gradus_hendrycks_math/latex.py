"""How numbers are written in answers."""

from __future__ import annotations

from fractions import Fraction


def fraction(value: Fraction | int) -> str:
    """An integer, or a fraction in lowest terms.

    >>> fraction(Fraction(-2, 4))
    '-\\\\frac{1}{2}'
    """
    number = Fraction(value)
    if number.denominator == 1:
        return str(number.numerator)
    sign = "-" if number < 0 else ""
    return f"{sign}\\frac{{{abs(number.numerator)}}}{{{number.denominator}}}"


def root(square: int) -> str:
    """The square root of a positive integer, with squares taken out.

    >>> root(12)
    '2\\\\sqrt{3}'
    """
    outside = max(n for n in range(1, square + 1) if n * n <= square and square % (n * n) == 0)
    inside = square // outside**2
    if inside == 1:
        return str(outside)
    return f"{'' if outside == 1 else outside}\\sqrt{{{inside}}}"


def signed(number: int) -> str:
    """A term that is added: ` + 3` or ` - 3`."""
    return f" + {number}" if number >= 0 else f" - {-number}"


def times(number: int, variable: str) -> str:
    """A first term: `x`, `-x`, `3x`."""
    return {1: variable, -1: f"-{variable}"}.get(number, f"{number}{variable}")


def plus(number: int, variable: str) -> str:
    """A term with a variable that is added: ` + x`, ` - 3x`."""
    size = "" if abs(number) == 1 else str(abs(number))
    return f" {'+' if number >= 0 else '-'} {size}{variable}"
