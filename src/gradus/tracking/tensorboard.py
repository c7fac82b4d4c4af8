"""Event files for TensorBoard, written with its own protocol buffers; neither torch nor TensorFlow
is loaded.

A folder has one file per connection, numbered. What `flush` confirmed is named by file and size, so
whatever a kill left behind it is cut off at the next start: no point stands there twice.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from gradus.errors import ConfigError
from gradus.files import DurableFiles
from gradus.run.records import Record
from gradus.run.settings import leaves
from gradus.tracking.base import EpisodeRow, RunOutcome, TrackedRun

_FILE = re.compile(r"events\.out\.tfevents\.(\d{10})\..+\.gradus")
_MAX_TEXT_CHARACTERS = 100_000
_DIGEST = re.compile("[0-9a-f]{32,}")


class TensorBoard:
    """The event files of one run."""

    def __init__(self, folder: str | None = None) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb
            from tensorboard.plugins.text.summary_v2 import text_pb
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise ConfigError(
                f"the tracker 'tensorboard' needs a library that cannot be imported ({error}); "
                "install gradus-rl[tensorboard]"
            ) from error
        self._folder = folder
        self._events: Any = event_pb2
        self._summary: Any = summary_pb2.Summary
        self._hparams: Any = hparams_pb
        self._text: Any = text_pb
        self._record_writer: Any = RecordWriter
        self._file: BinaryIO | None = None
        self._writer: Any = None

    def open(self, run: TrackedRun) -> None:
        """A new file behind those that are confirmed."""
        folder = run.own_folder
        if self._folder is not None:
            # Two runs may have the same name, and one run two trackers of this type.
            own = "" if run.tracker == "tensorboard" else f"-{run.tracker}"
            folder = Path(self._folder).expanduser() / f"{run.name}-{run.id[:8]}{own}"
        folder.mkdir(parents=True, exist_ok=True)
        self.shown_by = f"tensorboard --logdir {shlex.quote(str(folder))}"
        newest = _cut_to_mark(folder, run.mark)
        name = f"events.out.tfevents.{newest + 1:010d}.{socket.gethostname()}.gradus"
        self._file = (folder / name).open("xb")
        DurableFiles().sync(folder)
        self._writer = self._record_writer(self._file)
        # Without a version of the format TensorBoard ignores a restart.
        self._write(self._events.Event(wall_time=time.time(), file_version="brain.Event:2"))
        if run.resume_step is not None:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(
                self._events.Event(wall_time=time.time(), step=run.resume_step, session_log=start)
            )
        self._write_about(run)

    def log(self, record: Record) -> None:
        """One event; NaN marks what was not finite."""
        kind = self._summary.Value
        values = [kind(tag=name, simple_value=number) for name, number in record.numbers.items()]
        self._write_summary(self._summary(value=values), step=record.step, at=record.time)

    def log_episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        """A table on the page "Text"."""
        cells = [["reward", "advantage", "prompt", "reply", "source", "task"]]
        for row in rows:
            numbers = [_number(row.reward), _number(row.advantage)]
            texts = [_as_block(row.prompt), _as_block(row.reply)]
            cells.append([*numbers, *texts, row.source, _narrow(row.task)])
        self._write_summary(self._text(f"episodes/{rows[0].purpose}", cells), step=step)

    def flush(self) -> str:
        """On the disk; the mark says up to where."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        return json.dumps({"file": Path(self._file.name).name, "size": self._file.tell()})

    def close(self, outcome: RunOutcome) -> None:  # noqa: ARG002  the protocol's word
        if self._file is not None:
            self._file.close()

    def _write_about(self, run: TrackedRun) -> None:
        about: dict[str, Any] = {
            "kind": run.kind,
            "code": run.code_version,
            "packages": dict(run.packages),
        }
        about |= {"group": run.group, "tags": list(run.tags)}
        for tag, value in {"run/config": run.config, "run/about": about}.items():
            text = _as_block(json.dumps(value, indent=1)[:_MAX_TEXT_CHARACTERS])
            self._write_summary(self._text(tag, [text]), step=0)
        # For the page "HParams", where runs are compared by their configs.
        settings = {
            key: value if isinstance(value, int | float) else str(value)[:200]
            for key, value in leaves(run.config)
            if value is not None
        }
        self._write_summary(self._hparams(settings, trial_id=run.group or run.id), step=0)

    def _write_summary(self, summary: Any, *, step: int, at: float | None = None) -> None:
        at = time.time() if at is None else at
        self._write(self._events.Event(wall_time=at, step=step, summary=summary))

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())


def _cut_to_mark(folder: Path, mark: str | None) -> int:
    """Remove what no flush confirmed; returns the number of the newest file that is left."""
    confirmed = {} if mark is None else json.loads(mark)
    newest = _number_of(confirmed.get("file", "")) or 0
    for path in folder.iterdir():
        number = _number_of(path.name)
        if number is not None and number > newest:
            path.unlink()
        elif number == newest and number and path.stat().st_size > confirmed["size"]:
            os.truncate(path, confirmed["size"])
    return newest


def _number_of(name: str) -> int | None:
    match = _FILE.fullmatch(name)
    return int(match[1]) if match else None


def _narrow(key: str) -> str:
    """A key that is a digest, as its first digits: in full it takes the place of the texts."""
    return f"{key[:12]}…" if _DIGEST.fullmatch(key) else key


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _as_block(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()) or " "
