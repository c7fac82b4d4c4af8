"""Every name that a pattern of the catalogue stands for."""

from __future__ import annotations

import re

CHOICE = re.compile(r"\{([^}]*)\}")


def spelled_out(pattern: str) -> list[str]:
    """Every name of a pattern, with its placeholders."""
    if "[" in pattern:
        start, _, rest = pattern.partition("[")
        inner, _, end = rest.partition("]")
        return spelled_out(start + end) + spelled_out(start + inner + end)
    found = CHOICE.search(pattern)
    if found is None:
        return [pattern]
    words = found[1].split(",")
    return [
        name
        for word in words
        for name in spelled_out(pattern[: found.start()] + word + pattern[found.end() :])
    ]
