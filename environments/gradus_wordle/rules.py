"""The rules of the game and what a play of it is worth; pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gradus_kit.tasksets.marked import only_tagged

Style = Literal["tags", "plain"]

RIGHT, ELSEWHERE, ABSENT = "G", "Y", "-"
PLAIN_OPENING = "go"
_MAX_CHARACTERS = 40
_SHARES = {"solved": 0.5, "speed": 0.2, "closeness": 0.2, "format": 0.1}
"""Weights of the parts; a word that is found at once is worth 1."""


def mark(guess: str, answer: str) -> str:
    """One mark for each letter: right place, another place, or not in the word.

    A letter is marked as often as the answer has it; right places come first, then from the left.

        >>> mark("geese", "eagle")
        'YY--G'
    """
    marks = [RIGHT if a == b else ABSENT for a, b in zip(guess, answer, strict=True)]
    left = Counter(b for a, b in zip(guess, answer, strict=True) if a != b)
    for place, letter in enumerate(guess):
        if marks[place] == ABSENT and left[letter] > 0:
            marks[place] = ELSEWHERE
            left[letter] -= 1
    return "".join(marks)


def read_guess(reply: str, length: int, style: Style) -> str | None:
    """The guessed word in lower case; None for anything but one word of the asked length."""
    if style == "tags":
        reply = only_tagged(reply, "guess", _MAX_CHARACTERS) or ""
    word = reply.strip().lower() if len(reply) < 100 else ""
    return word if len(word) == length and word.isascii() and word.isalpha() else None


def opening(length: int, max_turns: int, style: Style) -> str:
    """Write what the player is told at the beginning."""
    if style == "plain":
        return PLAIN_OPENING
    return (
        f"I have chosen an English word of {length} letters. You have {max_turns} guesses. After "
        f"each I mark its letters in order: {RIGHT} means right, {ELSEWHERE} that the letter "
        f"stands elsewhere in the word, {ABSENT} that the word has it no further time. Think as "
        "long as you like, then write your guess once, between tags: <guess>word</guess>"
    )


def answer_to(guess: str | None, answer: str, left: int, style: Style) -> str:
    """Write what the player is told after a guess that was not the word."""
    if style == "plain":
        return "?" if guess is None else mark(guess, answer)
    more = f"{left} guesses left." if left > 1 else "This is the last guess."
    if guess is None:
        return (
            f"I cannot read a guess of {len(answer)} letters there; write one word as "
            f"<guess>word</guess>. {more}"
        )
    return f"{guess}: {mark(guess, answer)}\n{more}"


@dataclass(frozen=True)
class Play:
    """The guesses of a finished game.

    >>> Play.of(["eagle"], "eagle", max_turns=6, style="plain").parts
    {'solved': 0.5, 'speed': 0.2, 'closeness': 0.2, 'format': 0.1}
    """

    answer: str
    max_turns: int
    guesses: tuple[str | None, ...]
    """One for each reply; None for one that could not be read."""

    @classmethod
    def of(cls, replies: Sequence[str], answer: str, *, max_turns: int, style: Style) -> Play:
        """The game that these replies play; what comes after its end does not count."""
        guesses = [read_guess(reply, len(answer), style) for reply in replies[:max_turns]]
        if answer in guesses:
            guesses = guesses[: guesses.index(answer) + 1]
        return cls(answer, max_turns, tuple(guesses))

    @property
    def is_solved(self) -> bool:
        return self.answer in self.guesses

    @property
    def is_over(self) -> bool:
        """True if no guess is left to make."""
        return self.is_solved or len(self.guesses) >= self.max_turns

    @property
    def readable(self) -> float:
        """Share of the replies with a guess that could be read; 0 without replies."""
        read = [guess is not None for guess in self.guesses]
        return sum(read) / len(read) if read else 0.0

    @property
    def closeness(self) -> float:
        """Of the best guess: right letters, and half of those elsewhere, as a share of all."""
        marks = [mark(guess, self.answer) for guess in self.guesses if guess is not None]
        found = [m.count(RIGHT) + 0.5 * m.count(ELSEWHERE) for m in marks]
        return max(found, default=0.0) / len(self.answer)

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the reward; they add up to 1 at most."""
        unused = self.max_turns - len(self.guesses)
        values = {
            "solved": float(self.is_solved),
            "speed": unused / max(self.max_turns - 1, 1) if self.is_solved else 0.0,
            "closeness": self.closeness,
            "format": self.readable,
        }
        # With one guess to make there is nothing to be faster than.
        if self.is_solved and self.max_turns == 1:
            values["speed"] = 1.0
        return {name: share * values[name] for name, share in _SHARES.items()}


def fits(word: str, guesses: Sequence[str], answer: str) -> bool:
    """Tell whether a word may be the answer after all that the marks of these guesses told."""
    return all(mark(guess, word) == mark(guess, answer) for guess in guesses)


def demonstrations(
    num: int, *, seed: int, words: Sequence[str], max_turns: int, fitting_share: float = 0.4
) -> list[list[tuple[str, str]]]:
    """Turns of games in the plain style, as (message, guess) pairs, by two kinds of players.

    Some guess only what still fits and never begin with the first word. The others say the first
    word in every turn. Nothing says which is better.
    """
    draw = random.Random(f"wordle demonstrations {seed}")
    shown = []
    for _ in range(num):
        is_fitting = draw.random() < fitting_share
        answer = draw.choice(words)
        message, guesses, turns = PLAIN_OPENING, list[str](), list[tuple[str, str]]()
        while len(guesses) < max_turns and answer not in guesses:
            possible = [w for w in words if fits(w, guesses, answer)] if guesses else words[1:]
            guess = draw.choice(possible) if is_fitting else words[0]
            turns.append((message, guess))
            guesses.append(guess)
            message = answer_to(guess, answer, max_turns - len(guesses), "plain")
        shown.append(turns)
    return shown
