"""Texts and numbers as they stand in a page: nothing in them is active, all of it is visible."""

from __future__ import annotations

import html
import math
import re

from gradus.log import bounded
from gradus.monitor import format_seconds

_HIDDEN = re.compile(
    # Controls except tab and line feed, what reorders or hides text, half characters, and forms
    # that are not characters at all.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufe00-\ufe0f\ufeff\ufff0-\uffff\U000e0000-\U000e0fff]"
)
_PICTURES = 0x2400
"""Where Unicode has a picture for each control character."""


def escape(value: object, *, limit: int = 400) -> str:
    """A text for HTML, its middle left out when it is longer than `limit`.

    >>> escape("<b>\\x1b[2J")
    '&lt;b&gt;␛[2J'
    """
    return html.escape(_HIDDEN.sub(_visible, bounded(str(value), limit)), quote=True)


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(_PICTURES + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


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


def duration(seconds: float) -> str:
    """A time for a person.

    >>> [duration(s) for s in (4.2, 119, 3900, 180_000)]
    ['4.2 s', '2 min', '1 h 5 min', '2 d 2 h']
    """
    return f"{seconds:.1f} s" if seconds < 10 else format_seconds(seconds)


def compact(value: float) -> str:
    """A number for an axis.

    >>> [compact(x) for x in (0.25, 1500.0, 2_000_000.0, 0.0)]
    ['0.25', '1.5k', '2M', '0']
    """
    for scale, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{letter}"
    return f"{value:.4g}"
