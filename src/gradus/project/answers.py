"""The right answer of a row, wherever data sets keep it, and the reward that reads such answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradus.errors import ConfigError

ANSWER_KEYS = (
    *("answer", "completion", "response", "output", "target", "expected", "final_answer"),
    *("expected_answer", "correct_answer", "ground_truth", "gold", "answers", "solution"),
    *("reward_model", "label"),
)
_WITHIN = ("ground_truth", "value", "text", "answer")
"""Where an object keeps it: verl's `reward_model`, TriviaQA's `answer`, SQuAD's `answers`."""
_OTHERS = ("aliases", "normalized_aliases")
_WORKED_KEYS = ("solution", "rationale", "cot_content")
_TESTS = ("test", "tests", "test_list", "test_cases", "input_output", "entry_point")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_NUMBER = re.compile(
    r"[-+$\u20ac\u00a3\s]*\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?\s*(?:%|[^\W\d_]{2,})?\.?"
)
_EXPRESSION = re.compile(r"\\[A-Za-z]|[$^_{}]|\d\s*[-+*/=]\s*\d|\d[a-z]\b")
_MOST_WORDS = 12
"""Of an answer that another may say in the same words."""


@dataclass(frozen=True)
class Answer:
    """What a right reply comes to."""

    text: str
    value: Any = None
    """As the row has it, where that is a number."""
    aliases: Sequence[str] = ()
    """What else is right."""
    worked: str = ""
    """The way to it, where the row has one, for supervised training."""

    @property
    def as_written(self) -> Any:
        return self.text if self.value is None else self.value

    @property
    def bare(self) -> str:
        """Without the way to it: behind `####`, or in the last box."""
        _, mark, after = self.text.rpartition("####")
        return after.strip() if mark else last_box(self.text) or self.text


def answer_of(columns: Mapping[str, Any], where: str, *, is_rated: bool = False) -> Answer | None:
    """The answer in the columns of a row; None where there is none, ConfigError for what is none.

    A label beside a reply may say what that is worth: with `is_rated` it is none.
    """
    keys = [key for key in ANSWER_KEYS if not (is_rated and key == "label")]
    key = next((name for name in keys if _may_answer(name, columns.get(name))), None)
    if key is None:
        return None
    value = columns[key]
    texts = _texts(value)
    if not texts:
        raise ConfigError(
            f"{where}: {key!r} is {value!r:.60}, no answer; write a text, or leave the key out"
        )
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    worked = next((columns[it] for it in _WORKED_KEYS if isinstance(columns.get(it), str)), "")
    is_shown = key != "solution" and last_box(worked) == texts[0]
    others = tuple(dict.fromkeys(texts[1:]))
    return Answer(texts[0], value if is_number else None, others, worked if is_shown else "")


def last_box(text: str) -> str:
    r"""The content of the last `\boxed{}` of an answer, or nothing.

    >>> last_box(r"So \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    found = list(_BOX.finditer(text))
    depth, start = 1, found[-1].end() if found else len(text)
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[start:place].strip()
    return ""


def is_program_test(values: Mapping[str, Any]) -> bool:
    return any(values.get(key) for key in _TESTS)


def rewards_for(answers: Sequence[Answer]) -> tuple[str, ...]:
    """The functions that may rate replies to such answers, the likeliest first."""
    bare = [answer.bare for answer in answers]
    if all(_NUMBER.fullmatch(text) for text in bare):
        return "last_number", "boxed_answer"
    expressions = sum(bool(_EXPRESSION.search(text)) for text in bare)
    numbers = sum(bool(_NUMBER.fullmatch(text)) for text in bare)
    has_boxes = any(last_box(answer.text) for answer in answers)
    if has_boxes or 2 * (expressions + numbers) > len(bare):
        return ("boxed_answer",)
    return ("short_answer",)


def are_long(answers: Sequence[Answer]) -> bool:
    """Whether most answers have more words than another would choose alike."""
    return sum(len(answer.bare.split()) > _MOST_WORDS for answer in answers) * 2 > len(answers)


def _may_answer(key: str, value: Any) -> bool:
    """Whether a column is there; a truth value under `label` says which reply is better."""
    if key == "reward_model":
        return isinstance(value, Mapping) and value.get("ground_truth") is not None
    return value is not None and not (key == "label" and isinstance(value, bool))


def _texts(value: Any) -> list[str]:
    """All right answers that a cell holds; none where it holds no answer."""
    if isinstance(value, bool):
        return ["yes", "true"] if value else ["no", "false"]
    if isinstance(value, str | int | float):
        return [text] if (text := str(value).strip()) else []
    if isinstance(value, Mapping):
        inner = next((value[key] for key in (*_WITHIN, "content") if value.get(key)), None)
        others = [one for key in _OTHERS for one in value.get(key) or ()]
        return [] if inner is None else [*_texts(inner), *map(str, others)]
    if isinstance(value, list) and value:
        is_said = isinstance(value[-1], Mapping)
        return _texts(value[-1]) if is_said else [it for one in value for it in _texts(one)]
    return []
