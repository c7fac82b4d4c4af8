"""The end of a process's log, safe to show on a terminal."""

from __future__ import annotations

import re
from pathlib import Path

_TAIL_BYTES = 64 << 10
_MAX_LINE = 400
_CAUSE = re.compile(r"gradus [a-z-]+: (.+)")
_RANK_EXIT_CODE = re.compile(r"^\s*exitcode\s*: (-?\d+)")


def last_lines(log: Path, count: int = 12) -> list[str]:
    """The last lines that are not empty, without control characters; [] when there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [_printable(line) for line in text.splitlines() if line.strip()][-count:]


def last_cause(log: Path) -> str:
    """Why a process ended: its own `gradus <role>: ...` line, else its last line."""
    lines = last_lines(log, count=200)
    causes = [match[1] for line in lines if (match := _CAUSE.search(line))]
    return (causes or lines or [""])[-1]


def last_rank_exit_code(log: Path) -> int | None:
    """Exit code of the rank that torchrun blames; None when its report does not end the log."""
    codes = [match[1] for line in last_lines(log) if (match := _RANK_EXIT_CODE.match(line))]
    return int(codes[-1]) if codes else None


def _printable(line: str) -> str:
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line.rstrip())
    return shown if len(shown) <= _MAX_LINE else shown[:_MAX_LINE] + "…"
