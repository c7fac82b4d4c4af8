"""Played episodes as bytes and back, with every token, logprob and credit that they carry.

Used by checkpoints and by replay. The bytes are msgpack of verifiers' own wire form.
"""

from __future__ import annotations

from typing import Any

import msgspec
from verifiers.v1.episode import WireEpisode

from gradus.errors import ConfigError, CorruptStateError
from gradus.orchestrator.types import Failure, PlayedEpisode
from gradus.wire.versions import VersionSpan

_COMPUTED = {"num_input_tokens", "num_output_tokens", "num_total_tokens"}


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
    """The episode as it stands now; later credit does not reach the copy."""
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
    record = episode.model_dump(mode="python", exclude=_COMPUTED)
    try:
        return msgspec.msgpack.encode(record, enc_hook=_plain)
    except (TypeError, UnicodeEncodeError, OverflowError) as error:
        raise ConfigError(
            f"episode {episode_id} cannot be recorded: {error}. An algorithm may write numbers, "
            "text, and lists and dicts of them on an episode"
        ) from error


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy that an algorithm left on a trace."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it holds a {type(value).__name__}")


def _decode(raw: bytes, episode_id: str) -> WireEpisode:
    try:
        return WireEpisode.model_validate(msgspec.msgpack.decode(raw))
    except ValueError as error:
        raise CorruptStateError(f"episode {episode_id} cannot be read back: {error}") from error
