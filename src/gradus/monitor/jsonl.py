"""Records as JSON lines: one object with `step`, `time` and the metrics."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gradus.files import DISK_ERRORS, PatientLines, storage_error
from gradus.log import get_logger
from gradus.run.records import RESERVED_KEYS

_LOG = get_logger(__name__)


class JsonlMonitor:
    """Appends one line per record; a line is written whole or, after a crash, cut off once.

    A value that is not finite becomes null and its key is listed under `non_finite`.

    >>> JsonlMonitor(path).record({"loss/total/mean": 0.5}, step=0)  # doctest: +SKIP
    {"step": 0, "time": 1767225600.0, "loss/total/mean": 0.5}
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(path, flags, 0o644), "ab", buffering=0)
        self._end_torn_line(path)
        self._lines = PatientLines(self._file.fileno())

    def record(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append one line; refuses a metric with a reserved name."""
        wrong = [key for key in RESERVED_KEYS if key in metrics]
        if wrong:
            raise ValueError(f"metric {wrong[0]!r} has the name of a field of the record")
        finite = {k: float(v) if math.isfinite(v) else None for k, v in metrics.items()}
        line: dict[str, object] = {"step": step, "time": round(self._clock(), 3), **finite}
        non_finite = [key for key, value in finite.items() if value is None]
        if non_finite:
            line["non_finite"] = non_finite
        self._append(json.dumps(line, allow_nan=False).encode() + b"\n", step)

    def _append(self, line: bytes, step: int) -> None:
        """What a full or failing disk does not take is written once it can be."""
        was_waiting = self._lines.num_waiting > 0
        try:
            self._lines.add(line)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            if not was_waiting:
                waits = storage_error(error, self._path)
                _LOG.error("the record of step %d waits in memory: %s", step, waits)

    def close(self) -> None:
        try:
            self._lines.flush()
        except OSError as error:
            lost = storage_error(error, self._path)
            _LOG.error("%d records are lost: %s", self._lines.num_waiting, lost)
        self._file.close()

    def _end_torn_line(self, path: Path) -> None:
        """Keep a line that a crash cut off from swallowing the next record."""
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if file.read(1) not in (b"", b"\n"):
                self._file.write(b"\n")
