"""The episodes that a run kept, found by launch and id."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import BinaryIO

from gradus.closing import Closing
from gradus.errors import CorruptStateError
from gradus.orchestrator.groups.grading import PlayedEpisode
from gradus.orchestrator.records.episode_codec import PlayedState, load_played
from gradus.orchestrator.replay.journal_reader import EpisodeKey
from gradus.run.paths import RunDirectory
from gradus.run.recording import EpisodeEntry, LaunchRecord, iter_entries, read_body
from gradus.wire.codec import decode

_SHOWN_IDS = 3


class RecordedEpisodes(Closing):
    """Owns the open files of all launches; an episode is read when it is asked for.

    >>> with RecordedEpisodes(run_dir, [1]) as episodes:  # doctest: +SKIP
    ...     played = episodes.load(EpisodeKey(1, "g000000.0"))
    """

    def __init__(self, run_dir: RunDirectory, terms: Iterable[int], *, check: bool = False) -> None:
        """With `check` every byte is compared; CorruptStateError when one changed."""
        self._files: dict[int, BinaryIO] = {}
        self._entries: dict[EpisodeKey, EpisodeEntry] = {}
        self._records = {term: LaunchRecord(run_dir, term) for term in terms}
        with ExitStack() as stack:
            for term, record in self._records.items():
                self._files[term] = stack.enter_context(_open(record))
                for entry in iter_entries(record.episodes, check=check):
                    self._entries[EpisodeKey(term, entry.id)] = entry
            self._stack = stack.pop_all()

    def require(self, episodes: Iterable[EpisodeKey]) -> None:
        """CorruptStateError that counts and names those of `episodes` that are not there."""
        missing = [episode for episode in episodes if episode not in self._entries]
        if missing:
            shown = ", ".join(f"{it.id} of launch {it.term}" for it in missing[:_SHOWN_IDS])
            path = self._records[missing[0].term].episodes
            raise CorruptStateError(
                f"{path} lacks {len(missing)} episodes that the journal names, the first: {shown}; "
                "it was cut off, or the disk was full when the run was recorded"
            )

    def load(self, key: EpisodeKey) -> PlayedEpisode:
        """One episode as it arrived; CorruptStateError when it cannot be read."""
        self.require([key])
        path = self._records[key.term].episodes
        body = read_body(self._files[key.term], self._entries[key], path)
        return load_played(decode(body, PlayedState))

    def close(self) -> None:
        """Close the files."""
        self._stack.close()


def _open(record: LaunchRecord) -> BinaryIO:
    try:
        return record.episodes.open("rb")
    except OSError as error:
        raise CorruptStateError(
            f"{record.episodes} cannot be read ({error.strerror}), so the episodes of launch "
            f"{record.term} are gone; a replay needs them all"
        ) from error
