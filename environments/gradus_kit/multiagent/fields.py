"""Values that a member gives in tags of its public text, such as `<decision>debater_a</decision>`.

Two different values under one tag are none at all: what is ambiguous is missing, and the episode
continues.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gradus_kit.multiagent.channels import TAG_PATTERN

Kind = Literal["str", "int", "float", "list", "bool"]
Mode = Literal["binary", "numeric", "enum", "choice"]
FieldValue = str | int | float | bool | tuple[str, ...]
MAX_VALUE_CHARACTERS = 4096
_TRUE, _FALSE = frozenset({"true", "yes", "1"}), frozenset({"false", "no", "0"})


@dataclass(frozen=True)
class FieldSpec:
    """The type of a tag's value, and how two values are compared.

    `binary` compares text as a whole, `numeric` within bounds, `enum` one of `values`, `choice` the
    letter of an option of the task.
    """

    tag: str
    kind: Kind = "str"
    mode: Mode = "binary"
    values: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf

    def read(self, text: str) -> FieldValue | None:
        """The value in a public text, as it is written last; None when there is none, or more than
        one."""
        values = [self._value(raw) for raw in _contents(text, self.tag)]
        different = {canonical(value) if isinstance(value, str) else value for value in values}
        return values[-1] if len(different) == 1 else None

    def _value(self, raw: str) -> FieldValue | None:
        if len(raw) > MAX_VALUE_CHARACTERS:
            return None
        value = _as_kind(raw, self.kind)
        if self.mode == "enum":
            named = {canonical(one): one for one in self.values}
            return named.get(canonical(raw))
        if self.mode == "numeric" and isinstance(value, int | float):
            return value if self.low <= value <= self.high else None
        return value


def canonical(text: str) -> str:
    """A text without case, surplus space and marks around it, for comparisons.

    >>> canonical('  "Debater_A". ')
    'debater_a'
    """
    return " ".join(text.split()).strip(" \"'`*.,;:!?()[]{}").casefold()


def _contents(text: str, tag: str) -> Iterator[str]:
    """Return what stands between an opener and the closer after it."""
    lowered = text.lower()
    opener, closer = f"<{tag.lower()}>", f"</{tag.lower()}>"
    # Lower case may have another length than the text, so the value is read from the same string.
    source = text if len(lowered) == len(text) else lowered
    place = 0
    while (start := lowered.find(opener, place)) >= 0:
        start += len(opener)
        end = lowered.find(closer, start)
        if end < 0:
            return
        yield source[start:end].strip()
        place = end + len(closer)


def _as_kind(raw: str, kind: Kind) -> FieldValue | None:
    if kind == "list":
        items = tuple(item for part in re.split(r"[,\n]", raw) if (item := part.strip()))
        return items or None
    if kind == "bool":
        word = canonical(raw)
        return True if word in _TRUE else False if word in _FALSE else None
    if kind == "str":
        return raw or None
    try:
        number = float(raw.replace(",", "").strip())
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    if kind == "float":
        return number
    return int(number) if number.is_integer() else None


def build_field(tag: str, written: Any) -> FieldSpec:
    """A field as it is written in a pack; ValueError says what is wrong with it."""
    if not TAG_PATTERN.fullmatch(tag):
        raise ValueError(f"{tag!r} is not a name of a tag")
    if not isinstance(written, Mapping):
        raise ValueError("must be a map with `type` and `scoring`")
    if unknown := set(written) - {"type", "scoring"}:
        raise ValueError(f"unknown key {min(map(str, unknown))!r}; it takes type and scoring")
    kind = written.get("type", "str")
    if kind not in get_args(Kind):
        raise ValueError(f"type = {kind!r} is none of {', '.join(get_args(Kind))}")
    scoring = written.get("scoring", "binary")
    scoring = {"mode": scoring} if isinstance(scoring, str) else scoring
    if not isinstance(scoring, Mapping):
        raise ValueError(f"scoring must be one of {', '.join(get_args(Mode))}, or a map with mode")
    return _scored(tag, kind, dict(scoring))


def _scored(tag: str, kind: Kind, scoring: dict[str, Any]) -> FieldSpec:
    mode = scoring.pop("mode", None)
    if mode not in get_args(Mode):
        raise ValueError(f"scoring = {mode!r} is none of {', '.join(get_args(Mode))}")
    values = _values(scoring.pop("values", None)) if mode == "enum" else ()
    low, high = (_bound(scoring, name) for name in ("min", "max")) if mode == "numeric" else (0, 0)
    if scoring:
        raise ValueError(f"scoring {mode!r} takes no {min(map(str, scoring))!r}")
    if mode == "numeric":
        if kind not in ("int", "float"):
            raise ValueError(f"scoring numeric needs type int or float, not {kind}")
        low, high = -math.inf if low is None else low, math.inf if high is None else high
        if low >= high:
            raise ValueError(f"min = {low:g} must be less than max = {high:g}")
        return FieldSpec(tag, kind, mode, low=low, high=high)
    if mode in ("enum", "choice") and kind != "str":
        raise ValueError(f"scoring {mode} needs type str, not {kind}")
    return FieldSpec(tag, kind, mode, values=values)


def _values(written: Any) -> tuple[str, ...]:
    if not isinstance(written, list) or not written:
        raise ValueError("scoring enum needs `values`, a list of what may stand there")
    if any(isinstance(value, bool) for value in written):
        raise ValueError(
            "values: YAML reads yes, no, true and false as no text; put them in quotes"
        )
    values = tuple(str(value) for value in written)
    seen: dict[str, str] = {}
    for value in values:
        short = canonical(value)
        if not short:
            raise ValueError(f"value {value!r} is empty when it is compared")
        if short in seen:
            raise ValueError(f"values {seen[short]!r} and {value!r} are the same when compared")
        seen[short] = value
    return values


def _bound(scoring: dict[str, Any], name: str) -> float | None:
    bound = scoring.pop(name, None)
    if bound is None:
        return None
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound):
        raise ValueError(f"{name} = {bound!r} must be a finite number")
    return float(bound)
