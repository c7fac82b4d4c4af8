"""Logs: one record per event, in one format and by one clock in every process of a run.

A process that the launcher started marks each line of a record that it writes to stderr. By the
mark the launcher (`gradus.processes.log_writer`) tells it from everything else that the process
prints, which is filed as level OUTPUT.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import select
import sys
import traceback
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from gradus.redact import SecretFilter

LOG_VARIABLE = "GRADUS_LOG"
"""What the launcher tells a process of its logs: the JSON of its `LogSettings`."""

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
OUTPUT = "OUTPUT"
"""Level of a line that no logger wrote: of a library, a crash, a program below."""
CONTINUED = "  | "
"""Begins each further line of a record of several lines, which so looks like no record."""
MAX_CHARACTERS = 32_768
"""Of a message, and of its traceback; the middle of longer ones is left out."""

_ENCODER = json.JSONEncoder(ensure_ascii=False)
_STDERR = 2
_WRITE_SECONDS = 10.0
_QUIET = ("httpx", "httpcore", "openai", "aiohttp.access")
_QUIET_WHEN_DEBUGGING = ("asyncio", "filelock", "fsspec", "h11", "numba", "urllib3")


@dataclass(frozen=True)
class LogSettings:
    """How the processes of a run log, and what the writer of their logs keeps."""

    run: str = ""
    """Name of the run; empty outside of one."""
    level: LogLevel = "info"
    """Least level that is written."""
    format: LogFormat = "text"
    mark: str = ""
    """Secret word that begins each line of a record on stderr, so that no text can pass for one.
    Empty where nothing reads stderr but a person."""
    log: str = ""
    """File of the child, and of all that it starts."""
    process: str = ""
    """Name of the child in lines that no logger wrote."""
    pipe: int = 0
    """Inode of the child's stderr, by which it knows what the launcher reads."""

    @classmethod
    def current(cls) -> LogSettings:
        """What the launcher told this process; the defaults when there is no launcher."""
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return cls(**json.loads(os.environ[LOG_VARIABLE]))
        return cls()

    def as_text(self) -> str:
        return json.dumps(asdict(self))


class RecordHandler(logging.Handler):
    """Writes each record in one piece to stderr; owns the step that this process is at."""

    def __init__(
        self, process: str, settings: LogSettings, *, names_children: bool = False
    ) -> None:
        """`names_children` adds the name that multiprocessing gave to a process below."""
        super().__init__()
        self._process = process
        self._settings = settings
        self._names_children = names_children
        self._hide = SecretFilter(os.environ)
        self.step: int | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; a stderr that is closed or full loses it and stops nothing."""
        try:
            values = self._values(record)
        except Exception:  # a mistake such as "%d" % "x" must not end the process that logs
            self.handleError(record)
            return
        text = render(values, self._settings.format)
        with contextlib.suppress(OSError, ValueError):
            if mark := self._settings.mark:
                marked = "".join(f"{mark}{line}\n" for line in text.split("\n"))
                _write_all(_STDERR, marked.encode(errors="backslashreplace"))
            else:
                sys.stderr.write(self._hide(text.encode(errors="replace")).decode() + "\n")
                sys.stderr.flush()

    def _values(self, record: logging.LogRecord) -> dict[str, Any]:
        process, child = self._process, record.processName
        if self._names_children and child not in {None, "MainProcess"}:
            process = f"{process}/{child}"
        values: dict[str, Any] = {
            "time": stamp(record.created),
            "level": record.levelname,
            "run": self._settings.run,
            "process": process,
            "pid": record.process,
            "step": self.step,
            "logger": record.name,
            "message": bounded(record.getMessage(), MAX_CHARACTERS),
        }
        if record.exc_info and record.exc_info[0] is not None:
            told = "".join(traceback.format_exception(*record.exc_info))
            values["exception"] = bounded(told.rstrip(), MAX_CHARACTERS)
        return values


def configure_logging(
    process: str, settings: LogSettings | None = None, *, names_children: bool = False
) -> RecordHandler:
    """Send this process's records to stderr, as the launcher of the run wants them."""
    chosen = settings or LogSettings.current()
    handler = RecordHandler(process, chosen, names_children=names_children)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    level = logging.getLevelNamesMapping()[chosen.level.upper()]
    root.setLevel(level)
    for names, least in ((_QUIET, logging.WARNING), (_QUIET_WHEN_DEBUGGING, logging.INFO)):
        for name in names:
            logging.getLogger(name).setLevel(max(level, least))
    return handler


def engine_handler() -> RecordHandler:
    """The handler of each process of vLLM, which names it in `inference/engine/logging.json`.

    Without a launcher, as in `gradus serve`, the engine's own processes only warn.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, RecordHandler):
            return handler
    settings = LogSettings.current()
    if not settings.mark:
        settings = replace(settings, level="warning")
    return configure_logging("inference", settings, names_children=True)


def note_step(step: int) -> None:
    """Let each further record of this process name a step.

    Of the trainer the step that it trains; of the orchestrator the one whose batch is filled; of
    others the policy version that they serve or play.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, RecordHandler):
            handler.step = step


def render(values: Mapping[str, Any], log_format: LogFormat) -> str:
    return as_json(values) if log_format == "json" else as_text(values)


def as_json(values: Mapping[str, Any]) -> str:
    """One line of JSON in which nothing can drive a terminal.

    >>> as_json({"message": "\x1b[2J\u202e"})
    '{"message": "\\\\u001b[2J\\\\u202e"}'
    """
    text = _ENCODER.encode(values)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def as_text(values: Mapping[str, Any]) -> str:
    """The lines of a record for a person, of which only the first looks like a record.

    >>> record = {"time": "2026-11-22T14:15:52.123Z", "level": "INFO", "run": "demo"}
    >>> as_text(record | {"process": "trainer", "step": 3, "logger": "gradus.x", "message": "a"})
    '2026-11-22T14:15:52.123Z INFO demo trainer step=3 gradus.x: a'
    """
    step = values.get("step")
    words = [
        *(values["time"], values["level"], values.get("run") or "", values["process"]),
        *("" if step is None else f"step={step}", values.get("logger") or ""),
    ]
    head = " ".join(printable(word) for word in words if word)
    first, *more = str(values["message"]).split("\n")
    more += values["exception"].split("\n") if values.get("exception") else []
    lines = [f"{head}: {printable(first)}", *(f"{CONTINUED}{printable(line)}" for line in more)]
    return "\n".join(lines)


def stamp(seconds: float) -> str:
    """A time as every line of every log has it: UTC, to the millisecond.

    >>> stamp(0.0625)
    '1970-01-01T00:00:00.062Z'
    """
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"


def end_quietly() -> None:
    """Close stderr behind Python's own last word; call it before other exit handlers register.

    Compiled libraries list there what they did not free, dozens of lines behind the story.
    """
    atexit.register(_close_stderr)


def _close_stderr() -> None:
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)


def get_logger(name: str) -> logging.Logger:
    """The logger of one module; pass `__name__`."""
    return logging.getLogger(name)


_KEPT = "\n\t\u200c\u200d"
"""What is no printable character and drives no terminal; the last two join letters of scripts."""


def printable(text: str) -> str:
    """The text with every character escaped that could drive a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text)


def shown_text(text: str) -> str:
    """Text of several lines that cannot drive a terminal; spaces and joined letters stay."""
    return "".join(
        c if c in _KEPT or unicodedata.category(c) == "Zs" else printable(c)
        for c in text.replace("\r\n", "\n")
        if c != "\r"
    )


def bounded(text: str, limit: int) -> str:
    """A text's beginning and end.

    >>> bounded("a" * 200, 100)[29:65]
    'a … 137 characters left out … aaaaaa'
    """
    if len(text) <= limit:
        return text
    kept = max(2, limit - 37)
    half = kept // 2
    gap = f" … {len(text) - 2 * half:,} characters left out … "
    return f"{text[:half]}{gap}{text[-half:]}"


def _write_all(descriptor: int, line: bytes) -> None:
    """Write a line; a program that shares the descriptor may have made it non-blocking."""
    while line:
        try:
            line = line[os.write(descriptor, line) :]
        except BlockingIOError:
            if not select.select((), (descriptor,), (), _WRITE_SECONDS)[1]:
                return
