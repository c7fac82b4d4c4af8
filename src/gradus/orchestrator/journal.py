"""One append-only record of every decision and outcome, one JSON object per line.

It is what resume, replay and the conservation check read. A line counts once its newline is there:
a torn last line is not an event.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from gradus.errors import CorruptStateError


class JournalEvent(StrEnum):
    """What a line can say."""

    RUN_STARTED = "run_started"
    GROUP_OPENED = "group_opened"
    EPISODE_STARTED = "episode_started"
    EPISODE_RETRIED = "episode_retried"
    EPISODE_ENDED = "episode_ended"
    GROUP_DROPPED = "group_dropped"
    GROUP_ABANDONED = "group_abandoned"
    TASK_RETURNED = "task_returned"
    SAMPLES_DROPPED = "samples_dropped"
    BATCH_SHIPPED = "batch_shipped"
    BATCH_RECEIVED = "batch_received"
    STEP_FINISHED = "step_finished"
    POLICY_APPLIED = "policy_applied"
    EVALUATION_STARTED = "evaluation_started"
    EVALUATION_ENDED = "evaluation_ended"
    RUN_ENDED = "run_ended"


class Journal:
    """Owns the open file; each line carries the epoch of the writer's lease.

    >>> with Journal(path, epoch=1, now=time.time) as journal:  # doctest: +SKIP
    ...     journal.write(JournalEvent.GROUP_OPENED, group="g0", size=4)
    """

    def __init__(self, path: Path, *, epoch: int, now: Callable[[], float]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(_whole_bytes(path))
        self._epoch = epoch
        self._now = now
        self._encoder = msgspec.json.Encoder()

    def write(self, event: JournalEvent, **fields: Any) -> None:
        """Append one line; it is with the operating system when this returns."""
        record = {"event": event, "time": self._now(), "epoch": self._epoch, **fields}
        self._file.write(self._encoder.encode(record) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _whole_bytes(path: Path) -> int:
    """Size up to the end of the last whole line."""
    return path.read_bytes().rfind(b"\n") + 1


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Every whole line; refuses a line in the middle that is not JSON."""
    lines = path.read_bytes().split(b"\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            records.append(msgspec.json.decode(line))
        except msgspec.DecodeError as error:
            raise CorruptStateError(f"{path} line {number} is not JSON ({error})") from error
    return records
