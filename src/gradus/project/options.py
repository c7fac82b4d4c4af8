"""What a question lets choose from, in the forms that data sets have."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradus.errors import ConfigError

_KEYS = ("choices", "options", "endings")
_NUMBERED = re.compile(r"(?:option|choice|sol|ending)_?\d")
_LETTERED = re.compile(r"(?:option_?|op)([a-h])")
_WRONG = re.compile(r"(?:distractor|incorrect_answer)_?\d|(?:incorrect|wrong)_answers")
_RIGHT = ("correct_answer", "answer", "best_answer")
_CHOSEN = (
    *("answerkey", "answer_key", "answer_idx", "correct", "correct_option", "cop", "answer"),
    *("answer_index", "target", "label", "gold", "correct_answer", "ground_truth"),
)
_LABEL = re.compile(r"\s*\(?([A-Za-z])[).:]\s*(.+)", re.DOTALL)
_WORN = "().: "


@dataclass(frozen=True)
class Options:
    """Texts by letters, and which of them the row names as right."""

    texts: Sequence[str]
    labels: Sequence[str]
    """As the row calls them."""
    chosen: Any
    """A label, a text or a number, as the row has it."""
    where: str

    @property
    def lettered(self) -> list[tuple[str, str]]:
        return list(zip(string.ascii_uppercase, self.texts, strict=False))

    @property
    def number(self) -> int | None:
        """What it names as a number."""
        said = str(self.chosen).strip()
        return int(said) if said.isdecimal() and said.isascii() else None

    def letter(self, number_from: int | None) -> str | None:
        """The letter of the right one; None where the row names none. Numbers count from
        `number_from`, or are labels where that is not known. ConfigError for what names none."""
        if self.chosen is None:
            return None
        said, number = str(self.chosen).strip(), self.number
        by_label = _places([it.lower() for it in self.labels], said.strip(_WORN).lower())
        by_text = _places([it.strip() for it in self.texts], said)
        by_number = [] if number is None else [number - (number_from or 0)]
        if number is None:
            places = by_label + by_text
        else:
            places = by_label + by_number if number_from is None else by_number + by_label
            places = places + by_text if isinstance(self.chosen, int) else by_text + places
        found = next((place for place in places if 0 <= place < len(self.texts)), None)
        if found is None:
            raise ConfigError(
                f"{self.where}: {self.chosen!r:.60} is none of its {len(self.texts)} choices; "
                "write a letter, a number from 0, or the text of one"
            )
        return string.ascii_uppercase[found]


def options_of(columns: Mapping[str, Any], where: str) -> Options | None:
    """The options in the columns of a row; None where it has none, ConfigError for what is none."""
    nested = columns.get("question")
    columns = {**columns, **nested} if isinstance(nested, Mapping) else columns
    given = next((columns[key] for key in _KEYS if columns.get(key)), None)
    labels, texts = _listed(given) if given is not None else _by_columns(columns)
    if not texts:
        return _of_wrong_ones(columns, where)
    if not 2 <= len(texts) <= len(string.ascii_uppercase) or len(labels) != len(texts):
        raise ConfigError(f"{where} has {len(texts)} choices; between 2 and 26 can be shown")
    chosen = next((columns[key] for key in _CHOSEN if _names_one(columns.get(key))), None)
    return Options(texts, labels, chosen, where)


def first_number(options: Sequence[Options]) -> int | None:
    """Which number the first option has, where one of the rows shows it."""
    numbers = [(one.number, len(one.texts)) for one in options]
    if any(number == 0 for number, _ in numbers):
        return 0
    return 1 if any(number == count for number, count in numbers) else None


def _names_one(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip() != ""


def _of_wrong_ones(columns: Mapping[str, Any], where: str) -> Options | None:
    """A right and some wrong texts, in an order that tells nothing."""
    wrong: list[str] = []
    for key, value in columns.items():
        if _WRONG.fullmatch(key) and value:
            wrong += map(str, value) if isinstance(value, list) else [str(value)]
    right = next((columns[key] for key in _RIGHT if isinstance(columns.get(key), str)), None)
    if not wrong or right is None:
        return None
    texts = sorted({right, *wrong}, key=lambda text: hashlib.sha256(text.encode()).digest())
    return Options(texts, list(string.ascii_uppercase[: len(texts)]), right, where)


def _by_columns(columns: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Labels and texts of options that have a column each."""
    for pattern in (_NUMBERED, _LETTERED):
        keys = sorted(key for key in columns if pattern.fullmatch(key) and columns[key])
        if len(keys) > 1:
            return [key[-1] for key in keys], [str(columns[key]) for key in keys]
    letters = [key for key in "abcdefgh" if isinstance(columns.get(key), str)]
    is_list = letters[:3] == ["a", "b", "c"]
    return (letters, [columns[key] for key in letters]) if is_list else ([], [])


def _listed(value: Any) -> tuple[list[str], list[str]]:
    """Labels and texts of a list or table, also as text."""
    value = _unpacked(value)
    if isinstance(value, Mapping) and isinstance(value.get("text"), list):
        texts = [str(text) for text in value["text"]]
        labels = value.get("label") or list(string.ascii_uppercase[: len(texts)])
        return [str(label) for label in labels], texts
    if isinstance(value, Mapping):
        return list(map(str, value)), [str(text) for text in value.values()]
    if not isinstance(value, list):
        return [], []
    if all(isinstance(one, Mapping) and "text" in one for one in value):
        labels = [str(one.get("label", string.ascii_uppercase[n])) for n, one in enumerate(value)]
        return labels, [str(one["text"]) for one in value]
    letters = list(string.ascii_uppercase[: len(value)])
    parts = [_LABEL.fullmatch(str(one)) for one in value]
    if all(
        part and part[1].upper() == letter for part, letter in zip(parts, letters, strict=False)
    ):
        return letters, [part[2].strip() for part in parts if part]
    return letters, [str(one) for one in value]


def _unpacked(value: Any) -> Any:
    """A list or table that a column of text holds as JSON, or as Python prints it."""
    if not isinstance(value, str) or value.strip()[:1] not in ("[", "{"):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            return read(value)
        except (ValueError, SyntaxError, RecursionError):
            continue
    return value


def _places(among: Sequence[str], wanted: str | None) -> list[int]:
    return [place for place, one in enumerate(among) if one == wanted]
