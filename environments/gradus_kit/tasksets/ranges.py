"""Two keys of a task set, the smallest and the largest of something."""

from __future__ import annotations


def refuse_reversed(what: str, lowest: int, highest: int) -> None:
    """ValueError where `min_<what>` is larger than `max_<what>`.

    >>> refuse_reversed("hops", 1, 3)
    """
    if lowest > highest:
        low, high = f"min_{what}", f"max_{what}"
        raise ValueError(f"{low} = {lowest} and {high} = {highest}: use {low} <= {high}")
