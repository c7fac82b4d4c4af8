"""The reward of a reply: whether the letter that it settles on is the right one."""

from __future__ import annotations

from gradus.multiagent.answers import read_choice

_OPEN, _CLOSE = "<think>", "</think>"


def chosen_letter(reply: str, letters: str) -> str | None:
    """The letter of a reply, read from what follows its reasoning.

    >>> chosen_letter("<think>A? No, C.</think> B", "ABCD")
    'B'
    >>> chosen_letter("<think>It is B", "ABCD") is None
    True
    """
    public = reply.rpartition(_CLOSE)[2]
    return None if _OPEN in public else read_choice(public, letters)


def rate_choice(reply: str, answer: str, letters: str) -> float:
    """1 for the right letter, else 0."""
    return float(chosen_letter(reply, letters) == answer)
