"""What every process of verifiers' pool does before it serves."""

from __future__ import annotations

import os

from gradus.log import configure_logging


def prepare_worker(name: str) -> None:
    """Send this process's log lines to stderr, marked with the source and the pid."""
    configure_logging(f"env_{name}[{os.getpid()}]")
