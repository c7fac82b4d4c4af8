"""Reward functions for rows that hold their `answer`, and one for those that are not rated."""

from __future__ import annotations

import importlib.util
import re
import string
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any

from gradus_hendrycks_math.reading import plain
from gradus_kit.multiagent.answers import is_exact, read_choice, without_reasoning
from gradus_kit.tasksets.marked import MAX_ANSWER_CHARACTERS, is_cut, last_boxed
from gradus_kit.tasksets.same import same_answer

_PART = r"(?:[\w.,/]|(?<=\d[eE])[-+])*"
_WORD = re.compile(rf"(?:(?<![\w.,/)])-)?(?<![\w.,/])(?![^\W\d]){_PART}\d{_PART}")
"""What holds a digit, with its sign, and does not begin with a letter."""
_DIGITS = r"(-?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?)"
_NUMBER = re.compile(_DIGITS + r"(?:[ck]?m/[hs]|[A-Za-z]*)[.,/]*")
"""One that stands by itself: no part of a fraction, of a word or of a longer number."""
_LARGER = (
    r"(?:[kKMB]|bn|mn)\b|\s*\\?\b(?:hundred|thousand|dozen|score|\w*illion|lakh|crore|hal[fv]e?|third|"
    r"quarter|(?:four|fif|six|seven|eigh|nin|ten|dred|sand|lion)th|squared|cubed|factorial|pi|\u03c0)s?\b"
)
_MORE_BEFORE = re.compile(
    r"(?:[\^\u221a]|sqrt|-\s*(?=[({])|[\d)}]\s*(?:[*\u00d7]|\\times|\\cdot)|\d[-:])\s*[({]?$"
)
"""Around a number that is part of another one: a power, a root, a product, a time of day."""
_WORDS = r"(?:(?:square|cubic) )?(?:[mgslhLN]|[^\W\d_]{2,})(?:(?: per |/)[^\W\d_]+)?(?:\^?[23])?"
_WITH_UNIT = re.compile(
    rf"(?:[a-zA-Z]\s*=\s*)?\+?{_DIGITS}(?!{_LARGER})\s*\u00b0?(?:%|{_WORDS})?\.?"
)
_POWER_OF_UNIT = re.compile(r"(?<=\d)(\s*(?:[cdkm]?m|ft|in|yd|mi))\^\{?[23]\}?")
_SIGNS = str.maketrans("\u2212\u2013\u2044\u00f7", "--//")
_CURRENCIES = re.compile("[$\u20ac\u00a3\u00a5]")
_FRACTION = re.compile(r"\\[cdt]?frac(?:\{([^{}]*)\}|(\d))(?:\{([^{}]*)\}|(\d))")
_LONGEST_TAIL = 1000
"""Characters from the end in which a number is looked for."""
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_SAID = re.compile(r"\banswer\b[^\n:=.]{0,40}?(?:\bis\b|:|=)\s*(?:\bis\b)?([^\n]+)", re.IGNORECASE)
_YES_OR_NO = {"yes", "no", "true", "false"}
_SECONDS = 5.0
"""For the comparison of two expressions."""


def exact_answer(reply: str, row: Mapping[str, Any]) -> float:
    """1 when the reply is the row's `answer`, but for space around it; else 0.

    >>> exact_answer(" 4\\n", {"answer": 4})
    1.0
    """
    return float(reply.strip() == _answer(row))


def last_number(reply: str, row: Mapping[str, Any]) -> float:
    """1 when the last number of the reply is the row's `answer`; else 0.

    Raises:
        ValueError: the row has no `answer`, or one that is no number with at most its unit.

    >>> last_number("2 + 2 makes 4.", {"answer": "4"})
    1.0
    """
    right = _only_number(_answer(row))
    if right is None:
        raise ValueError(
            f"last_number: this row's answer is {row['answer']!r}, which is no number in digits "
            "with at most a unit after it; take exact_answer, or a function of your own"
        )
    return float(not is_cut(reply) and _last_number(reply[-_LONGEST_TAIL:]) == right)


async def boxed_answer(reply: str, row: Mapping[str, Any]) -> float:
    r"""1 when the last box of the reply, or what else it ends with, is the row's `answer` in other
    spelling: the same number, expression or text; else 0. An answer may be worked, with a box.

    >>> import asyncio
    >>> asyncio.run(boxed_answer(r"so \boxed{\dfrac{1}{2}}", {"answer": r"\boxed{\frac{1}{2}}"}))
    1.0
    """
    right, given = _bare(_answer(row)), final_answer(reply)
    if not given or len(given) > MAX_ANSWER_CHARACTERS or given.count("{") != given.count("}"):
        return 0.0
    if plain(given) == plain(right):
        return 1.0
    if importlib.util.find_spec("math_verify") is None:
        return float(same_answer(given, right))
    # Imported late: its helper process is needed for the fewest replies.
    from gradus_hendrycks_math.taskset import is_right

    question = str(row.get("prompt", ""))
    return float(await is_right(f"\\boxed{{{given}}}", right, seconds=_SECONDS, question=question))


def short_answer(reply: str, row: Mapping[str, Any]) -> float:
    """1 when the reply ends with the row's `answer` or one of its `aliases`, but for case, marks
    and articles; else 0.

    >>> short_answer("I think so. The answer is Paris.", {"answer": "paris"})
    1.0
    """
    given = final_answer(reply)
    rights = [_bare(_answer(row)), *map(str, row.get("aliases") or ())]
    if {right.lower() for right in rights} & _YES_OR_NO:
        given = (re.findall(r"\w+", given) or [""])[0]
    return float(bool(given) and any(same_answer(given, right) for right in rights))


def choice(reply: str, row: Mapping[str, Any]) -> float:
    """1 when the reply settles on the letter that is the row's `answer`, or on the text of that
    one of its `choices`; else 0.

    >>> choice("The answer is B.", {"answer": "B", "choices": ["3", "4"]})
    1.0
    """
    texts, right = list(map(str, row["choices"])), _answer(row)
    letters = string.ascii_uppercase[: len(texts)]
    public = without_reasoning(reply)
    given = final_answer(public)
    if given and not is_exact(given, letters):
        named = [it for it, text in zip(letters, texts, strict=True) if same_answer(given, text)]
        if len(named) == 1:
            return float(named[0] == right)
    return float(read_choice(public, letters) == right)


def final_answer(reply: str) -> str:
    r"""The answer that a reply comes to: its last box, tag, `####` or "the answer is", else its
    last line; nothing where a box or a tag is cut.

    >>> final_answer("4 + 4?\nThe answer is **8**."), final_answer(r"\boxed{5}, no, \boxed{7")
    ('8', '')
    """
    public = without_reasoning(reply).strip()
    if is_cut(public):
        return ""
    if boxed := last_boxed(public):
        return boxed
    if tagged := _TAGGED.findall(public):
        return str(tagged[-1]).strip()
    lines = public.splitlines()
    _, mark, after = public.rpartition("####")
    if mark:
        lines = after.strip().splitlines()
    elif said := _SAID.findall(public):
        lines = [said[-1]]
    return lines[-1].strip(" \t*_`").removesuffix(".").strip(" \t*_`") if lines else ""


def unrated() -> float:
    """0 for every reply, where only the replies matter."""
    return 0.0


def _answer(row: Mapping[str, Any]) -> str:
    if "answer" not in row:
        raise ValueError(f"this row has no 'answer'; it has {', '.join(row)}")
    return str(row["answer"]).strip()


def _bare(answer: str) -> str:
    """An answer without the way to it: behind `####`, or in the last box."""
    _, mark, after = answer.rpartition("####")
    return after.strip() if mark else last_boxed(answer) or answer


def _only_number(answer: str) -> Decimal | None:
    """The number that an answer is, alone, in a box or behind `####`, but for currency or unit."""
    with suppress(InvalidOperation):  # as Python writes a number of JSON, such as 1e-07
        if re.fullmatch(r"-?[\d.]+e[-+]\d+", answer):
            return Decimal(answer)
    text = _CURRENCIES.sub("", _bare(answer).translate(_SIGNS))
    found = _WITH_UNIT.fullmatch(text.strip("[]() \n"))
    return None if found is None else Decimal(found[1].replace(",", ""))


def _last_number(text: str) -> Decimal | None:
    """The last number of a text, unless it is part of a fraction or of another expression."""
    text = _CURRENCIES.sub("", _FRACTION.sub(r" \1\2/\3\4", text.translate(_SIGNS)))
    text = _POWER_OF_UNIT.sub(r"\1", re.sub(r"\s*/\s*", "/", text.replace("{,}", ",")))
    words = list(_WORD.finditer(text))
    if not words or _MORE_BEFORE.search(text[: words[-1].start()]):
        return None
    found = _NUMBER.fullmatch(words[-1][0])
    if found is None or re.match(_LARGER, text[words[-1].start() + found.end(1) :]):
        return None
    return Decimal(found[1].replace(",", ""))
