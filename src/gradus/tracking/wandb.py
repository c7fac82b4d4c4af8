"""Weights & Biases: one run there for one run here, however often its process is started again."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from gradus.errors import ConfigError
from gradus.files import append_whole
from gradus.run.json_lines import read_objects
from gradus.run.paths import GOOD_OUTCOMES
from gradus.run.records import Record
from gradus.tracking.base import EpisodeRow, RunOutcome, TrackedRun, library

_FILE_FLUSH_SECONDS = 0.25
_OPEN_SECONDS = 60.0
_FINISH_SECONDS = 60.0


class Wandb:
    """One run at Weights & Biases, with the id of the run here.

    W&B confirms nothing during a run, and its service sends in the background. So each line
    goes into an outbox in the run's folder first, and its number there is its step at W&B: a line
    that W&B has already is not sent again, and what it lacks at the next `open` is sent then. Our
    own steps are a metric, `step`, which is the axis of all others; steps that are done again after
    a resume are added, because W&B takes nothing back.
    """

    def __init__(self, *, project: str, entity: str | None, mode: str | None) -> None:
        self._project = project
        self._entity = entity
        self._mode = mode or os.environ.get("WANDB_MODE") or "online"
        self._library = _library()
        self._run: Any = None
        self._outbox: Outbox

    def open(self, run: TrackedRun) -> None:
        """Find or make the run there, and send what the outbox holds and W&B lacks."""
        folder = Path(os.environ.get("WANDB_DIR") or run.own_folder).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        self._outbox = Outbox(run.own_folder / "outbox.jsonl")
        # Here rather than in the caller's home.
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "wandb" / "cache"))
        os.environ.setdefault("WANDB_DATA_DIR", str(folder / "wandb" / "data"))
        self._library.teardown()  # Of a connection that was given up while it hung.
        if self._mode == "online" and not self._library.login(prompt=False, verify=False):
            raise ConfigError(
                "Weights & Biases has no key here: run `wandb login`, set WANDB_API_KEY, or give "
                'the tracker mode = "offline"'
            )
        self._run = self._start(run, folder)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        known = int(run.mark or 0) if self._run.offline else self._run.starting_step
        for index, line in self._outbox.lines(known):
            self._send(index, line)
        self.shown_by = f"offline files in {folder}" if self._run.offline else self._run.url

    def log(self, record: Record) -> None:
        self._put(line_of(record))

    def log_episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        texts = [asdict(row) for row in rows]
        self._put({"step": step, "episodes": texts})

    def alert(self, title: str, text: str, step: int) -> None:
        del step  # It stands in the text.
        self._run.alert(title=title, text=text, level="WARN", wait_duration=0.001)

    def flush(self) -> str:
        """The outbox is on disk, and the service alive; offline its file is written too."""
        self._outbox.sync()
        _ = self._run.step  # Asks the service, which answers after all that came before.
        if self._run.offline:
            time.sleep(2 * _FILE_FLUSH_SECONDS)
        return str(self._outbox.length)

    def close(self, outcome: RunOutcome) -> None:
        """Wait until W&B has everything, say how the run ended, and end the service."""
        try:
            if self._run is not None:
                self._run.finish(exit_code=0 if outcome in GOOD_OUTCOMES else 1)
        finally:
            self._library.teardown()

    def _put(self, line: Mapping[str, Any]) -> None:
        index = self._outbox.append(line)
        if index is not None:
            self._send(index, line)

    def _send(self, index: int, line: Mapping[str, Any]) -> None:
        values = {"step": line["step"]}
        if "episodes" in line:
            rows = line["episodes"]
            columns = list(rows[0])
            data = [list(row.values()) for row in rows]
            table = self._library.Table(columns=columns, data=data)
            values[f"episodes/{rows[0]['purpose']}"] = table
        else:
            values |= {"_timestamp": line["time"], **line["metrics"]}
            values |= dict.fromkeys(line["non_finite"], math.nan)
        self._run.log(values, step=index, commit=True)

    def _start(self, run: TrackedRun, folder: Path) -> Any:
        settings = self._library.Settings(
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            x_transaction_log_flush_interval=_FILE_FLUSH_SECONDS,
            allow_val_change=True,
            symlink=False,
            init_timeout=_OPEN_SECONDS,
            finish_timeout=_FINISH_SECONDS,
            finish_timeout_raises=True,
        )
        return self._library.init(
            project=self._project,
            entity=self._entity,
            mode=self._mode,
            id=run.id,
            name=run.name,
            group=run.group,
            tags=list(run.tags) or None,
            job_type=run.kind,
            config={
                **run.config,
                "gradus_version": run.code_version,
                "packages": dict(run.packages),
            },
            resume="allow",
            dir=str(folder),
            settings=settings,
        )


class Outbox:
    """Every line that was ever handed to W&B, in order, in a file that only grows.

    A line that is in it already is refused: the follower repeats what it saw no `flush` of.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        path.touch()
        self._cut_torn_line()
        with path.open("rb") as file:  # a line is what `_text` made of it, and not parsed again
            self._known = {_digest(line.rstrip(b"\n")) for line in file}
        self.length = len(self._known)
        """Lines so far."""

    def append(self, line: Mapping[str, Any]) -> int | None:
        """The number of the line, which is now in the file; None when it was there before."""
        text = _text(line)
        if _digest(text) in self._known:
            return None
        with self._path.open("ab", buffering=0) as file:
            append_whole(file.fileno(), text + b"\n")
        self._known.add(_digest(text))
        self.length += 1
        return self.length - 1

    def lines(self, first: int) -> Iterator[tuple[int, dict[str, Any]]]:
        return enumerate(islice(read_objects(self._path), first, None), first)

    def sync(self) -> None:
        with self._path.open("rb") as file:
            os.fsync(file.fileno())

    def _cut_torn_line(self) -> None:
        """A line that a kill cut off was not sent: the follower brings it again."""
        whole = self._path.read_bytes().rpartition(b"\n")
        os.truncate(self._path, len(whole[0]) + len(whole[1]))


def line_of(record: Record) -> dict[str, Any]:
    return {
        "step": record.step,
        "time": record.time,
        "metrics": dict(record.metrics),
        "non_finite": list(record.non_finite),
    }


def _text(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, allow_nan=False).encode()


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _library() -> Any:
    """The package, which reports no errors to its makers."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    return library("wandb")
