"""Reads as much of PromQL as the dashboard uses, and says what a query asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"\s*(?:(?P<text>\"(?:[^\"\\]|\\.)*\")|(?P<number>\d+(?:\.\d+)?)|(?P<range>\[[^\]]*\])"
    r"|(?P<word>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<sign>=~|!~|!=|==|[<>]=?|[-+*/(){}=,]))"
)
_FUNCTIONS = {"rate": True, "increase": True, "time": False, "vector": False}
"""Whether each takes a range of time."""
_AGGREGATIONS = ("sum", "max", "min", "avg", "count")
_OPERATORS = ("+", "-", "*", "/", "or", "and", "unless", "==", "!=", ">", "<", ">=", "<=")
_RANGE = re.compile(r"\[(\d+[smhd]|\$__rate_interval)\]")


@dataclass
class Asked:
    """What a query asks for."""

    metrics: dict[str, set[str]] = field(default_factory=dict)
    """Name → labels that its selectors and the aggregations around it name."""
    ranges: set[str] = field(default_factory=set)
    """Names that are asked for over a range of time."""


class PromQL:
    """A query; ValueError when it is none.

    >>> PromQL('sum by (a) (rate(x_total{b="1"}[5m]))').asked.metrics
    {'x_total': {'a', 'b'}}
    """

    def __init__(self, text: str) -> None:
        self.asked = Asked()
        self._tokens = _split(text)
        self._position = 0
        self._expression(set())
        if self._peek()[1]:
            raise ValueError(f"{self._peek()[1]!r} stands behind the end of {text!r}")

    def _expression(self, around: set[str], *, takes_range: bool = False) -> None:
        self._operand(around, takes_range=takes_range)
        while self._peek()[1] in _OPERATORS:
            self._next()
            self._operand(around, takes_range=False)

    def _operand(self, around: set[str], *, takes_range: bool) -> None:
        kind, word = self._next()
        if word == "(":
            self._expression(around)
            self._expect(")")
        elif word in _AGGREGATIONS:
            labels = self._labels() if self._peek()[1] in ("by", "without") else set()
            self._expect("(")
            self._expression(around | labels)
            self._expect(")")
        elif word in _FUNCTIONS and self._peek()[1] == "(":
            self._next()
            if self._peek()[1] != ")":
                self._expression(around, takes_range=_FUNCTIONS[word])
            self._expect(")")
        elif kind == "word":
            self._selector(word, around, takes_range=takes_range)
        elif kind != "number":
            raise ValueError(f"{word!r} where a value should stand")

    def _selector(self, metric: str, around: set[str], *, takes_range: bool) -> None:
        labels = self.asked.metrics.setdefault(metric, set())
        labels |= around
        if self._peek()[1] == "{":
            self._next()
            while self._peek()[1] != "}":
                labels.add(self._next("word")[1])
                if self._next()[1] not in ("=", "=~", "!=", "!~"):
                    raise ValueError(f"a label of {metric} is not compared")
                self._next("text")
                if self._peek()[1] == ",":
                    self._next()
            self._next()
        has_range = self._peek()[0] == "range"
        if has_range != takes_range:
            raise ValueError(f"{metric} with a range where none belongs, or without one")
        if has_range:
            if not _RANGE.fullmatch(self._next()[1]):
                raise ValueError(f"{metric} has a range that is not a time")
            self.asked.ranges.add(metric)

    def _labels(self) -> set[str]:
        self._next()
        self._expect("(")
        found = set()
        while self._peek()[1] != ")":
            found.add(self._next("word")[1])
            if self._peek()[1] == ",":
                self._next()
        self._next()
        return found

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._position] if self._position < len(self._tokens) else ("", "")

    def _next(self, kind: str = "") -> tuple[str, str]:
        token = self._peek()
        if not token[1] or (kind and token[0] != kind):
            raise ValueError(f"{token[1]!r} where a {kind or 'word'} should stand")
        self._position += 1
        return token

    def _expect(self, sign: str) -> None:
        if self._next()[1] != sign:
            raise ValueError(f"no {sign!r} at word {self._position}")


def _split(text: str) -> list[tuple[str, str]]:
    tokens, position = [], 0
    while position < len(text.rstrip()):
        found = _TOKEN.match(text, position)
        if found is None or found.lastgroup is None:
            raise ValueError(f"no PromQL: {text[position:]!r}")
        tokens.append((found.lastgroup, found[found.lastgroup]))
        position = found.end()
    return tokens
