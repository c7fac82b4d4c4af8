"""Episodes on disk: one JSON object per line in `episodes/step_N/train.jsonl`.

The line is verifiers' own record without raw tensors, plus a `gradus` object: where the episode
stood in the run, which versions played it, the advantage of each trace, what each filter said of
its samples, and why it was dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from verifiers.v1.episode import EnvInfo, GroupInfo, WireEpisode
from verifiers.v1.trace import WireTrace

from gradus.durable import append_whole
from gradus.log import get_logger
from gradus.orchestrator.grading import Group, PlayedEpisode

T = TypeVar("T")
log = get_logger(__name__)


class EpisodeWriter:
    """Owns the `episodes` folder. A disk that cannot take a record costs the record, not the run.

    >>> writer = EpisodeWriter(run_dir.episodes, {"words": []})  # doctest: +SKIP
    >>> writer.write(group.played[0], group, step=3)  # doctest: +SKIP
    """

    def __init__(self, root: Path, state_columns: Mapping[str, Sequence[str]]) -> None:
        """`state_columns` names, per source, the keys of a trace's info that are kept."""
        self.failed = 0
        """Records that could not be written."""
        self._root = root
        self._state_columns = state_columns

    def write(self, played: PlayedEpisode, group: Group, *, step: int) -> None:
        """Append one episode to the file of `step`."""
        path = self._root / f"step_{step}" / "train.jsonl"
        try:
            line = encode_record(
                episode_record(played, group, step, self._state_columns.get(group.source, ()))
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:
                append_whole(file.fileno(), line + b"\n")
        except (OSError, ValueError) as error:
            self.failed += 1
            if self.failed == 1:
                log.warning("episode %s is not recorded in %s: %s", played.id, path, error)


def episode_record(
    played: PlayedEpisode, group: Group, step: int, state_columns: Sequence[str]
) -> dict[str, Any]:
    """The record of one episode; without an episode only the `gradus` object."""
    episode = played.episode
    record: dict[str, Any] = {}
    if episode is not None:
        episode.env = EnvInfo(id=episode.env.id, name=group.source)
        episode.group = GroupInfo(id=group.id)
        record = episode.to_record()
        for trace in record["traces"]:
            info = trace.get("info", {})
            trace["info"] = {key: info[key] for key in state_columns if key in info}
    return record | {"gradus": _standing(played, group, step, episode)}


def encode_record(record: Mapping[str, Any]) -> bytes:
    """One line of JSON; lone surrogates become "?", numbers that are not finite become null."""
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        return msgspec.json.encode(_replace_surrogates(record))


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", errors="replace").decode()
    if isinstance(value, Mapping):
        return {_replace_surrogates(k): _replace_surrogates(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_surrogates(v) for v in value]
    return value


def _standing(
    played: PlayedEpisode, group: Group, step: int, episode: WireEpisode | None
) -> dict[str, Any]:
    failure = played.failure
    return {
        "episode": played.id,
        "group": group.id,
        "source": group.source,
        "step": step,
        "task": {"index": group.pointer.index, "key": group.task.key},
        "versions": {"oldest": played.versions.oldest, "newest": played.versions.newest},
        "outcome": played.outcome,
        "advantages": [_advantage(trace) for trace in episode.traces] if episode else [],
        "filters": _of_episode(played, group.verdicts),
        "dropped": _of_episode(played, group.dropped),
        "error": {"type": failure.kind, "message": failure.message} if failure else None,
    }


def _advantage(trace: WireTrace) -> float | None:
    """Mean over the sampled tokens of the trace; None when it got no credit."""
    values = [a for node in trace.nodes for a in node.advantages or ()]
    return sum(values) / len(values) if values else None


def _of_episode(played: PlayedEpisode, by_id: Mapping[str, T]) -> dict[str, T]:
    """What is noted under the id of this episode or of one of its samples."""
    prefix = f"{played.id}/"
    return {k: value for k, value in by_id.items() if k == played.id or k.startswith(prefix)}
