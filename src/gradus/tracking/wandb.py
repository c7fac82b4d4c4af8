"""Weights & Biases: one run there for one run here, however often its process is started again."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradus.errors import ConfigError
from gradus.run.paths import GOOD_OUTCOMES
from gradus.run.records import Record
from gradus.tracking.base import EpisodeRow, RunOutcome, TrackedRun, library

_FILE_FLUSH_SECONDS = 0.25
_OPEN_SECONDS = 60.0
_FINISH_SECONDS = 60.0


class Wandb:
    """One run at Weights & Biases, with the id of the run here.

    W&B confirms nothing during a run, and its service sends in the background. Each line has a
    number, which is its step at W&B, and the mark says how many there were: so a line that W&B
    has already is not sent again. Our own steps are a metric, `step`, which is the axis of all
    others; steps that are done again after a resume are added, because W&B takes nothing back.
    """

    def __init__(self, *, project: str, entity: str | None, mode: str | None) -> None:
        self._project = project
        self._entity = entity
        self._mode = mode or os.environ.get("WANDB_MODE") or "online"
        self._library = _library()
        self._run: Any = None
        self._num_lines = 0

    def open(self, run: TrackedRun) -> None:
        """Find or make the run there."""
        folder = Path(os.environ.get("WANDB_DIR") or run.own_folder).absolute()
        folder.mkdir(parents=True, exist_ok=True)
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
        self._num_lines = int(run.mark or 0)
        self.shown_by = f"offline files in {folder}" if self._run.offline else self._run.url

    def log(self, record: Record) -> None:
        self._send({"step": record.step, "_timestamp": record.time, **record.numbers})

    def log_episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        texts = [asdict(row) for row in rows]
        data = [list(row.values()) for row in texts]
        table = self._library.Table(columns=list(texts[0]), data=data)
        self._send({"step": step, f"episodes/{rows[0].purpose}": table})

    def alert(self, title: str, text: str, step: int) -> None:
        del step  # It stands in the text.
        self._run.alert(title=title, text=text, level="WARN", wait_duration=0.001)

    def flush(self) -> str:
        """The service is alive and has all; offline its file is written too."""
        _ = self._run.step  # Asks the service, which answers after all that came before.
        if self._run.offline:
            time.sleep(2 * _FILE_FLUSH_SECONDS)
        return str(self._num_lines)

    def close(self, outcome: RunOutcome) -> None:
        """Wait until W&B has everything, say how the run ended, and end the service."""
        try:
            if self._run is not None:
                self._run.finish(exit_code=0 if outcome in GOOD_OUTCOMES else 1)
        finally:
            self._library.teardown()

    def _send(self, line: Mapping[str, Any]) -> None:
        if self._num_lines >= self._run.starting_step:
            self._run.log(line, step=self._num_lines, commit=True)
        self._num_lines += 1

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


def _library() -> Any:
    """The package, which reports no errors to its makers."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    return library("wandb")
