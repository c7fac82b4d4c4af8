"""A small made-up dictionary; the same seed gives the same values on every machine."""

from __future__ import annotations

import random

NUM_ENTRIES = 24
_KEYS = "abcdefghijklmnopqrstuvwxyz"
_SYLLABLES = ("ba", "ko", "mi", "ru", "se", "ta", "vo", "zu")


def build_entries(*, seed: int = 0, num: int = NUM_ENTRIES) -> dict[str, str]:
    """`num` one-letter keys and their values of two syllables.

    >>> len(build_entries(num=3))
    3
    """
    if not 1 <= num <= len(_KEYS):
        raise ValueError(f"num = {num}: there are 1 to {len(_KEYS)} keys")
    draw = random.Random(f"word-lookup {seed}")
    return {key: "".join(draw.choices(_SYLLABLES, k=2)) for key in _KEYS[:num]}
