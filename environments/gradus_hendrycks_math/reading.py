"""Reading the answer in a reply: what stands in its last box."""

from __future__ import annotations

import math
import re

MAX_ANSWER_CHARACTERS = 300
MAX_READ_CHARACTERS = 20_000
"""From the end of a reply."""
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\w])")
_DROPPED = re.compile(
    r"\\left|\\right|\\displaystyle|\\[!,:;> ]|\\?\$|~|\s+|\\?%|\^\\circ|\^\{\\circ\}|°"
)
_FORMULA = re.compile(r"\$\$?(.+?)\$\$?|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
_FRACTION = re.compile(r"\\frac(?:\{(-?\d+)\}|(\d))(?:\{(-?\d+)\}|(\d))")
_OPERATION = re.compile(
    r"[\w)\]}][-+*/^!|]|\\(?:times|cdot|div|frac|sqrt|d?binom|log|ln|sin|cos|tan|lfloor|lceil)"
)
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:bf|it|rm)|mbox)\{([^{}]*)\}")
_UPRIGHT = re.compile(r"\\(?:mathrm|text)\{([a-z])\}")
_UNIT_FRACTION = r"(?:\\frac(?:\{1\}|1)(?:\{\d+\}|\d)|\(1/\d+\))"
_TIMES = r"(?:\\times|\\cdot|\*)?"
_DIVIDED_BEFORE = re.compile(rf"{_UNIT_FRACTION}{_TIMES}(?=[\\({{\w])")
_DIVIDED_AFTER = re.compile(rf"(?<=[\w)\]}}]){_TIMES}{_UNIT_FRACTION}")
"""A half of something is the same as that over 2, one operation."""
_DETERMINANT = re.compile(r"\\begin\{[vV]matrix\}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{\w+\*?\}")
_SIGNS = str.maketrans(
    {
        **{"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{ASTERISK OPERATOR}": "*"},
        **{"\N{MULTIPLICATION SIGN}": "\\times", "\N{DIVISION SIGN}": "\\div"},
        **{"\N{MIDDLE DOT}": "\\cdot", "\N{DOT OPERATOR}": "\\cdot"},
    }
)
_STYLED = re.compile(r"\\[cdt]frac")
_FUNCTION = re.compile(
    r"\\(?:[dt]?frac|sqrt|[dt]?binom|log|ln|exp|sin|cos|tan|cot|sec|csc|arc\w+|det|"
    r"lfloor|lceil|lvert)"
)
_SIGN = re.compile(r"\\(?:times|cdot|div|pm|mp)")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_BINARY = re.compile(r"(?<!^)(?<![(\[{,&=+\-*/^\\])[-+*/^!]")
_PRODUCT = re.compile(r"(?<=[\w)\]}])(?=\()|(?<=[\d)}])(?=[A-Za-z])|(?<=[A-Za-z])(?=[A-Za-z])")
_LITERAL = re.compile(r"-?(?:\d+|\d*\.\d+)(?:(?:\\times|\\cdot)10\^\{?-?\d+\}?)?")
_NUMBERS = re.compile(r"(?:\d|[-+*/.]|\\times|\\cdot|\\frac)*")
_RATIO = re.compile(r"-?(\d+)/(\d+)")
_UNIT = re.compile(r"(.*[\d}])(?:\s|\\ |~)+([A-Za-z]{3,})\.?", re.DOTALL)
_NO_UNIT = (
    r"(?![^}]*\b(?:or|and|not|hundred|dozen|thousand|\w+illion|half|halves|thirds?|tenths?|hundredths?"
    r"|squared|cubed|factorial|pi|times|plus|minus)\b)(?! *[abeiknxyz] *\})"
)
"""Words that change a number, and letters that stand for one."""
_POWER = r"(?:\^(?:\d|\{\d\}))?"
_TEXT_UNIT = re.compile(
    rf"(.*?\S)(?:\s|~|\\[,:; ])*\\(?:text(?:rm)?|mathrm|mbox)\{{{_NO_UNIT}[A-Za-z ~./]+"
    rf"(?:{_POWER}\}}|\}}{_POWER})\.?",
    re.DOTALL,
)
_SPELLINGS = {
    **{"hr": "h", "hour": "h", "minute": "min", "sec": "s", "second": "s", "mph": "mi/h"},
    **{"meter": "m", "centimeter": "cm", "millimeter": "mm", "kilometer": "km", "kph": "km/h"},
    **{"inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi"},
    **{"gram": "g", "kilogram": "kg", "pound": "lb", "liter": "l", "day": "day", "week": "week"},
    **{"cent": "cent", "dollar": "dollar", "degree": "degree", "year": "year", "month": "month"},
}
"""Other spellings of units, without the s of a plural."""
_KNOWN_UNITS = frozenset(_SPELLINGS.values())
_LONGEST_ABBREVIATION = 3
_RATIOS = re.compile(
    r"\\frac[{(+-]*(\d+)[)}]+[{(+-]*(\d+)[)}]|\\frac(\d)(\d)|"
    r"(?:(?<![\w.^])(\d+)|(?<=[{(])(\d+)[)}]+)(?:/|\\div)[{(+-]*(\d+)(?![\w.])"
)
_ROOTS = re.compile(r"\\sqrt(?:[{(]+(\d+)[)}]|(\d))")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def last_boxed(reply: str) -> str:
    r"""The content of the last `\boxed{...}` that is closed, or nothing.

    >>> last_boxed(r"So \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    tail = reply[-MAX_READ_CHARACTERS:]
    for box in reversed(list(_BOX.finditer(tail))):
        content = _content(tail, box.end())
        if content is not None:
            return content if len(content) <= MAX_ANSWER_CHARACTERS else ""
    return ""


def _content(text: str, start: int) -> str | None:
    if text[start] != "{":
        return text[start]
    depth = 0
    # A box longer than any answer is not read to its end, so many open ones cost little.
    for place in range(start, min(len(text), start + MAX_ANSWER_CHARACTERS + 100)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + 1 : place].strip()
    return None


def plain(answer: str) -> str:
    """An answer without what changes nothing: space, dollars, thousands separators, styles, and
    the command round a text.

    >>> plain(r"\\dfrac{1}{2}") == plain(r"\\frac{1}{2} ")
    True
    """
    text = _UPRIGHT.sub(r"\1", answer.strip().rstrip(".").replace("{,}", ","))
    text = _STYLED.sub(r"\\frac", _DROPPED.sub("", text))
    text = _THOUSANDS.sub("", text.translate(_SIGNS))
    whole = _TEXT.fullmatch(text)
    return whole[1] if whole else text


def without_unit(answer: str, question: str) -> str:
    r"""An answer without the unit after it: a text, or a word that the question has.

    >>> without_unit("154 dollars", "How many dollars must be paid?")
    '154'
    >>> without_unit("154 million", "How many dollars must be paid?")
    '154 million'
    >>> without_unit(r"30\text{ cm}^2", ""), without_unit(r"3\text{ or four}", "")
    ('30', '3\\text{ or four}')
    """
    if text := _TEXT_UNIT.fullmatch(answer.strip()):
        return text[1]
    found = _UNIT.fullmatch(answer.strip())
    if not found or found[2].lower() not in re.findall(r"[a-z]+", question.lower()):
        return answer
    return found[1]


def unit_of(answer: str) -> str:
    r"""The text after an answer, with its power, or nothing.

    >>> unit_of(r"30\text{ cm}^2"), unit_of(r"6\text{ km/h}"), unit_of("30")
    ('cm^2', 'km/h', '')
    """
    found = _TEXT_UNIT.fullmatch(answer.strip())
    return (
        re.sub(r"\\(?:[a-z]+|.)|[^A-Za-z/^\d]", "", answer.strip()[found.end(1) :]) if found else ""
    )


def in_the_unit(given: str, unit: str) -> str | None:
    r"""An answer where another one has a unit: without the same one where it stands bare after it;
    None where both are known or abbreviated, and differ.

    >>> in_the_unit("5cm", "cm"), in_the_unit(r"5\text{ m}", "cm"), in_the_unit("5", "cm")
    ('5', None, '5')
    """
    own = unit_of(given)
    if own and not _may_be_same(own, unit):
        return None
    name = re.escape(unit.partition("^")[0])
    bare = re.fullmatch(
        rf"(.*[\d}}])(?:\s|~|\\[,:; ])*({name}{_POWER})\.?", given.strip(), re.DOTALL
    )
    if not bare:
        return given
    return bare[1] if _may_be_same(re.sub(r"[{}]", "", bare[2]), unit) else None


def _may_be_same(one: str, other: str) -> bool:
    """Whether two units are spelt alike, or one of them is a word that nobody knows."""
    (first, _, power), (second, _, other_power) = one.partition("^"), other.partition("^")
    names = _spelt_alike(first), _spelt_alike(second)
    if names[0] == names[1]:
        return not power or not other_power or power == other_power
    return not (
        _KNOWN_UNITS.issuperset(names) or max(len(first), len(second)) <= _LONGEST_ABBREVIATION
    )


def _spelt_alike(unit: str) -> str:
    """One spelling of a unit that is written in several ways."""
    plain = unit.lower()
    plain = plain[:-1] if len(plain) > 2 and plain.endswith("s") else plain
    return _SPELLINGS.get(plain, plain)


def is_copied(given: str, question: str, answer: str) -> bool:
    r"""Whether an answer that is written otherwise than the right one is an expression of the
    question: then nothing was computed.

    >>> is_copied(r"4 + 20 \times 3", r"What is $4 + 20 \times 3$?", "64")
    True
    >>> is_copied("1/2", "What is the larger of $1/2$ and $1/3$?", r"\frac{1}{2}")
    False
    """
    text, value = _value(given), _value(answer)
    if not _OPERATION.search(text) or text == value:
        return False
    within = re.compile(rf"(?<![\w\\]){re.escape(text)}(?!\w)")
    formulas = [_bare("".join(parts)) for parts in _FORMULA.findall(question)]
    if any(within.search(formula) for formula in formulas):
        return True
    flat = _flat(text)
    return any(_is_dressed(flat, _flat(formula)) for formula in formulas)


def _is_dressed(text: str, formula: str) -> bool:
    """Whether a text is a formula between brackets and numbers alone."""
    before, found, after = text.partition(formula)
    is_more = _OPERATION.search(formula) and not before[-1:].isalnum() and not after[:1].isalnum()
    return bool(found and is_more and _NUMBERS.fullmatch(before + after))


def _flat(text: str) -> str:
    return re.sub(r"[()\[\]]", "", text)


def is_unsimplified(given: str, answer: str) -> bool:
    r"""Whether an answer leaves more to be computed than the right one.

    A number is simple however it is written, and so is a fraction in lowest terms; where a number
    is asked, nothing else is.

    >>> is_unsimplified(r"(4 + 20 \times 3)", "64"), is_unsimplified("64 + 0", "64")
    (True, True)
    >>> is_unsimplified(r"\frac{3}{2}", "1.5"), is_unsimplified(r"\frac{128}{2}", "64")
    (False, True)
    >>> is_unsimplified(r"\frac{27}{216}", r"\frac{1}{8}"), is_unsimplified(r"\sqrt8", r"2\sqrt2")
    (True, True)
    """
    value = _value(given)
    ratio = _RATIO.fullmatch(value)
    is_lowest = ratio and int(ratio[2]) > 1 and math.gcd(int(ratio[1]), int(ratio[2])) == 1
    if is_lowest or _LITERAL.fullmatch(value.strip("()").removeprefix("+")):
        return False
    if _LITERAL.fullmatch(_bare(answer)) or (_is_reducible(given) and not _is_reducible(answer)):
        return True
    return operations(given) > operations(answer)


def _is_reducible(answer: str) -> bool:
    """Whether a fraction of integers is not in lowest terms, or a root holds a square."""
    text = plain(answer)
    ratios = (map(int, filter(None, found)) for found in _RATIOS.findall(text))
    radicands = (int("".join(found)[:9]) for found in _ROOTS.findall(text))
    return any(math.gcd(*ratio) > 1 for ratio in ratios) or any(
        number % square == 0
        for number in radicands
        for square in (k * k for k in range(2, math.isqrt(number) + 1))
    )


def operations(answer: str) -> int:
    r"""How many operations an expression has, products without a sign included.

    >>> operations(r"2\sqrt{3}"), operations(r"\sqrt{3}\cdot 2"), operations("-7")
    (2, 2, 0)
    >>> operations(r"\frac{1}{2}\sqrt{3}"), operations(r"\frac{\sqrt{3}}{2}")
    (2, 2)
    """
    text = _TEXT.sub("", plain(answer).rpartition("=")[2])
    text = _ENVIRONMENT.sub("", _DETERMINANT.sub(r"\\det", text))
    text = _DIVIDED_BEFORE.sub(r"\\frac", _DIVIDED_AFTER.sub("/2", text))
    functions = len(_FUNCTION.findall(text))
    text = _COMMAND.sub("p", _SIGN.sub("*", _FUNCTION.sub("(", text)))
    return functions + len(_BINARY.findall(text)) + len(_PRODUCT.findall(text))


def _value(answer: str) -> str:
    return _bare(answer).rpartition("=")[2]


def _bare(text: str) -> str:
    """Without braces, which may stand round anything, and with fractions in a line."""
    in_line = _FRACTION.sub(r"\1\2/\3\4", plain(text))
    return in_line.replace("{", "").replace("}", "")
