"""Generators of reasoning-gym by name: their tasks, and what their scorers say of an answer."""

from __future__ import annotations

import importlib
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cache
from typing import Any

from gradus.errors import ConfigError
from gradus_reasoning_gym.safety import may_score

NOT_SERVED = {"composite": "give each generator a separate source with its own weight"}
"""Generators that a task set of one generator cannot hold, and what to do instead."""
_PLAIN_NUMBER = re.compile(r"\d{0,9}\.?\d{1,12}")
_LONGEST_ANSWER = 2000
"""Characters; a gold answer that is longer may be met by one of twice its length."""


@dataclass(frozen=True)
class Question:
    """One task of a generator, as it can be stored."""

    text: str
    answer: str | None
    """The gold answer; None for the few generators that only check."""
    index: int
    entry: Mapping[str, Any] | None
    """What the scorer needs. None means that the generator must make it again from the index."""


class Generator:
    """Owns one generator with its settings; the same name, settings and seed give the same tasks.

    >>> generator = Generator.open("chain_sum", {}, seed=0, size=10)  # doctest: +SKIP
    """

    def __init__(self, name: str, dataset: Any) -> None:
        self.name = name
        self._dataset = dataset

    @classmethod
    def open(cls, name: str, settings: Mapping[str, Any], *, seed: int, size: int) -> Generator:
        """The generator; ConfigError for a name, a setting or a value that it does not take."""
        factory = _package(name)
        if name in NOT_SERVED:
            raise ConfigError(f"generator {name!r} is not served: {NOT_SERVED[name]}")
        if name not in factory.DATASETS:
            raise ConfigError(
                f"reasoning-gym has no generator {name!r}; it has "
                f"{', '.join(sorted(factory.DATASETS))}"
            )
        known = {field.name for field in fields(factory.DATASETS[name][1])} - {"seed", "size"}
        if unknown := [key for key in settings if key not in known]:
            raise ConfigError(
                f"generator {name!r} has no setting {unknown[0]!r}; it has "
                f"{', '.join(sorted(known))}"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return cls(name, factory.create_dataset(name, seed=seed, size=size, **settings))
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f"generator {name!r} refuses {dict(settings)}: {what}") from error

    def questions(self, num: int) -> Iterator[Question]:
        """The first tasks in order, at most `num`."""
        for index in range(num):
            entry = self._dataset[index]
            stored = json.loads(json.dumps(entry, default=str))
            is_whole = entry["answer"] is None or self._score(entry["answer"], stored) == 1.0
            answer = None if entry["answer"] is None else str(entry["answer"])
            yield Question(entry["question"], answer, index, stored if is_whole else None)

    def score(self, answer: str, question: Question) -> float:
        """What the generator's own scorer says, in [0, 1].

        0 for an answer that is far too long, that a scorer may not see, or that it cannot take.
        """
        longest = max(_LONGEST_ANSWER, 2 * len(question.answer or ""))
        if not answer or len(answer) > longest or not may_score(self.name, answer):
            return 0.0
        entry = self._dataset[question.index] if question.entry is None else question.entry
        return self._score(answer, entry)

    def _score(self, answer: str, entry: Mapping[str, Any]) -> float:
        if self.name in _OWN_SCORERS:
            return float(_OWN_SCORERS[self.name](answer.strip(), str(entry["answer"])))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = float(self._dataset.score_answer(answer, entry))
        except Exception:
            # Scorers parse what a model wrote, and raise whatever their parsers raise.
            return 0.0
        return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0


def _same_number(answer: str, gold: str) -> bool:
    is_number = _PLAIN_NUMBER.fullmatch(answer) is not None
    return answer == gold or (is_number and abs(float(answer) - float(Fraction(gold))) <= 1e-4)


def _same_word(answer: str, gold: str) -> bool:
    return answer.lower() == gold.lower()


_OWN_SCORERS = {"coin_flip": _same_number, "game_of_life_halting": _same_word}
"""In place of two that give everything: for any beginning of the number, for anything but True."""


@cache
def scorer(name: str, settings: str, seed: int, size: int) -> Generator:
    """The generator that scores a task, opened once in a process; `settings` is JSON."""
    return Generator.open(name, json.loads(settings), seed=seed, size=size)


def _package(name: str) -> Any:
    try:
        importlib.import_module("reasoning_gym")
        return importlib.import_module("reasoning_gym.factory")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"generator {name!r} needs the package `reasoning-gym`; install gradus with its extra: "
            "pip install 'gradus-rl[reasoning]'"
        ) from error
