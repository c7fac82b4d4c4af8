"""Logs: one line per event, control characters escaped, to stderr (which the launcher files)."""

from __future__ import annotations

import atexit
import logging
import os
import sys


class _SafeFormatter(logging.Formatter):
    """Escapes control characters, so that model output cannot drive a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if text.isprintable():
            return text
        return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def configure_logging(process: str, *, level: int = logging.INFO) -> None:
    """Send this process's log lines to stderr as `time level process logger: message`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _SafeFormatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("httpx", "httpcore", "openai", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def end_quietly() -> None:
    """Close stderr behind Python's own last word; call it before other exit handlers register.

    Compiled libraries list there what they did not free, dozens of lines behind the story.
    """
    atexit.register(_close_stderr)


def _close_stderr() -> None:
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def get_logger(name: str) -> logging.Logger:
    """The logger of one module; pass `__name__`."""
    return logging.getLogger(name)
