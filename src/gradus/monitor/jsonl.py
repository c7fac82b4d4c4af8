"""Records as JSON lines: one object with `step`, `time` and the metrics."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gradus.files import DISK_ERRORS, append_whole, storage_error
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
        self.num_lost = 0
        """Records that the disk did not take since the last one that it took."""
        self._clock = clock
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(path, flags, 0o644), "ab", buffering=0)
        self._end_torn_line(path)

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
        """A full or failing disk costs the record; later ones are written when it can again."""
        try:
            append_whole(self._file.fileno(), line)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            if not self.num_lost:
                _LOG.error("step %d is not recorded: %s", step, storage_error(error, self._path))
            self.num_lost += 1
            return
        if self.num_lost:
            _LOG.warning("%d records before step %d are lost", self.num_lost, step)
            self.num_lost = 0

    def close(self) -> None:
        self._file.close()

    def _end_torn_line(self, path: Path) -> None:
        """Keep a line that a crash cut off from swallowing the next record."""
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if file.read(1) not in (b"", b"\n"):
                self._file.write(b"\n")
