"""A recorded run, read and checked as a whole before anything of its replay exists."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradus.errors import ConfigError, CorruptStateError
from gradus.files import read_json
from gradus.orchestrator.records.journal import read_journal
from gradus.orchestrator.records.recording import digest_model
from gradus.orchestrator.replay.comparison import learned
from gradus.orchestrator.replay.journal_reader import (
    Decision,
    Decisions,
    GradedGroup,
    read_decisions,
)
from gradus.orchestrator.replay.recorded_episodes import RecordedEpisodes
from gradus.run.lease import MARKER_NAME, read_marker
from gradus.run.paths import RunDirectory
from gradus.run.recording import (
    LaunchRecord,
    RecordedLaunch,
    installed_libraries,
    read_launch,
    recorded_terms,
)


@dataclass(frozen=True)
class RecordedRun:
    """What a replay starts from."""

    run_dir: RunDirectory
    decisions: Decisions
    launches: tuple[RecordedLaunch, ...]
    """Those that its weights come from, oldest first."""

    @property
    def configs(self) -> list[dict[str, Any]]:
        """The config of each launch."""
        return [launch.config for launch in self.launches]

    def check_steps(self, num_steps: int | None) -> int:
        """How many steps are replayed; ConfigError for a run without an end, or too few steps."""
        recorded, trained = self.decisions.num_batches, self.decisions.num_trained
        if num_steps is None and not self.decisions.is_finished:
            raise ConfigError(
                f"{self.run_dir.journal} does not come to an end ({_last_line(self.run_dir)}): the "
                f"run stopped early, still goes on, or the file was cut. Its first {trained} steps "
                f"are complete and {recorded} batches are recorded: replay them with "
                f"--max-steps {trained}"
            )
        if num_steps is not None and not 1 <= num_steps <= recorded:
            raise ConfigError(
                f"--max-steps {num_steps}: {self.run_dir.root} recorded {recorded} batches; use 1 "
                f"to {recorded}"
            )
        return trained if num_steps is None else num_steps

    def check_episodes(self, num_steps: int) -> int:
        """Read every byte that these steps need; the number of episodes. CorruptStateError names
        what is missing or damaged."""
        with RecordedEpisodes(self.run_dir, self.decisions.terms, check=True) as episodes:
            needed = [
                episode
                for group in _groups(self.decisions.first(num_steps))
                for episode in group.episodes
            ]
            episodes.require(needed)
        return len(needed)

    def check_model(self, name: str) -> None:
        """ConfigError unless the initial weights are, file by file, those of the recorded run."""
        path = LaunchRecord(self.run_dir, self.launches[0].term).model
        try:
            recorded = read_json(path)
        except FileNotFoundError:
            raise CorruptStateError(
                f"{path} is missing, so nobody can tell whether {name!r} still holds the initial "
                "weights; the run stopped before it was written, or it was deleted"
            ) from None
        if not isinstance(recorded, dict):
            raise CorruptStateError(f"{path} does not list the files of a model; restore it")
        found = digest_model(name)
        if not found:
            raise ConfigError(
                f"model.name = {name!r} of the recorded run is not here (seen from {Path.cwd()}); "
                "start in the folder where the run was started, or put the model back"
            )
        if recorded and (odd := sorted(n for n, d in recorded.items() if found.get(n) != d)):
            raise ConfigError(
                f"model {name!r} is not what the run started from: {', '.join(odd)} changed; put "
                "the recorded model back"
            )

    def changed_libraries(self) -> list[str]:
        """A line for each library whose version is not that of the recorded run."""
        now = installed_libraries()
        was = self.launches[-1].libraries
        return [
            f"{name} was {was.get(name)} and is {now.get(name)}"
            for name in sorted(was.keys() | now.keys())
            if was.get(name) != now.get(name)
        ]


def open_recorded_run(root: Path) -> RecordedRun:
    """The run in a directory; refuses one without a journal, without records or without a batch.

    ConfigError when it is no recorded run, CorruptStateError when something of it is damaged.
    """
    run_dir = RunDirectory(root)
    marker = read_marker(run_dir)
    if marker is None or marker.kind != "rl" or not run_dir.journal.is_file():
        raise ConfigError(
            f"{root} holds no reinforcement-learning run: it has no {MARKER_NAME} of such a run or "
            f"no {run_dir.journal.name}; name the folder of a run"
        )
    if not recorded_terms(run_dir):
        raise ConfigError(
            f"{run_dir.replay} holds no records, so {root.name} cannot be replayed; the run was "
            "made with orchestrator.recording = false, or they were deleted"
        )
    decisions = read_decisions(read_journal(run_dir.journal))
    if decisions.num_batches == 0:
        raise ConfigError(f"{root} made no batch, so there is nothing to replay")
    launches = tuple(read_launch(run_dir, term) for term in decisions.terms)
    return RecordedRun(run_dir, decisions, launches)


def read_learned(metrics: Path) -> dict[int, Mapping[str, float]]:
    """Step → learning metrics of a run's `metrics.jsonl`; empty when there is none."""
    found: dict[int, dict[str, float]] = {}
    for record in _records(metrics):
        numbers = {k: v for k, v in record.items() if isinstance(v, int | float)}
        found.setdefault(int(record["step"]), {}).update(learned(numbers))
    return dict(found)


def _records(metrics: Path) -> Iterator[dict[str, Any]]:
    if not metrics.is_file():
        return
    for line in metrics.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # A kill cut it off.
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield record


def _groups(decisions: tuple[Decision, ...]) -> Iterator[GradedGroup]:
    return (decision for decision in decisions if isinstance(decision, GradedGroup))


def _last_line(run_dir: RunDirectory) -> str:
    lines = run_dir.journal.read_bytes().split(b"\n")
    if lines[-1]:
        return f"line {len(lines)} is cut off"
    return f"line {len(lines) - 1} is the last and not `run_ended`"
