"""`live.json` of a run: the numbers of this moment, for whoever looks between two records."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

LIVE_SECONDS = 1.0
"""Between two looks at the run."""


class LiveNumbers(msgspec.Struct, frozen=True):
    """One look at a run.

    A name whose last part is `total` counts over all launches of the run and never falls, except
    the engine's, which count from the engine's start. Every other number is of this moment.
    """

    time: float
    """Unix seconds."""
    term: int
    """Of the launch that looked."""
    numbers: dict[str, float]


def write_live(path: Path, numbers: Mapping[str, float], *, term: int) -> None:
    """Replace the file in one step; not forced to the disk, for the next look follows at once."""
    content = msgspec.json.encode(LiveNumbers(round(time.time(), 3), term, dict(numbers)))
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)


def read_live(path: Path) -> LiveNumbers | None:
    """The last look; None when there was none or the file is damaged."""
    try:
        if not path.is_file():  # A pipe would be waited for.
            return None
        return msgspec.json.decode(path.read_bytes(), type=LiveNumbers)
    except (OSError, ValueError):
        return None
