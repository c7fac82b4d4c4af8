"""Episodes of one evaluation on disk, each exactly once, also after a kill in the middle."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from gradus.errors import CorruptStateError
from gradus.files import append_whole, replacing, unlinked
from gradus.orchestrator.evaluation.episodes import EpisodeKey, EvaluatedEpisode
from gradus.orchestrator.evaluation.results import EpisodeScore
from gradus.orchestrator.records.episodes import encode_record


class _SavedTask(msgspec.Struct):
    index: int


class _Error(msgspec.Struct):
    type: str


class _SavedScore(msgspec.Struct):
    """The part of a record that a resume needs."""

    source: str
    task: _SavedTask
    replica: int
    reward: float | None
    length_tokens: int
    is_truncated: bool
    error: _Error | None
    values: dict[str, float | None] = {}
    is_shared: bool = False

    @property
    def key(self) -> EpisodeKey:
        return EpisodeKey(self.source, self.task.index, self.replica)

    @property
    def score(self) -> EpisodeScore:
        # A value that no float holds was written as null.
        values = {name: value for name, value in self.values.items() if value is not None}
        return EpisodeScore(
            task=self.task.index,
            reward=self.reward,
            length_tokens=self.length_tokens,
            is_truncated=self.is_truncated,
            values=values,
            is_shared=self.is_shared,
        )


class _Line(msgspec.Struct):
    gradus: _SavedScore


class EvaluationFile(AbstractContextManager["EvaluationFile"]):
    """Owns one `eval.jsonl`: append-only, one JSON object per line, whole lines only."""

    def __init__(self, path: Path, finished: dict[EpisodeKey, EpisodeScore]) -> None:
        self.finished = finished
        """Episodes without error that the file held when it was opened."""
        self._path = path
        self._descriptor = unlinked(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @classmethod
    def create(cls, path: Path) -> Self:
        """A new, empty file in the place of any other."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        return cls(path, {})

    @classmethod
    def reopen(cls, path: Path, wanted: Collection[EpisodeKey]) -> Self:
        """Find the wanted episodes that ended without error; those that failed leave the file.

        So no episode is in it twice, whatever is played again. Episodes that are not wanted this
        time stay. CorruptStateError, with the file as it was, for a line in the middle that is no
        record; a last line that is cut off is what a kill leaves, and is dropped.
        """
        if not path.exists():
            return cls.create(path)
        asked = set(wanted)
        with replacing(path) as new:
            finished = _copy_kept(path, new, asked)
        return cls(path, {key: score for key, score in finished.items() if key in asked})

    def append(self, ended: EvaluatedEpisode, state_columns: Collection[str]) -> None:
        """Add one episode; the line is with the operating system when this returns.

        OSError, with nothing added, when the disk does not take it.
        """
        line = encode_record(ended.record(list(state_columns))) + b"\n"
        try:
            append_whole(self._descriptor, line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _copy_kept(
    path: Path, new: BinaryIO, asked: Collection[EpisodeKey]
) -> dict[EpisodeKey, EpisodeScore]:
    """Copy all but failed episodes that are played again; the scores of those without error."""
    finished: dict[EpisodeKey, EpisodeScore] = {}
    with path.open("rb") as old:
        for number, line in enumerate(old, start=1):
            if not line.endswith(b"\n"):
                break
            saved = _read_line(line, path, number)
            key, is_failed = saved.key, saved.error is not None
            if key in finished or (is_failed and key in asked):
                continue
            new.write(line)
            if not is_failed:
                finished[key] = saved.score
    return finished


def _read_line(line: bytes, path: Path, number: int) -> _SavedScore:
    try:
        return msgspec.json.decode(line, type=_Line).gradus
    except (ValueError, RecursionError) as error:
        raise CorruptStateError(
            f"{path} line {number} is not a record of an evaluation ({error}); delete it, or "
            "evaluate under another name"
        ) from error
