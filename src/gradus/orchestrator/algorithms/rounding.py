"""Equal up to rounding: rewards are sums of weighted parts, so 0.1 + 0.2 and 0.3 must not differ.

Two numbers are equal when they differ by at most a billionth of the larger one, or by 1e-14: what
is left where parts near 1 cancel, such as 0.1 + 0.2 - 0.3.
"""

from __future__ import annotations

from collections.abc import Iterable

RELATIVE = 1e-9
ABSOLUTE = 1e-14


def tolerance(scale: float) -> float:
    """How much two numbers may differ by rounding when the larger one has size `scale`."""
    return max(RELATIVE * abs(scale), ABSOLUTE)


def are_equal(values: Iterable[float]) -> bool:
    """Whether all values are one and the same up to rounding; true for none.

    >>> are_equal([0.1 + 0.2, 0.3]), are_equal([0.3, 0.3001])
    (True, False)
    """
    known = list(values)
    if not known:
        return True
    lowest, highest = min(known), max(known)
    return highest - lowest <= tolerance(max(abs(lowest), abs(highest)))


def is_at_least(value: float, bound: float) -> bool:
    """`value >= bound`, or less than it by rounding alone.

    >>> is_at_least(0.1 + 0.2 + 0.3 + 0.4 - 1e-16, 1.0)
    True
    """
    return value >= bound or are_equal([value, bound])
