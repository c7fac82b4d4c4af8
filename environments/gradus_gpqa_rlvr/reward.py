"""The reward of a reply: whether the letter that it settles on is the right one."""

from __future__ import annotations

from gradus_kit.multiagent.answers import read_choice, without_reasoning


def chosen_letter(reply: str, letters: str) -> str | None:
    """The letter of a reply, read from what follows its reasoning.

    >>> chosen_letter("<think>A? No, C.</think> B", "ABCD")
    'B'
    >>> chosen_letter("<think>It is B", "ABCD") is None
    True
    """
    return read_choice(without_reasoning(reply), letters)


def rate_choice(reply: str, answer: str, letters: str) -> float:
    """1 for the right letter, else 0."""
    return float(chosen_letter(reply, letters) == answer)
