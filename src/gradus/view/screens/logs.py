"""The newest lines of all logs of a run, in the order of their times."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradus.log import CONTINUED
from gradus.run.json_lines import last_lines, parse_object
from gradus.run.paths import RunDirectory

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_HEAD = re.compile(r"(\S{20,32}Z) (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*?): (.*)", re.DOTALL)
_STEP = re.compile(r" step=(\d+)")
_MAX_BYTES = 2 << 20
"""Of the end of each log; older lines are not read."""
_MAX_LINES = 1_000
_MAX_FILES = 64
_MAX_TEXT = 2_000
_MAX_FOLDED = 200


def logs_page(run_dir: RunDirectory, where: dict[str, str]) -> dict[str, Any]:
    """The newest lines that pass: `process`, `level` and worse, `step`, and `text` in them."""
    files = sorted(run_dir.logs.rglob("*.log"))[:_MAX_FILES] if run_dir.logs.is_dir() else []
    entries, cut = [], []
    for path in files:
        name = path.relative_to(run_dir.logs).with_suffix("").as_posix()
        try:
            if path.stat().st_size > _MAX_BYTES:
                cut.append(name)
            entries += list(_entries(path, name))
        except OSError:  # It was renamed since the folder was listed.
            continue
    processes = sorted({it["process"] for it in entries})
    passing = [it for it in entries if _passes(it, where)]
    passing.sort(key=lambda it: it["time"])
    return {
        "lines": passing[-_MAX_LINES:],
        "count": len(passing),
        "processes": processes,
        "cut": cut,
    }


def _entries(path: Path, name: str) -> Iterator[dict[str, Any]]:
    """Each record with what follows it, such as a traceback; lines of no form stand by the time of
    the record before them."""
    found: dict[str, Any] | None = None
    for line in last_lines(path, max_bytes=_MAX_BYTES):
        text = (line.content or b"").decode(errors="replace").rstrip("\r\n")
        entry = _entry(text, name, parse_object(line) if text.startswith("{") else None)
        if entry is not None or found is None:
            if found is not None:
                yield found
            found = entry or _plain(text, name)
        elif len(found["more"]) < _MAX_FOLDED:
            found["more"].append(text.removeprefix(CONTINUED)[:_MAX_TEXT])
    if found is not None:
        yield found


def _plain(text: str, name: str) -> dict[str, Any]:
    return {"time": "", "level": "INFO", "process": name, "step": None, "said": text, "more": []}


def _entry(text: str, name: str, form: dict[str, Any] | None) -> dict[str, Any] | None:
    """A record of either format; None for a line that begins none."""
    entry = _plain(text[:_MAX_TEXT], name)
    if form is not None and form.get("level") in LEVELS and isinstance(form.get("time"), str):
        step = form.get("step")
        told = f"{form.get('logger') or ''}: {form.get('message')}"
        entry |= {"time": form["time"], "level": form["level"], "said": told[:_MAX_TEXT]}
        more = str(form.get("exception") or "").splitlines()[:_MAX_FOLDED]
        return entry | {"step": step if isinstance(step, int) else None, "more": more}
    head = _HEAD.fullmatch(text)
    if head is None:
        return None
    step = _STEP.search(head[3])
    logger = head[3].rpartition(" ")[2]
    return entry | {
        "time": head[1],
        "level": head[2],
        "step": int(step[1]) if step else None,
        "said": f"{logger}: {head[4]}"[:_MAX_TEXT],
    }


def _passes(entry: dict[str, Any], where: dict[str, str]) -> bool:
    least = where.get("level", "")
    text = where.get("text", "").lower()
    shown = "\n".join([entry["said"], *entry["more"]]).lower()
    return (
        where.get("process", "") in ("", entry["process"])
        and (least not in LEVELS or LEVELS.index(entry["level"]) >= LEVELS.index(least))
        and where.get("step", "") in ("", str(entry["step"]))
        and text in shown
    )
