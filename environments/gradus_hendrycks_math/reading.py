"""Reading an answer: what of its spelling changes nothing, its unit, and what it leaves to do."""

from __future__ import annotations

import math
import re

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
_IN_TEXT = r"\\(?:text(?:rm|bf|it)?|math(?:rm|bf)|mbox)"
_TEXT_UNIT = re.compile(
    rf"(.*?\S)(?:\s|~|\\[,:; ])*{_IN_TEXT}\{{{_NO_UNIT}[A-Za-z ~./]+"
    rf"(?:{_POWER}\}}|\}}{_POWER})\.?",
    re.DOTALL,
)
_WRAPPED = re.compile(
    rf"{_IN_TEXT}\{{\s*(-?[\d.,]+)(?:\s|~|\\[,:; ])*([A-Za-z][A-Za-z ./]*{_POWER})\}}(.*)"
)
"""A number and its unit in one text."""
_UNITS = {
    **dict.fromkeys(("h", "m", "g", "l", "mm", "cm", "dm", "km", "ml", "mg", "kg", "unit"), ()),
    **{"h": ("hr", "hour"), "min": ("minute",), "s": ("sec", "second"), "day": (), "week": ()},
    **{"m": ("meter",), "cm": ("centimeter",), "mm": ("millimeter",), "km": ("kilometer",)},
    **{"in": ("inch", "inche"), "ft": ("foot", "feet"), "yd": ("yard",), "mi": ("mile",)},
    **{"g": ("gram",), "kg": ("kilogram",), "mg": ("milligram",), "lb": ("pound",)},
    **{"oz": ("ounce",), "l": ("liter", "L"), "ml": ("milliliter",), "gal": ("gallon",)},
    **{"cent": (), "dollar": (), "degree": (), "rad": ("radian",), "year": (), "month": ()},
    **{"percent": (), "mi/h": ("mph",), "km/h": ("kph",)},
}
"""Each known unit with its other spellings, without the s of a plural."""
_SPELLINGS = {name: unit for unit, names in _UNITS.items() for name in (unit, *names)}
_PART_OF_UNIT = re.compile(r"(?:(sq|cu)[a-z]* )?([A-Za-z]+)(?:\^(\d))?")
_RATIOS = re.compile(
    r"\\frac[{(+-]*(\d+)[)}]+[{(+-]*(\d+)[)}]|\\frac(\d)(\d)|"
    r"(?:(?<![\w.^])(\d+)|(?<=[{(])(\d+)[)}]+)(?:/|\\div)[{(+-]*(\d+)(?![\w.])"
)
_ROOTS = re.compile(r"\\sqrt(?:[{(]+(\d+)[)}]|(\d))")
_THOUSANDS = re.compile(r"(?<=\d)(?:,(?:\\!)?|\{,\})(?=\d{3}(?!\d))")


def plain(answer: str) -> str:
    """An answer without what changes nothing: space, dollars, thousands separators, styles, and
    the command round a text.

    >>> plain(r"\\dfrac{1}{2}") == plain(r"\\frac{1}{2} ")
    True
    """
    text = _UPRIGHT.sub(r"\1", _THOUSANDS.sub("", answer.strip().rstrip(".")))
    text = _STYLED.sub(r"\\frac", _DROPPED.sub("", text.replace("{,}", ",").translate(_SIGNS)))
    whole = _TEXT.fullmatch(text)
    return whole[1] if whole else text


def without_unit(answer: str, question: str | None) -> str:
    r"""An answer without the unit after it: one that is known, or words that the question has; any
    text where no question is given, as of the right answer.

    >>> without_unit("154 dollars", "How many dollars must be paid?")
    '154'
    >>> without_unit("154 million", "How many dollars must be paid?")
    '154 million'
    >>> without_unit(r"30\text{ cm}^2", ""), without_unit(r"3\text{ score}", "")
    ('30', '3\\text{ score}')
    """
    words = [] if question is None else re.findall(r"[a-z]{3,}", question.lower())
    if text := _TEXT_UNIT.fullmatch(_unwrapped(answer)):
        unit = unit_of(answer)
        is_asked = set(re.split(r"[ /^\d]+", unit.lower().rstrip("^0123456789"))).issubset(words)
        return text[1] if question is None or is_asked or _parts(unit) else answer
    found = _UNIT.fullmatch(answer.strip())
    return found[1] if found and found[2].lower() in words else answer


def unit_of(answer: str) -> str:
    r"""The text after an answer, with its power, or nothing.

    >>> unit_of(r"30\text{ cm}^2"), unit_of(r"6\text{ square feet}"), unit_of("30")
    ('cm^2', 'square feet', '')
    """
    found = _TEXT_UNIT.fullmatch(_unwrapped(answer))
    return _plain_unit(_unwrapped(answer)[found.end(1) :]) if found else ""


def in_the_unit(given: str, unit: str) -> str | None:
    r"""An answer where another one has a unit: without it where it has the same one, in a text or
    bare; None where it has another known one.

    >>> in_the_unit("5cm", "cm"), in_the_unit(r"5\text{ m}", "cm"), in_the_unit("5", "cm")
    ('5', None, '5')
    """
    given = _unwrapped(given)
    bare = re.fullmatch(
        rf"(.*[\d}}])(?:\s|~|\\[,:; ])*([A-Za-z][A-Za-z ./]*{_POWER})\.?", given, re.DOTALL
    )
    found = _TEXT_UNIT.fullmatch(given) or bare
    if found is None:
        return given
    own = _plain_unit(given[found.end(1) :])
    if _is_same(own, unit):
        return found[1]
    return None if _parts(own) or (_parts(unit) and found is not bare) else given


def _unwrapped(answer: str) -> str:
    return _WRAPPED.sub(r"\1\\text{ \2}\3", answer.strip())


def _plain_unit(text: str) -> str:
    """A unit of which only letters, spaces between words, `/` and powers are left."""
    text = re.sub(r"\\[a-z]+|\\.|[^A-Za-z/^\d.]", " ", text).replace(".", "")
    return re.sub(r"\s*([/^]|\s)\s*", r"\1", text).strip()


def _is_same(one: str, other: str) -> bool:
    """Tell whether two units are spelt alike, or known as the same; one may lack its power."""
    parts, others = _parts(one), _parts(other)
    if not (parts or others):
        return one.lower().removesuffix("s") == other.lower().removesuffix("s")
    return len(parts) == len(others) and all(
        name == other and (not power or not other_power or power == other_power)
        for (name, power), (other, other_power) in zip(parts, others, strict=True)
    )


def _parts(unit: str) -> list[tuple[str, str]]:
    """The names and powers that a known unit consists of; nothing for others.

    >>> _parts("square feet"), _parts("kilometers per hour"), _parts("score")
    ([('ft', '2')], [('km', ''), ('h', '')], [])
    """
    parts = []
    for part in re.split("/| per ", unit):
        found = _PART_OF_UNIT.fullmatch(part)
        name = found[2].replace("metre", "meter").replace("litre", "liter") if found else ""
        name = name if len(name) == 1 else name.lower()
        name = name.removesuffix("s") if len(name) > 2 and name not in _SPELLINGS else name
        if found is None or name not in _SPELLINGS:
            return []
        named = _SPELLINGS[name].split("/")
        power = {"sq": "2", "cu": "3"}.get(found[1], found[3] or "")
        parts += [(it, power) for it in named]
    return parts


_ASKS_FORM = re.compile(
    r"\b(?:expand|factor(?:ed|ing)?|factori[sz]e|distribute|multiply out)\b"
    r"|\b(?:write|express|rewrite|given?|answer)\b.{0,200}?\b(?:as|in)\b.{0,60}?"
    r"\b(?:form|fraction|power|product|sum|decimal|radical|exponent|terms of)",
    re.IGNORECASE | re.DOTALL,
)
_POINT = re.compile(r"\d\.\d|(?<!\d)\.\d")


def is_copied(given: str, question: str, answer: str) -> bool:
    r"""Tell whether an answer that is written otherwise than the right one is an expression of the
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
    """Tell whether a text is a formula between brackets and numbers alone."""
    before, found, after = text.partition(formula)
    is_more = _OPERATION.search(formula) and not before[-1:].isalnum() and not after[:1].isalnum()
    return bool(found and is_more and _NUMBERS.fullmatch(before + after))


def _flat(text: str) -> str:
    return re.sub(r"[()\[\]]", "", text)


def has_other_form(given: str, question: str, answer: str) -> bool:
    r"""Whether an answer lacks the form that the question asks for: where it asks to expand, factor
    or write as, an equal expression of another form is not what was asked.

    >>> has_other_form("(x+3)(x+2)", "Expand $(x+2)(x+3)$.", "x^2+5x+6")
    True
    >>> has_other_form("(x+3)(x+2)", "Factor $x^2+5x+6$.", "(x+2)(x+3)")
    False
    """
    return _ASKS_FORM.search(question) is not None and _form(given) != _form(answer)


def _form(answer: str) -> tuple[int, bool, bool, bool]:
    """How many sums stand in brackets; whether there is a power, a point, a fraction."""
    text = re.sub(r"\\(?:left|right)", "", plain(answer).rpartition("=")[2]).strip()
    while re.fullmatch(r"\([^()]*\)", text):
        text = text[1:-1]
    sums = re.findall(r"[({\[][^(){}\[\]]*?[\w)}][+-][^(){}\[\]]*[)}\]]", text)
    return len(sums), "^" in text, bool(_POINT.search(text)), "/" in text or "\\frac" in text


def is_unsimplified(given: str, answer: str) -> bool:
    r"""Tell whether an answer leaves more to be computed than the right one.

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
    """Tell whether a fraction of integers is not in lowest terms, or a root holds a square."""
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
