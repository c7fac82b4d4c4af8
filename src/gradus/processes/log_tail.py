"""What a process's log says of its end, safe to show on a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_TAIL_BYTES = 256 << 10
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
_STORY = re.compile(r"\d{4}-\d\d-\d\d \S+ (DEBUG|INFO) |(\(.*\) )?(DEBUG|INFO)\b")


def last_lines(log: Path, count: int = 12, *, since: int = 0) -> list[str]:
    """The last lines that say something, without control characters; [] when there is no log.

    `since` is the byte at which the process began to write; earlier launches wrote before it.
    """
    lines = _read(log, since)
    return [line for line in lines if not _LEAKS.match(line)][-count:]


def find_cause(log: Path, *, since: int = 0) -> str:
    """Why a process ended, as one line: the first line of its error; "" when it names none.

    Asked in this order: its own `gradus <role>: ...`, where the first one is the cause of those
    that follow; the exception of its last traceback; the last line that is no report of progress.
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


def _read(log: Path, since: int) -> list[str]:
    """The lines that are not empty, from the end of a long log."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, since, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [_printable(line) for line in text.splitlines() if line.strip()]


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
    """An exception whose message begins with a line break names its cause on the next line."""
    if text.endswith(":") and following:
        return f"{text} {following[0].strip()}"
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


def _printable(line: str) -> str:
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line.rstrip())
    return shown if len(shown) <= _MAX_LINE else shown[:_MAX_LINE] + "…"
