"""A tracker is a place where people look at numbers: a folder of event files, a server, a page.

The follower (`follow/`) reads the files of a run and drives one tracker at a time through

    open ──► (log | log_episodes)* ──► flush ──► ... ──► close

from one thread. Any exception means that nothing since the last `flush` is safe: the follower drops
the object, waits, makes a new one from the same options and continues after the last `flush`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Protocol

from gradus.errors import ConfigError
from gradus.run.paths import RunDirectory
from gradus.run.records import Record

RunOutcome = Literal["done", "solved", "stalled", "alarmed", "failed", "interrupted", "unknown"]
"""How a run ended; `unknown` where it was killed, or still runs."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows."""

    id: str
    """Hex digits that belong to this run alone; the same after a resume, a move and a restart."""
    name: str
    """The run's name; two runs may share it."""
    kind: str
    """The command that made it: `rl`, `sft`, `eval` or `replay`."""
    folder: Path
    """The folder of the run."""
    config: Mapping[str, Any]
    """What the user wrote with all defaults, as JSON values, without anything secret."""
    code_version: str
    """Version of gradus, and the commit where it is known."""
    packages: Mapping[str, str]
    """Library → version."""
    group: str | None = None
    """Runs that belong together, as the config says."""
    tags: tuple[str, ...] = ()
    """Words to find the run by, as the config says."""
    resume_step: int | None = None
    """The run went back: all records of this step and later that the tracker has are void. Those
    that still hold come again, then new ones. None means that everything that it has stays."""
    mark: str | None = None
    """What the last `flush` gave, also of an earlier process. None before the first one."""
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    """Patterns of names of metrics, as the config says."""
    tracker: str = "tracker"
    """What the config calls this tracker; two of one type have two names."""

    def chosen(self, record: Record) -> Record:
        """The record with those metrics alone that this tracker is to get."""

        def is_chosen(name: str) -> bool:
            is_in = any(fnmatchcase(name, it) for it in self.include)
            return is_in and not any(fnmatchcase(name, it) for it in self.exclude)

        if self.include == ("*",) and not self.exclude:
            return record
        metrics = {name: value for name, value in record.metrics.items() if is_chosen(name)}
        non_finite = tuple(filter(is_chosen, record.non_finite))
        return replace(record, metrics=metrics, non_finite=non_finite)

    @property
    def own_folder(self) -> Path:
        """A folder inside the run's that belongs to this tracker alone; may not exist yet."""
        return RunDirectory(self.folder).trackers / self.tracker


@dataclass(frozen=True)
class EpisodeRow:
    """One sample episode, for a table that a person reads. Texts are cut to a bounded length."""

    episode: str
    """Its id in the journal and the episode files. Empty where those give none."""
    source: str
    task: str
    """Key of the task."""
    prompt: str
    reply: str
    reward: float | None
    """None for an episode that failed, and for a reward that is not finite."""
    advantage: float | None
    """Mean over its traces that got credit. None when none did."""
    purpose: Literal["train", "eval"] = "train"
    """What it was played for; all rows of one table were played for the same."""


def library(name: str) -> Any:
    """The package of a tracker; ConfigError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the tracker {name!r} needs a package: pip install 'gradus-rl[{name}]'"
        ) from error


class Tracker(Protocol):
    """One place where numbers go; built from the options in its table of the config.

    An attribute `shown_by`, if `open` sets one, says where to look: a command, an address or a
    folder. The console of the run says it once. A method `alert(title, text, step)`, if there is
    one, hears of each alarm that begins or is over, after the record that says so.
    """

    def open(self, run: TrackedRun) -> None:
        """Find or make the run there. Called once, before anything else."""

    def log(self, record: Record) -> None:
        """Take one record; may return before it is safe."""

    def log_episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        """Take sample episodes of a step, or of an evaluation, after its record."""

    def flush(self) -> str | None:
        """Return when everything that was logged is safe, or raise.

        What it returns is kept together with the note of what was sent, and comes back as
        `TrackedRun.mark`: for what a tracker must know to continue exactly. None needs nothing.
        """

    def close(self, outcome: RunOutcome) -> None:
        """Let go of files, threads and connections; the last call.

        At the end of the run it comes after a `flush` and says how the run ended. After an error,
        even one of `open`, it says `unknown`, and what no `flush` confirmed is sent again.
        """
