"""What a person writes to choose episodes, such as `reward < 0.2 and staleness > 2`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gradus.errors import ConfigError

Mask = NDArray[np.bool_]
_PIECE = re.compile(r"""\s*(<=|>=|!=|==|[()<>=~]|"[^"]*"|'[^']*'|[^\s()<>=!~"']+)""")
_OF_NUMBERS: Mapping[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}
_OF_WORDS = ("=", "!=", "~")
_MAX_CHARACTERS = 2_000
_MAX_DEPTH = 40
_JOINS = ("and", "or", "not")
_EXAMPLE = "write for example: reward < 0.2 and (staleness > 2 or outcome != finished)"


class Columns(Protocol):
    """What a filter asks of the index."""

    num_rows: int

    @property
    def names(self) -> list[str]: ...
    def numbers(self, name: str) -> NDArray[Any] | None:
        """A column of numbers as a person sees it; None for one of words."""
        ...

    def having(self, name: str, accepts: Callable[[str], bool]) -> Mask:
        """Rows whose word is accepted."""
        ...


def passing(text: str, columns: Columns) -> Mask:
    """Rows that pass; ConfigError says what of the text is no filter.

    Comparisons of a column with a number, a word or `none`, joined by and, or, not and parentheses.
    A name may be the beginning of one, and `~` finds words that contain another.
    """
    if len(text) > _MAX_CHARACTERS:
        raise ConfigError(f"the filter has {len(text):,} characters; at most {_MAX_CHARACTERS:,}")
    pieces, place = [], 0
    while text[place:].strip():
        found = _PIECE.match(text, place)
        if found is None:
            raise ConfigError(f"the filter is not understood from {text[place:][:40]!r} on")
        pieces.append(found[1])
        place = found.end()
    reader = _Reader(pieces, columns)
    mask = reader.any_of(0)
    if reader.next is not None:
        raise ConfigError(f"the filter has {reader.next!r} where 'and', 'or' or its end belongs")
    return mask


class _Reader:
    """Reads the pieces of one filter, and computes as it goes."""

    def __init__(self, pieces: Sequence[str], columns: Columns) -> None:
        self._pieces, self._columns, self._place = pieces, columns, 0

    @property
    def next(self) -> str | None:
        return self._pieces[self._place] if self._place < len(self._pieces) else None

    def _take(self) -> str:
        piece = self.next
        if piece is None:
            raise ConfigError(f"the filter ends too early; {_EXAMPLE}")
        self._place += 1
        return piece

    def _takes(self, word: str) -> bool:
        is_there = self.next is not None and str(self.next).lower() == word
        self._place += is_there
        return is_there

    def any_of(self, depth: int) -> Mask:
        mask = self._all_of(depth)
        while self._takes("or"):
            mask = mask | self._all_of(depth)
        return mask

    def _all_of(self, depth: int) -> Mask:
        mask = self._one(depth)
        while self._takes("and"):
            mask = mask & self._one(depth)
        return mask

    def _one(self, depth: int) -> Mask:
        if depth > _MAX_DEPTH:
            raise ConfigError(f"the filter is nested more than {_MAX_DEPTH} deep")
        if self._takes("not"):
            return ~self._one(depth + 1)
        if not self._takes("("):
            return self._comparison()
        mask = self.any_of(depth + 1)
        if not self._takes(")"):
            raise ConfigError("the filter has a '(' without its ')'")
        return mask

    def _comparison(self) -> Mask:
        name = self._name(_plain(self._take()))
        sign = self._take()
        sign = "=" if sign == "==" else sign
        if sign not in (*_OF_NUMBERS, "~"):
            raise ConfigError(
                f"the filter has {sign!r} after {name}; one of {' '.join([*_OF_NUMBERS, '~'])} "
                f"belongs there"
            )
        word = self._take()
        if word in (*_OF_NUMBERS, "~", "(", ")") or word.lower() in _JOINS:
            raise ConfigError(f"the filter has {word!r} where the value of {name} belongs")
        values = self._columns.numbers(name)
        if values is not None:
            return _compared(name, values, sign, word)
        wanted = "" if word.lower() == "none" else _plain(word)
        if sign not in _OF_WORDS:
            raise ConfigError(f"{name} holds words, which {sign} does not compare; use = != ~")
        if sign == "~":
            return self._columns.having(name, lambda it: wanted.lower() in it.lower())
        return self._columns.having(name, lambda it: (it == wanted) == (sign == "="))

    def _name(self, word: str) -> str:
        known = self._columns.names
        near = [it for it in known if it.startswith(word)] or [
            it for it in known if it.startswith(f"part:{word}")
        ]
        found = word if word in known else f"part:{word}" if f"part:{word}" in known else None
        if found is None and len(near) == 1:
            found = near[0]
        if found is None:
            raise ConfigError(
                f"no column {word!r}; there are {', '.join(near if word and near else known)}"
            )
        return found


def _compared(name: str, values: NDArray[Any], sign: str, word: str) -> Mask:
    if sign == "~":
        raise ConfigError(f"{name} holds numbers, in which ~ finds nothing")
    numbers = np.asarray(values, "f8")
    if word.lower() == "none":
        if sign not in ("=", "!="):
            raise ConfigError(f"{name} {sign} none: use = or !=")
        return np.asarray(np.isnan(numbers) == (sign == "="))
    try:
        wanted = float(_plain(word))
    except ValueError:
        raise ConfigError(f"{name} {sign} {word}: {word} is no number") from None
    # What has no number passes no comparison.
    return np.asarray(_OF_NUMBERS[sign](numbers, wanted) & ~np.isnan(numbers))


def _plain(word: str) -> str:
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "\"'" else word
