"""How alike two texts are, in a time that a reply cannot stretch."""

from __future__ import annotations

import difflib

_LONGEST = 4
"""A text this many times longer than the right one is worth nothing, and is not compared."""
_SHORT = 400
"""Characters that are always compared: what a short text is answered with may be long."""

_MANY_PAIRS = 4_000_000
"""Characters of one text times those of the other, from which words are compared instead."""


def similarity(said: str, right: str) -> float:
    """Share of matching characters in [0, 1], of long texts that of matching words; 1 only for
    equal texts; white space around them does not count.

    >>> similarity("abd", "abc") < similarity("abc", "abc")
    True
    """
    said, right = said.strip(), right.strip()
    if said == right:
        return 1.0
    if len(said) > max(_LONGEST * len(right), _SHORT):
        return 0.0
    if len(said) * len(right) <= _MANY_PAIRS:
        return difflib.SequenceMatcher(None, said, right, autojunk=False).ratio()
    words = difflib.SequenceMatcher(None, said.split(), right.split(), autojunk=False).ratio()
    return min(words, 1 - 1 / len(right))
