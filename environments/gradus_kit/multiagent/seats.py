"""Which seat learns in a task: drawn per task, so that all episodes of a group have the same.

A draw depends on the rule, the seed, the seats and the task alone. It is the same on every machine
and in every process, and adding tasks does not move the draws of others, but for `round_robin`,
which counts places.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

BERNOULLI: Final = "bernoulli"
"""A coin per task from the seed and the task's key."""
ROUND_ROBIN: Final = "round_robin"
"""The seats in turn, by the task's place in its set."""
HASH: Final = "hash"
"""By the task's key alone, whatever the seed."""
RULES = (BERNOULLI, ROUND_ROBIN, HASH)
"""Every other value is the name of a seat, which then learns in each task."""


def check_learner_seat(rule: str | None, seats: Sequence[str]) -> None:
    """ValueError for a rule that is none of `RULES` and no seat, and for seats that cannot be told
    apart; None means that every seat learns."""
    if not seats or len(set(seats)) != len(seats):
        raise ValueError(f"seats = {list(seats)} must be different names, at least one")
    if clash := set(seats) & set(RULES):
        raise ValueError(f"a seat cannot be named {sorted(clash)[0]!r}: that is a rule")
    if rule is not None and rule not in RULES and rule not in seats:
        raise ValueError(
            f"learner_seat = {rule!r} is neither a rule ({', '.join(RULES)}) nor a seat "
            f"({', '.join(seats)})"
        )


def draw_learner_seat(
    rule: str | None, seats: Sequence[str], *, seed: int, task_key: str, task_index: int
) -> str | None:
    """The seat that learns in one task; None when all do.

    >>> draw_learner_seat("round_robin", ("a", "b"), seed=0, task_key="x", task_index=3)
    'b'
    >>> draw_learner_seat("b", ("a", "b"), seed=0, task_key="x", task_index=0)
    'b'
    """
    check_learner_seat(rule, seats)
    if rule is None or rule in seats:
        return rule
    if rule == ROUND_ROBIN:
        return seats[task_index % len(seats)]
    if rule == BERNOULLI:
        task_key = f"learner_seat {seed} {task_key}"
    return seats[stable_hash(task_key) % len(seats)]


def stable_hash(text: str) -> int:
    """A number of 64 bits from a text, the same in every process.

    >>> stable_hash("a") == stable_hash("a") != stable_hash("b")
    True
    """
    encoded = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(encoded).digest()[:8], "big")
