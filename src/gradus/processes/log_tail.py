"""What a process's log says of its end, safe to show on a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradus.log import CONTINUED, OUTPUT, printable

_TAIL_BYTES = 512 << 10
_MAX_LINE = 400
_OWN_WORD = re.compile(r"gradus [a-z-]+: (.*)")
_TRACEBACK = re.compile(r"(?P<prefix>.*?)Traceback \(most recent call last\):$")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: .*|:)?$")
_CRASH = re.compile(r"(Fatal Python error: |terminate called |free\(\): |malloc\(\): ).*")
_RANK_EXIT_CODE = re.compile(r"\s*exitcode\s*: (-?\d+)")
_UNFINISHED = re.compile(r"internal error: [\w.]+:$")
_LEAKS = re.compile(
    r"(nanobind: leaked | - leaked |nanobind: this is likely caused|See https://nanobind\.)"
    r"|.*resource_tracker.*leaked |\s*warnings\.warn\('resource_tracker"
    r"|\s*warnings\.warn\($| - \.\.\. skipped remainder"
)
"""What libraries say of objects that still exist when Python ends; it never explains an end."""
_POINTS_ABOVE = re.compile(r"\babove\b")
_RULER = re.compile(r"\W+$")
_REPORT_OF_TORCHRUN = re.compile(
    r"\s*(\[\d+\]:|Failures:|Root Cause|time\s*:|host\s*:|rank\s*:|exitcode\s*:|error_file\s*:"
    r"|traceback\s*:|\S+ FAILED$|<NO_OTHER_FAILURES>)"
)
_STORY = re.compile(r"(\(.*\) )?(DEBUG|INFO)\b")
_LINE = re.compile(
    r"\d{4}-\d\d-\d\dT[\d:.]+Z (?P<level>[A-Z]+) (\S+ )??\S+( step=\d+)?"
    r"(?P<logger> [^\s:]+)?: (?P<message>.*)"
)
"""A line that `gradus.log` made for a person."""


def last_lines(log: Path, count: int = 12, *, since: int = 0) -> list[str]:
    """The last lines that say something, without control characters; [] when there is no log.

    `since` is the byte at which the process began to write; earlier launches wrote before it.
    """
    lines = _read(log, since)
    return [line for line in lines if not _LEAKS.match(line)][-count:]


def find_cause(log: Path, *, since: int = 0) -> str:
    """Why a process ended, as one line: the first line of its error; "" when it names none.

    Looked for in this order: the first `gradus <role>: ...`, the cause of those that follow; the
    exception of the last traceback; the last line that is not a report of progress.
    """
    return cause_in(_read(log, since))


def cause_in(lines: Sequence[str]) -> str:
    """As `find_cause`, in the lines of a log."""
    word = _own_word(lines)
    if _POINTS_ABOVE.search(word):
        first = next(_exceptions(lines), "")
        return f"{first} ({word})" if first and first not in word else word
    return word or ["", *_exceptions(lines)][-1] or _last_word(lines)


def find_crash(log: Path, *, since: int = 0) -> str:
    """What the interpreter or the C library said when a signal ended the process; "" if nothing."""
    found = [match[0] for line in _read(log, since) if (match := _CRASH.match(line))]
    return found[-1] if found else ""


def last_rank_exit_code(log: Path, *, since: int = 0) -> int | None:
    """Exit code of the rank that torchrun blames; None when its report does not end the log."""
    lines = last_lines(log, since=since)
    codes = [match[1] for line in lines if (match := _RANK_EXIT_CODE.match(line))]
    return int(codes[-1]) if codes else None


def log_end(log: Path) -> int:
    """The present size of a log; 0 where there is none."""
    with contextlib.suppress(OSError):
        return log.stat().st_size
    return 0


def _read(log: Path, since: int) -> list[str]:
    """What was said, from the end of a long log."""
    text = b""
    # A pipe would be waited for.
    with contextlib.suppress(OSError):
        if log.is_file():
            with log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(since, size - _TAIL_BYTES))
                text = file.read()
    lines = text.decode(errors="replace").splitlines()
    return [_shown(said) for line in lines for said in _said(line) if said.strip()]


def _said(line: str) -> Iterator[str]:
    """What a line of a log says, as its process would have printed it."""
    values = _record(line)
    if values is None:
        yield line.removeprefix(CONTINUED)
        return
    first, *more = str(values["message"]).split("\n")
    level, logger = values["level"], (values.get("logger") or "").strip()
    yield first if level == OUTPUT else f"{level} {logger}: {first}"
    yield from more
    yield from str(values.get("exception") or "").split("\n")


def _record(line: str) -> dict[str, Any] | None:
    """The record that a line is, in either format; None for any other line."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            values = json.loads(line)
            return values if {"level", "message"} <= values.keys() else None
    found = _LINE.match(line)
    return None if found is None else found.groupdict()


def _own_word(lines: Sequence[str]) -> str:
    """The first line of what the role itself said; with the next one where it only opens."""
    said = [match[1].strip() for line in lines if (match := _OWN_WORD.match(line))]
    said = [line for line in said if line]
    if len(said) > 1 and _UNFINISHED.match(said[0]):
        return f"{said[0]} {said[1]}"
    return said[0] if said else ""


def _exceptions(lines: Sequence[str]) -> Iterator[str]:
    """The first line of the exception below each traceback, with its type.

    A process below ours may print before each line who it is.
    """
    prefix: str | None = None
    for number, line in enumerate(lines):
        if opened := _TRACEBACK.match(line):
            prefix = opened["prefix"]
            continue
        if prefix is None:
            continue
        text = line.removeprefix(prefix)
        if _EXCEPTION.match(text):
            prefix = None
            yield _complete(text, lines[number + 1 :])


def _complete(text: str, following: Sequence[str]) -> str:
    """An exception whose message begins with a line break names its cause on the next line, or
    below a line of asterisks."""
    if text.endswith(":") and following:
        worded = (line for line in following[:5] if any(c.isalnum() for c in line))
        return f"{text} {next(worded, following[0]).strip()}"
    return text


def _last_word(lines: Sequence[str]) -> str:
    for line in reversed(lines):
        is_noise = (
            _LEAKS.match(line)
            or _RULER.match(line)
            or _REPORT_OF_TORCHRUN.match(line)
            or _STORY.match(line)
        )
        if not is_noise:
            return line
    return ""


def _shown(line: str) -> str:
    shown = printable(line.rstrip())
    return shown if len(shown) <= _MAX_LINE else shown[:_MAX_LINE] + "…"
