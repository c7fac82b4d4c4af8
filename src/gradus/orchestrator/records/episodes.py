"""Episodes on disk: one JSON object per line in `episodes/step_N/train.jsonl`.

The line is verifiers' own record without its values per token, plus a `gradus` object: where the
episode stood in the run, which versions played it, the advantage of each trace, what each filter
said of its samples, and why it was dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from verifiers.v1.episode import EnvInfo, GroupInfo, WireEpisode
from verifiers.v1.trace import WireTrace

from gradus.files import append_whole, unlinked
from gradus.log import get_logger
from gradus.orchestrator.play.episode_check import (
    MAX_OTHER_INFO_BYTES,
    MAX_RECORD_BYTES,
    as_json,
    bound_info,
    bound_texts,
)
from gradus.orchestrator.traces import CUT
from gradus.orchestrator.types import Group, PlayedEpisode

T = TypeVar("T")
_PER_TOKEN = {
    "token_ids",
    "mask",
    "is_content",
    "logprobs",
    "advantages",
    "reference_logprobs",
    "trainer_logprobs",
    "entropies",
    "loss_weights",
    "routed_experts",
    "sampling_mask",
}
"""Fields of a message with a value for each token; they are kept in `replay/`."""
_NOT_READABLE = {"traces": {"__all__": {"info": True, "nodes": {"__all__": _PER_TOKEN}}}}
COUNTED = ("num_input_tokens", "num_output_tokens", "num_total_tokens")
"""What verifiers adds to the record of a trace and of an episode, in its order."""
log = get_logger(__name__)


class EpisodeWriter:
    """Owns the `episodes` folder. A record that cannot be written is lost; the run continues."""

    def __init__(self, root: Path, state_columns: Mapping[str, Sequence[str]]) -> None:
        """`state_columns` names, per source, the keys of a trace's info that come first."""
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
            with open(path, "ab", buffering=0, opener=unlinked) as file:
                append_whole(file.fileno(), line + b"\n")
        except (OSError, ValueError) as error:
            self.failed += 1
            if self.failed == 1:
                log.warning("episode %s is not recorded in %s: %s", played.id, path, error)


def episode_record(
    played: PlayedEpisode, group: Group, step: int, state_columns: Sequence[str]
) -> dict[str, Any]:
    """The record of one episode; without an episode only the `gradus` object."""
    fields = gradus_fields(played, group, step, played.episode)
    if played.episode is None:
        return {"gradus": fields}
    played.episode.env = EnvInfo(id=played.episode.env.id, name=group.source)
    played.episode.group = GroupInfo(id=group.id)
    return readable(played.episode, fields, state_columns)


def readable(
    episode: WireEpisode, gradus: dict[str, Any], state_columns: Sequence[str]
) -> dict[str, Any]:
    """Verifiers' record of an episode, tokens counted instead of listed, and the fields of gradus.

    `cut` in the fields of gradus counts what was too large, if anything was.
    """
    record: dict[str, Any] = episode.model_dump(
        mode="json", exclude=_NOT_READABLE, exclude_none=True, exclude_computed_fields=True
    )
    cut: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    for trace, written in zip(episode.traces, record["traces"], strict=True):
        counts = token_counts(trace)
        written |= counts
        counted.update(counts)
        info = bound_info(trace.info, first=state_columns, max_bytes=MAX_OTHER_INFO_BYTES)
        cut["info"] += CUT in info
        written["info"] = {key: msgspec.json.decode(as_json(info[key])) for key in info}
        for node, entry in zip(trace.nodes, written["nodes"], strict=True):
            entry["num_tokens"] = len(node.token_ids)
            entry["num_sampled_tokens"] = len(node.logprobs)
            entry["message"], texts = bound_texts(entry["message"])
            cut["messages"] += texts
    record |= {name: counted[name] for name in COUNTED}
    return record | {"gradus": gradus | ({"cut": dict(+cut)} if cut.total() else {})}


def token_counts(trace: WireTrace) -> dict[str, int]:
    """The token counts that verifiers adds to a record. Counted once here: verifiers counts each
    number again for the trace and for the episode, which took two thirds of a record's time."""
    num_input, usage = trace.num_input_tokens, trace.usage
    num_total = num_input + (usage.completion_tokens if usage else 0)
    return dict(zip(COUNTED, (num_input, trace.num_output_tokens, num_total), strict=True))


def encode_record(record: Mapping[str, Any]) -> bytes:
    """One line of JSON; lone surrogates become "?", numbers that are not finite become null.

    Of a record that is too large, only the `gradus` object.
    """
    try:
        line = msgspec.json.encode(record)
    except UnicodeEncodeError:
        line = msgspec.json.encode(_replace_surrogates(record))
    if len(line) <= MAX_RECORD_BYTES:
        return line
    fields = record["gradus"]
    cut = {**fields.get("cut", {}), "record_bytes": len(line)}
    return encode_record({"gradus": {**fields, "cut": cut}})


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", errors="replace").decode()
    if isinstance(value, Mapping):
        return {_replace_surrogates(k): _replace_surrogates(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_surrogates(v) for v in value]
    return value


def gradus_fields(
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
    values = [float(a) for node in trace.nodes for a in node.advantages or ()]
    return sum(values) / len(values) if values else None


def _of_episode(played: PlayedEpisode, by_id: Mapping[str, T]) -> dict[str, T]:
    """Notes under the id of this episode or of one of its samples."""
    prefix = f"{played.id}/"
    return {k: value for k, value in by_id.items() if k == played.id or k.startswith(prefix)}
