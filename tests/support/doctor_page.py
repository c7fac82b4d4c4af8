"""The page that says what the doctor finds: each fault that tests put in is a row of it."""

from __future__ import annotations

import re
from pathlib import Path

from gradus.cli.doctor.lines import ProbeLine, ProbeVerdict

PAGE = Path(__file__).parents[2] / "docs" / "look-up" / "doctor.md"
_NUMBER = re.compile(r"\d[\d,.]*(e-\d+)?")
_PLACE = re.compile(r"(/[\w.-]+)+")


def _alike(text: str) -> str:
    """Without what differs from machine to machine."""
    return " ".join(_NUMBER.sub("N", _PLACE.sub("/", text)).split())


def row_of(fault: str, line: ProbeLine) -> str:
    said = f"{line.seen}. {line.advice}" if line.advice else line.seen
    said = " ".join(said.replace("<", "&lt;").replace("|", "\\|").split())
    return f"| {fault} | {line.verdict} | {line.probe} | {said} |"


def is_told(fault: str, line: ProbeLine) -> None:
    """The page has the fault with its line."""
    assert line.verdict is not ProbeVerdict.OK
    rows = {_alike(it) for it in PAGE.read_text().splitlines()}
    assert _alike(row_of(fault, line)) in rows, row_of(fault, line)


def is_refused(fault: str, probe: str, error: Exception) -> None:
    """The same of what a child said instead of its line."""
    is_told(fault, ProbeLine(probe, ProbeVerdict.FAILS, str(error)))
