"""What is known of one thing that was tried: a line for a person, a JSON object for a program."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from gradus.errors import ExitCode
from gradus.log import printable
from gradus.monitor import terminal_width

_NAME_WIDTH = 22


class CheckVerdict(StrEnum):
    """How a trial ended."""

    OK = "ok"
    SLOW = "slow"
    """It works, and will cost time or trouble."""
    FAILS = "fails"
    AWAY = "away"
    """Something outside of this machine does not answer; another try may find it."""
    UNKNOWN = "not tried"


@dataclass(frozen=True)
class Finding:
    """One thing: what was tried, how it ended, the number, and what to do."""

    part: str
    verdict: CheckVerdict
    seen: str
    advice: str = ""
    """Empty where nothing is to be done."""
    seconds: float = 0.0
    values: Mapping[str, float] = field(default_factory=dict)
    """What was measured, for programs."""

    @classmethod
    def judged(cls, part: str, seen: str, is_ok: bool, advice: str) -> Finding:
        """What is fine, or fails with advice."""
        if is_ok:
            return cls(part, CheckVerdict.OK, seen)
        return cls(part, CheckVerdict.FAILS, seen, advice)

    def for_person(self, width: int) -> list[str]:
        """Wrapped inside its column."""
        took = f"{self.seconds:6.1f} s" if self.seconds >= 0.05 else " " * 8
        head = f"{self.verdict:<10}{self.part:<{_NAME_WIDTH}}{took}  "
        text = f"{self.seen}. {self.advice}" if self.advice else self.seen
        indent = " " * len(head)
        lines: list[str] = []
        for number, said in enumerate(text.splitlines() or [""]):
            lines += textwrap.wrap(
                (indent if number else head) + printable(said),
                max(width, len(head) + 40),
                subsequent_indent=indent,
                break_long_words=False,
            )
        return lines


@dataclass
class Report:
    """Prints findings as they come, and knows how the check ends."""

    is_json: bool
    counts: dict[CheckVerdict, int] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        self.counts[finding.verdict] = self.counts.get(finding.verdict, 0) + 1
        if self.is_json:
            print(json.dumps({**asdict(finding), "seconds": round(finding.seconds, 3)}))
        else:
            print("\n".join(finding.for_person(terminal_width())))
        sys.stdout.flush()

    def end(self) -> None:
        if not self.is_json:
            told = [f"{count} {verdict}" for verdict, count in self.counts.items()]
            print(", ".join(told) or "nothing was tried", flush=True)

    @property
    def exit_code(self) -> int:
        """65 when something fails, else 75 when something outside is away, else 0."""
        if CheckVerdict.FAILS in self.counts:
            return ExitCode.UNFIT
        return ExitCode.TRY_AGAIN if CheckVerdict.AWAY in self.counts else ExitCode.DONE
