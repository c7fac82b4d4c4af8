"""Which answer a consultant argues for: the right one for exactly half of the items."""

from __future__ import annotations

from collections.abc import Sequence

from gradus_gpqa.items import Item
from gradus_kit.multiagent.seats import stable_hash


def assign_letters(items: Sequence[Item], *, seed: int) -> list[str]:
    """One letter per item: of an odd number of items, the right one for one less than wrong ones.

    The half with the lower hashes gets the right letter, whatever the order of the items, and the
    others a wrong one by another hash.

    >>> assign_letters([], seed=0)
    []
    """
    ranked = sorted(items, key=lambda item: (_hash(seed, "right", item), item.key))
    right = {item.key for item in ranked[: len(items) // 2]}
    return [item.answer if item.key in right else _wrong(item, seed) for item in items]


def _wrong(item: Item, seed: int) -> str:
    letters = item.letters.replace(item.answer, "")
    return letters[_hash(seed, "wrong", item) % len(letters)]


def _hash(seed: int, purpose: str, item: Item) -> int:
    return stable_hash(f"{purpose} {seed} {item.key}")
