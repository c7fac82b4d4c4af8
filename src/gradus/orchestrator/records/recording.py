"""Keeps every episode as it arrived, before its group gives it credit, for a replay of the run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Protocol

from gradus.config import ModelConfig, OrchestratorProcessConfig
from gradus.files import write_json
from gradus.log import get_logger
from gradus.orchestrator.records.episode_codec import save_played
from gradus.orchestrator.types import PlayedEpisode
from gradus.run.paths import RunDirectory
from gradus.run.recording import EpisodeLog, LaunchRecord, digest_files, model_folder
from gradus.wire.codec import encode

WEIGHT_FILES = ("*.safetensors", "config.json")
"""What of a model's folder decides the initial weights."""

log = get_logger(__name__)


class Recording(Protocol):
    """Takes every episode that ended, in the order of the journal."""

    def add(self, played: PlayedEpisode) -> None:
        """Keep one episode; its line in the journal follows."""
        ...

    def finish(self) -> None:
        """The run ended well: wait until everything is on disk."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class NoRecording:
    """Keeps nothing: `orchestrator.recording = false`."""

    def add(self, played: PlayedEpisode) -> None:
        """Forget it."""

    def finish(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held open."""


class EpisodeRecording:
    """Owns the folder of one launch. A disk that cannot take it costs the replay, not the run.

    >>> recording = EpisodeRecording(LaunchRecord(run_dir, term=1), config.model)  # doctest: +SKIP
    >>> recording.add(played)  # doctest: +SKIP
    """

    def __init__(self, record: LaunchRecord, model: ModelConfig) -> None:
        """The digests of the initial weights are computed on a thread beside the run."""
        self._record = record
        self._log: EpisodeLog | None = EpisodeLog(record.episodes)
        # A daemon: hashing a large model must not hold back the end of a run that failed.
        self._hashing = threading.Thread(target=self._note_model, args=[model.name], daemon=True)
        self._hashing.start()

    def add(self, played: PlayedEpisode) -> None:
        """Append the episode, a few bytes for one that was cancelled."""
        if self._log is None:
            return
        try:
            self._log.append(played.id, encode(save_played(played)))
        except OSError as error:
            log.error(
                "%s takes no more episodes (%s): this run cannot be replayed",
                self._record.episodes,
                error.strerror or error,
            )
            self.close()

    def finish(self) -> None:
        """Wait for the digests of the initial weights."""
        self._hashing.join()

    def close(self) -> None:
        """Close the file; what comes later is not kept."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _note_model(self, name: str) -> None:
        try:
            write_json(self._record.model, digest_model(name))
        except OSError as error:
            log.warning("%s cannot be written: %s", self._record.model, error.strerror or error)


def digest_model(name: str) -> dict[str, str]:
    """SHA-256 of each file that decides the initial weights; empty when the model is not here."""
    folder = model_folder(name)
    return {} if folder is None else digest_files(folder, WEIGHT_FILES)


def open_recording(config: OrchestratorProcessConfig) -> Recording:
    """The recording of this launch, as configured."""
    if not config.orchestrator.recording:
        return NoRecording()
    record = LaunchRecord(RunDirectory(Path(config.run_dir)), config.term)
    return EpisodeRecording(record, config.model)
