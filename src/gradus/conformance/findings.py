"""One line of a report: what was checked, what came out, and what to do."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How one check ended."""

    OK = "ok"
    NOTE = "note"
    """It works; somebody should look at it."""
    BROKEN = "broken"
    SKIPPED = "not checked"


@dataclass(frozen=True)
class Checked:
    """One line of the report."""

    check: str
    """What was checked, in a few words."""
    outcome: Outcome
    seen: str
    """What was seen."""
    advice: str = ""
    """What to do; empty where nothing is to be done."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What was measured, for programs."""

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self, width: int) -> list[str]:
        """For a person; what is too long is wrapped, and further lines stay as they are."""
        head = f"{self.outcome:<12}{self.check:<18}"
        said, *more = self.seen.split("\n")
        text = f"{said}. {self.advice}" if self.advice else said
        wrapped = textwrap.wrap(
            text,
            max(width, len(head) + 40),
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_long_words=False,
        )
        return [*(wrapped or [head.rstrip()]), *more]


def ok(check: str, seen: str, values: Mapping[str, Any] | None = None) -> Checked:
    """A check that ended well.

    >>> ok("tools", "none").lines(80)
    ['ok          tools             none']
    """
    return Checked(check, Outcome.OK, seen, values=values or {})


def note(check: str, seen: str, advice: str) -> Checked:
    """Something to look at that breaks nothing."""
    return Checked(check, Outcome.NOTE, seen, advice)


def broken(check: str, seen: str, advice: str) -> Checked:
    """Something that must be mended before the environment trains anybody."""
    return Checked(check, Outcome.BROKEN, seen, advice)


def skipped(check: str, why: str, advice: str = "") -> Checked:
    """A check that says nothing about this environment."""
    return Checked(check, Outcome.SKIPPED, why, advice)


def shortened(text: object, limit: int = 160) -> str:
    """A text on one line, its middle left out where it is long.

    >>> shortened("a" * 10, 7)
    'aaa…aaa'
    """
    flat = " ".join(str(text).split())
    if len(flat) <= limit:
        return flat
    half = (limit - 1) // 2
    return f"{flat[:half]}…{flat[-half:]}"
