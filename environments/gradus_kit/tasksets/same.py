"""Compares two short answers."""

from __future__ import annotations

import re
import string
import unicodedata
from decimal import Decimal

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+")
_DIGITS = re.compile(r"[\d.,/%\s-]*\d[\d.,/%\s-]*")
_BETWEEN_DIGITS = re.compile(r"(?<=\d)\s*([^\w\s,])\s*(?=\d)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_SIGN = re.compile(r"(?<!\w)-(?=\.?\d)")
_POWER = re.compile("(?<![^\\W\\d_])(?=[\u2070\u00b9\u00b2\u00b3\u2074-\u2079])")
_NAME = re.compile(r"(?<=\w)[+#]+(?!\w)")
"""As of C++ and C#."""
_DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"))
_MARKS = str.maketrans("", "", string.punctuation + "\u2018\u2019\u201c\u201d")
_ARTICLES = {"a", "an", "the"}


def same_answer(said: str, right: str) -> bool:
    """Tell whether two answers are the same but for case, marks, and articles.

    >>> same_answer("The 1,250.", "1250")
    True
    """
    powers = (_POWER.sub(f" mark{ord('^')} ", text) for text in (said, right))
    said, right = (unicodedata.normalize("NFKC", power).translate(_DASHES) for power in powers)
    numbers = [_number(text) for text in (said, right)]
    if None not in numbers:
        return numbers[0] == numbers[1]
    if all(map(_DIGITS.fullmatch, (said, right))) and numbers != [None, None]:
        return False
    return not _forms(said).isdisjoint(_forms(right) - {""})


def _number(text: str) -> Decimal | None:
    """The number that an answer is, which a decimal point or a sign makes another one."""
    words = [word for word in text.replace(" %", "%").split() if word.lower() not in _ARTICLES]
    bare = re.sub("[$€£]", "", words[0]).rstrip("%.!?") if len(words) == 1 else ""
    found = _NUMBER.fullmatch(bare)
    return None if found is None else Decimal(found[0].replace(",", ""))


def _forms(text: str) -> set[str]:
    """Its words without marks and articles, of which it may consist; what a dash joins is one word,
    or two.

    A sign, and a mark between two digits, make another number and stay as words.
    """
    text = _SIGN.sub("minus ", _THOUSANDS.sub("", text.lower()).replace(",", " "))
    text = _NAME.sub(lambda found: "".join(f"mark{ord(letter)}" for letter in found[0]), text)
    text = _BETWEEN_DIGITS.sub(lambda found: f" mark{ord(found[1])} ", text)
    forms = set()
    for between in ("", " "):
        words = text.replace("-", between).translate(_MARKS).split()
        forms.add(" ".join([word for word in words if word not in _ARTICLES] or words))
    return forms
