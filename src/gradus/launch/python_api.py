"""What a script or a notebook does with runs: start one and read what it wrote.

`gradus.load_run`, `gradus.train`, `gradus.LoadedRun` and `gradus.RunCheckpoint` are these.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

from gradus.config import RunConfig, SftConfig, load_config, top_level_keys
from gradus.errors import ConfigError, ExitCode, ProcessError, RunDirectoryError, refuse
from gradus.launch.job import job_of
from gradus.launch.launch import launch
from gradus.plan.machine import check
from gradus.run.checkpoints import CheckpointStore
from gradus.run.episodes import episode_files
from gradus.run.json_lines import read_objects
from gradus.run.lease import MARKER_NAME
from gradus.run.paths import RunDirectory
from gradus.run.records import read_records

INTERRUPTED = 130
"""What a run returns that Ctrl-C ended."""


@dataclass(frozen=True)
class RunCheckpoint:
    """One committed checkpoint."""

    step: int
    """Updates that its weights contain."""
    path: Path
    """Its folder; `gradus export` makes a model of it."""


@dataclass(frozen=True)
class LoadedRun:
    """Reads the folder of a run, finished or not; writes nothing.

    >>> run = load_run("runs/demo")  # doctest: +SKIP
    >>> run.metrics()[-1]["episode/reward/mean"]  # doctest: +SKIP
    0.84
    """

    path: Path
    """The run's folder."""

    @property
    def model(self) -> Path | None:
        """The folder of the final model; None as long as there is none."""
        folder = RunDirectory(self.path).model
        return folder if (folder / "config.json").is_file() else None

    @overload
    def metrics(self, *, frame: Literal[False] = False) -> list[dict[str, float]]: ...
    @overload
    def metrics(self, *, frame: Literal[True]) -> Any: ...
    def metrics(self, *, frame: bool = False) -> Any:
        """One record for each step and each evaluation, in the order in which they were written.

        `step` and `time` (seconds since 1970) stand beside the metrics; a value that was not finite
        is NaN. With `frame` a pandas DataFrame with one column for each key.
        """
        records = read_records(RunDirectory(self.path).metrics)
        rows = [{"step": it.step, "time": it.time, **it.numbers} for it in records]
        return _frame(rows) if frame else rows

    @overload
    def episodes(
        self, *, purpose: Literal["train", "eval"] = ..., frame: Literal[False] = False
    ) -> Iterator[dict[str, Any]]: ...
    @overload
    def episodes(self, *, purpose: Literal["train", "eval"] = ..., frame: Literal[True]) -> Any: ...
    def episodes(self, *, purpose: Literal["train", "eval"] = "train", frame: bool = False) -> Any:
        """The records of the episodes that were trained or evaluated, step by step.

        Read one after the other, since a run may hold more than fits into memory. With `frame` a
        pandas DataFrame; nested values become columns such as `gradus.outcome`.
        """
        rows = self._episodes(purpose)
        return _frame(rows, nested=True) if frame else rows

    def _episodes(self, purpose: Literal["train", "eval"]) -> Iterator[dict[str, Any]]:
        for _, path in episode_files(RunDirectory(self.path), purpose):
            yield from read_objects(path)

    def checkpoints(self) -> list[RunCheckpoint]:
        """The committed checkpoints, oldest first; their files are not checked here."""
        found = CheckpointStore(RunDirectory(self.path), term=0).folders()
        return [RunCheckpoint(step, folder) for step, folder in found]


def load_run(path: str | Path) -> LoadedRun:
    """The run in a folder; RunDirectoryError when gradus made no run there."""
    folder = Path(path)
    if not (folder / MARKER_NAME).is_file():
        raise RunDirectoryError(
            f"{folder} is not the folder of a run; it is <output_dir>/<name>, which `gradus rl` "
            "prints first"
        )
    return LoadedRun(folder)


def train(
    config: str | Path | Mapping[str, Any] | RunConfig | SftConfig,
    *,
    resume: bool = False,
    clean: bool = False,
) -> LoadedRun:
    """Run a config to its end, as `gradus rl` or `gradus sft` does, and load it.

    `config` is a TOML or JSON file, its content as a dict, or a config object. Call it from the
    main thread: Ctrl-C and SIGTERM end the run. Whatever ends it early is raised as a GradusError
    that names the process, its cause and its log; Ctrl-C as KeyboardInterrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("gradus.train handles signals, so call it from the main thread")
    checked = _checked(config)
    if resume and checked.name is None:
        raise ConfigError("resume needs the name of the run: set `name` in the config")
    job = job_of(checked, resume=resume)
    code = launch(job, resume=resume, clean=clean)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    folder = job.output_dir / job.name
    if code != ExitCode.DONE:
        raise ProcessError(f"{folder} was stopped before its end (exit code {code})")
    return load_run(folder)


def _checked(
    config: str | Path | Mapping[str, Any] | RunConfig | SftConfig,
) -> RunConfig | SftConfig:
    """The config as an object that works on this machine, whatever it was given as."""
    if isinstance(config, RunConfig | SftConfig):
        refuse(check(config))
        return config
    values: Mapping[str, Any] = config if isinstance(config, Mapping) else {}
    words = [] if isinstance(config, Mapping) else ["@", str(config)]
    keys = {*values, *top_level_keys(words)}
    if "orchestrator" in keys:
        return load_config(RunConfig, words, check=check, base=values)
    if "data" in keys:
        return load_config(SftConfig, words, check=check, base=values)
    raise ConfigError(
        f"a run has a section 'orchestrator' (rl) or 'data' (sft); there are {sorted(keys)}"
    )


def _frame(rows: Any, *, nested: bool = False) -> Any:
    """A pandas DataFrame; ConfigError without pandas, which gradus itself does not need."""
    if importlib.util.find_spec("pandas") is None:
        raise ConfigError("frame=True needs pandas: pip install pandas")
    pandas = importlib.import_module("pandas")
    return pandas.json_normalize(list(rows)) if nested else pandas.DataFrame(list(rows))
