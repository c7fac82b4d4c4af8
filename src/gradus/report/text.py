"""Numbers as a person reads them."""

from __future__ import annotations

import math


def number(value: float | None) -> str:
    """A number with about four digits that count.

    >>> [number(x) for x in (0.48077, 16785.0, 0.000988, 3.0, 1.5e-9, None)]
    ['0.4808', '16,785', '0.000988', '3', '1.5e-09', '-']
    """
    if value is None or not math.isfinite(value):
        return "-"
    size = abs(value)
    if value == int(value) and size < 1e9:
        return f"{int(value):,}"
    if size >= 1e9 or size < 1e-4:
        return f"{value:.3g}"
    if size >= 1000:
        return f"{value:,.0f}"
    digits = 3 - math.floor(math.log10(size))
    shown = f"{value:.{min(digits, 7)}f}"
    return shown.rstrip("0").rstrip(".") if size < 0.1 else shown


def signed(value: float) -> str:
    """A difference, always with its sign.

    >>> signed(0.25), signed(-3.0)
    ('+0.2500', '\u22123')
    """
    return f"+{number(value)}" if value >= 0 else f"\u2212{number(-value)}"
