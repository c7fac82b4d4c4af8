"""A recorded run, read and checked as a whole before its replay begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gradus.errors import ConfigError, CorruptStateError
from gradus.files import read_json
from gradus.orchestrator.records.journal import read_journal
from gradus.orchestrator.records.recording import PlayedState, digest_model, load_played
from gradus.orchestrator.types import PlayedEpisode
from gradus.run.lease import MARKER_NAME, read_marker
from gradus.run.paths import RunDirectory
from gradus.run.recording import (
    EpisodeEntry,
    LaunchRecord,
    RecordedLaunch,
    installed_libraries,
    iter_entries,
    read_body,
    read_launch,
    recorded_terms,
)
from gradus.run.records import read_records
from gradus.wire.codec import decode
from gradus_lab.replay.journal_reader import (
    Decision,
    Decisions,
    GradedGroup,
    RecordKey,
    read_decisions,
)

LEARNED = ("loss/", "optimizer/")
"""Metrics that follow from weights and batch alone, not from time."""
_SHOWN_IDS = 3


class RecordedEpisodes(AbstractContextManager["RecordedEpisodes"]):
    """Owns the open files of all launches; an episode is read when it is asked for."""

    def __init__(self, run_dir: RunDirectory, terms: Iterable[int], *, check: bool = False) -> None:
        """With `check` every byte is compared; CorruptStateError when one changed."""
        self._files: dict[int, BinaryIO] = {}
        self._entries: dict[RecordKey, EpisodeEntry] = {}
        self._records = {term: LaunchRecord(run_dir, term) for term in terms}
        with ExitStack() as stack:
            for term, record in self._records.items():
                self._files[term] = stack.enter_context(_open(record))
                for entry in iter_entries(record.episodes, check=check):
                    self._entries[RecordKey(term, entry.id)] = entry
            self._stack = stack.pop_all()

    def require(self, episodes: Iterable[RecordKey]) -> None:
        """CorruptStateError that counts and names those of `episodes` that are not there."""
        missing = [episode for episode in episodes if episode not in self._entries]
        if missing:
            shown = ", ".join(f"{it.id} of launch {it.term}" for it in missing[:_SHOWN_IDS])
            path = self._records[missing[0].term].episodes
            raise CorruptStateError(
                f"{path} lacks {len(missing)} episodes that the journal names, the first: {shown}; "
                "it was cut off, or the disk was full when the run was recorded"
            )

    def load(self, key: RecordKey) -> PlayedEpisode:
        """One episode as it arrived; CorruptStateError when it cannot be read."""
        self.require([key])
        path = self._records[key.term].episodes
        body = read_body(self._files[key.term], self._entries[key], path)
        return load_played(decode(body, PlayedState))

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _open(record: LaunchRecord) -> BinaryIO:
    try:
        return record.episodes.open("rb")
    except OSError as error:
        raise CorruptStateError(
            f"{record.episodes} cannot be read ({error.strerror}), so the episodes of launch "
            f"{record.term} are gone; a replay needs them all"
        ) from error


@dataclass(frozen=True)
class RecordedRun:
    """What a replay starts from."""

    run_dir: RunDirectory
    decisions: Decisions
    launches: tuple[RecordedLaunch, ...]
    """Those that its weights come from, oldest first."""

    def check_steps(self, num_steps: int | None) -> int:
        """How many steps are replayed; ConfigError for a run without an end, or too few steps."""
        recorded, trained = self.decisions.num_batches, self.decisions.num_trained
        if num_steps is None and not self.decisions.is_finished:
            raise ConfigError(
                f"{self.run_dir.journal} does not come to an end ({_last_line(self.run_dir)}): the "
                "run stopped early, is still running, or the file was cut. Its first "
                f"{trained} steps are complete and {recorded} batches are recorded: replay them "
                f"with --max-steps {trained}"
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
                f"{path} is missing, so it is not known whether {name!r} still holds the initial "
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

    ConfigError when it is not a recorded run, CorruptStateError when something of it is damaged.
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
    if run_dir.replay_deleted.exists():
        raise ConfigError(
            f"{run_dir.replay} lost its episodes to orchestrator.keep_gib, so {root.name} cannot "
            "be replayed; a run that shall be replayed needs a larger keep_gib, or none"
        )
    decisions = read_decisions(read_journal(run_dir.journal))
    if decisions.num_batches == 0:
        raise ConfigError(f"{root} made no batch, so there is nothing to replay")
    launches = tuple(read_launch(run_dir, term) for term in decisions.terms)
    return RecordedRun(run_dir, decisions, launches)


def learned(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a replay must repeat."""
    return {name: value for name, value in metrics.items() if name.startswith(LEARNED)}


def read_learned(metrics: Path) -> dict[int, Mapping[str, float]]:
    """Step → learning metrics of a run's `metrics.jsonl`; empty when there is none."""
    found: dict[int, dict[str, float]] = {}
    for record in read_records(metrics):
        found.setdefault(record.step, {}).update(learned(record.metrics))
    return dict(found)


def _groups(decisions: tuple[Decision, ...]) -> Iterator[GradedGroup]:
    return (decision for decision in decisions if isinstance(decision, GradedGroup))


def _last_line(run_dir: RunDirectory) -> str:
    lines = run_dir.journal.read_bytes().split(b"\n")
    if lines[-1]:
        return f"line {len(lines)} is cut off"
    return f"line {len(lines) - 1} is the last and not `run_ended`"
