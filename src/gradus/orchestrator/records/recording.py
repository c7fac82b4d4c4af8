"""Played episodes as bytes and back, and the log that keeps each as it arrived, for a replay.

The bytes are msgpack of verifiers' own wire form, with every token, logprob and credit. Checkpoints
hold the same bytes.
"""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from verifiers.v1.episode import WireEpisode

from gradus.config import ModelConfig, RunProcessConfig
from gradus.errors import ConfigError, CorruptStateError
from gradus.files import write_json
from gradus.log import get_logger
from gradus.orchestrator.types import Failure, PlayedEpisode
from gradus.run.growing_files import RecordLimit
from gradus.run.model_files import digest_files, model_folder
from gradus.run.paths import RunDirectory
from gradus.run.recording import EpisodeLog, LaunchRecord
from gradus.wire.codec import encode
from gradus.wire.versions import VersionSpan

WEIGHT_FILES = ("*.safetensors", "config.json", "*processor_config.json")
"""What of a model's folder decides the initial weights, and the pixels that they see."""
_PACKED = "zlib"
"""In the place of the bytes of an array: the same, compressed. An older gradus wrote them plain."""
log = get_logger(__name__)


class PlayedState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One played episode on disk."""

    id: str
    group_id: str
    versions: VersionSpan
    episode: bytes | None
    """None when the episode failed before it came, or was cancelled."""
    failure: tuple[str, str] | None
    """Kind and message."""
    seconds: float


def save_played(played: PlayedEpisode) -> PlayedState:
    """A copy of the episode as it is now; later credit does not change it."""
    failure = played.failure
    return PlayedState(
        id=played.id,
        group_id=played.group_id,
        versions=played.versions,
        episode=None if played.episode is None else _encode(played.episode, played.id),
        failure=None if failure is None else (failure.kind, failure.message),
        seconds=played.seconds,
    )


def load_played(state: PlayedState) -> PlayedEpisode:
    """The episode that was saved; CorruptStateError when it is none."""
    return PlayedEpisode(
        id=state.id,
        group_id=state.group_id,
        versions=state.versions,
        episode=None if state.episode is None else _decode(state.episode, state.id),
        failure=None if state.failure is None else Failure(*state.failure),
        seconds=state.seconds,
    )


def _encode(episode: WireEpisode, episode_id: str) -> bytes:
    # Counts of tokens, which are as long to compute as all the rest is to write.
    record = episode.model_dump(mode="python", exclude_computed_fields=True)
    for array in _experts_of(record):
        array[_PACKED] = zlib.compress(array.pop("data"), level=1)
    try:
        return msgspec.msgpack.encode(record, enc_hook=_plain)
    except (TypeError, UnicodeEncodeError, OverflowError) as error:
        raise ConfigError(
            f"episode {episode_id} cannot be recorded: {error}. An algorithm may write numbers, "
            "text, and lists and dicts of them on an episode"
        ) from error


def _experts_of(record: Any) -> Iterator[dict[str, Any]]:
    """The arrays of experts that a record of verifiers holds, the largest of its values."""
    for trace in record["traces"]:
        for node in trace["nodes"]:
            if isinstance(array := node.get("routed_experts"), dict):
                yield array


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy that an algorithm left on a trace."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it holds a {type(value).__name__}")


def _decode(raw: bytes, episode_id: str) -> WireEpisode:
    try:
        record = msgspec.msgpack.decode(raw)
        for array in _experts_of(record):
            if _PACKED in array:
                array["data"] = zlib.decompress(array.pop(_PACKED))
        return WireEpisode.model_validate(record)
    except (ValueError, LookupError, TypeError, zlib.error) as error:
        raise CorruptStateError(f"episode {episode_id} cannot be read back: {error}") from error


class EpisodeRecording:
    """Owns the folder of one launch. A full disk ends the recording, not the run."""

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


def open_recording(config: RunProcessConfig) -> EpisodeRecording | None:
    """The recording of this launch; None for `orchestrator.recording = false`, and where what was
    recorded before is deleted: a replay needs all of it."""
    run_dir = RunDirectory(Path(config.run_dir))
    if not config.orchestrator.recording or run_dir.replay_deleted.exists():
        return None
    return EpisodeRecording(LaunchRecord(run_dir, config.term), config.model)


def bounded(
    keep_gib: float | None,
    run_dir: RunDirectory,
    recording: EpisodeRecording | None,
    tell: Callable[[str], None],
) -> Callable[[int], Awaitable[None]] | None:
    """What makes room for the records of a step that comes; None without a limit."""
    if keep_gib is None:
        return None
    limit = RecordLimit(run_dir, keep_gib)

    async def make_room(step: int) -> None:
        try:
            if not await asyncio.to_thread(limit.is_exceeded):
                return
            if recording is not None:
                recording.close()
            if told := await asyncio.to_thread(limit.delete_oldest, step):
                tell(told)
        except OSError as error:
            log.warning("orchestrator.keep_gib cannot be kept: %s", error)

    return make_room
