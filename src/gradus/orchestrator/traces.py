"""What the traces of an episode say, read in one place (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import WireTrace
from verifiers.v1.types import ToolMessage

from gradus.errors import ProtocolError
from gradus.wire.control_tokens import SPELLINGS
from gradus.wire.episode import (
    CONTEXT_FULL,
    POLICY_VERSIONS,
    QUARANTINED_TURNS,
    TEMPERATURES,
    UNTRAINED,
)
from gradus.wire.images import ImageSpan, ImageStore, bytes_of, name_of, named_in
from gradus.wire.tokens import NOT_CHOSEN, ExpertArray
from gradus.wire.versions import NOT_SAMPLED, by_token, read_runs

_UNKNOWN = np.empty(0, np.int32)
STAGES = ("boot", "setup", "agent", "finalize", "scoring")
"""Stages of an episode whose time verifiers measures, in their order."""
OF_THE_EPISODE = "metric/episode/"
"""What a metric's name begins with that an environment recorded for its whole episode."""
CUT = "gradus_cut"
"""Key in an `info` of which something was cut: how many keys, how many bytes, the largest."""


def trainable_traces(episodes: Iterable[WireEpisode]) -> list[WireTrace]:
    """The traces that may train: of a trainable agent, and without an error."""
    return [t for episode in episodes for t in episode.traces if t.ok and t.agent.trainable]


def num_sampled_tokens(trace: WireTrace) -> int:
    """Tokens that the model wrote in a trace; those of a turn that branches share count once."""
    return sum(
        call.usage.completion_tokens
        for call in trace.calls
        if call.node is not None and call.usage is not None
    )


def is_truncated(trace: WireTrace) -> bool:
    """Whether a limit cut the trace short; verifiers does not know the end of the context."""
    return bool(trace.is_truncated) or trace.stop_condition == CONTEXT_FULL


def num_prompt_tokens(trace: WireTrace) -> int | None:
    """Tokens that the model read before its first reply; None where no call says it."""
    usages = (call.usage for call in trace.calls if call.node is not None and call.usage)
    return next((usage.input_tokens for usage in usages), None)


def tool_results(trace: WireTrace) -> list[bool]:
    """Whether each tool call failed: its text begins with "Error", as servers of MCP write it."""
    messages = (node.message for node in trace.nodes if node.message.role == "tool")
    texts = (it.content if isinstance(it.content, str) else _first_text(it) for it in messages)
    return [text.lstrip()[:5].lower() == "error" for text in texts]


def _first_text(message: ToolMessage) -> str:
    return next((part.text for part in message.content if hasattr(part, "text")), "")


def num_quarantined(trace: WireTrace) -> int:
    """Sampled turns that the environment could not read, so that they do not train; not those that
    a program asked for in a way that does not."""
    explained = {turn for turns in untrained_turns(trace).values() for turn in turns}
    return len(set(trace.info.get(QUARANTINED_TURNS, ())) - explained)


def untrained_turns(trace: WireTrace) -> dict[str, list[int]]:
    """Why turns do not train that could be read → their numbers."""
    noted = trace.info.get(UNTRAINED)
    return noted if isinstance(noted, dict) else {}


def token_versions(trace: WireTrace, nodes: Sequence[MessageNode]) -> NDArray[np.int32]:
    """Which version of the policy sampled each token of these messages, NOT_SAMPLED where it was
    given; empty where that is not known of one that was sampled."""
    noted = trace.info.get(POLICY_VERSIONS)
    numbers = {id(node): str(number) for number, node in enumerate(trace.nodes)}
    parts = [_UNKNOWN]
    for node in nodes:
        mask = np.array(node.mask, np.bool_)
        found = noted.get(numbers[id(node)], []) if isinstance(noted, Mapping) else []
        runs = read_runs(found, node.mask.count(True))
        if runs is None:
            return _UNKNOWN
        parts.append(np.full(len(mask), NOT_SAMPLED, np.int32))
        parts[-1][mask] = by_token(runs)
    return np.concatenate(parts)


def token_temperatures(
    trace: WireTrace, nodes: Sequence[MessageNode], of_source: float
) -> NDArray[np.float64]:
    """At which temperature each token of these messages was sampled; 1 where it was given."""
    noted = trace.info.get(TEMPERATURES)
    own = noted if isinstance(noted, Mapping) else {}
    numbers = {id(node): str(number) for number, node in enumerate(trace.nodes)}
    parts = [np.empty(0)]
    for node in nodes:
        value = float(own.get(numbers[id(node)], of_source))
        parts.append(np.where(np.array(node.mask, np.bool_), value, 1.0))
    return np.concatenate(parts)


def token_experts(nodes: Sequence[MessageNode]) -> ExpertArray | None:
    """[T, layers, k] experts that the engine chose for the tokens of a branch, NOT_CHOSEN where it
    did not say; None where it said nothing.

    No forward of a turn reads its last token. verifiers puts the token before in its place, until
    the next turn brings it.
    """
    told = [node for node in nodes if node.token_ids]
    found = [it.routed_experts for it in told]
    shape = next((it.shape[1:] for it in found if it is not None), None)
    if shape is None:
        return None
    parts = []
    for number, (node, experts) in enumerate(zip(told, found, strict=True)):
        parts.append(np.full((len(node.token_ids), *shape), NOT_CHOSEN, np.int16))
        if experts is not None:
            parts[-1][:] = experts
        if node.sampled and (number + 1 == len(found) or found[number + 1] is None):
            parts[-1][-1] = NOT_CHOSEN
    return np.concatenate(parts)


def keep_images(record: Mapping[str, Any], store: ImageStore) -> None:
    """Put the images of an episode's record into the store, and their names into the record.

    What is no data URL of an image stays, and no model saw it. FullDiskError where the store has no
    room.
    """
    shown = [record.get("task")]
    for trace in record["traces"]:
        shown += [trace.get("task"), [node["message"] for node in trace["nodes"]]]
    for part in _image_parts(shown):
        with suppress(ProtocolError):
            part["url"] = name_of(store.put(bytes_of(part["url"])))


def _image_parts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        for part in value:
            yield from _image_parts(part)
    elif isinstance(value, dict):
        shown = value.get("image_url") if value.get("type") == "image_url" else None
        if isinstance(shown, dict) and isinstance(shown.get("url"), str):
            yield shown
            return
        for part in value.values():
            yield from _image_parts(part)


def message_images(node: MessageNode) -> list[str | None]:
    """The hashes of the images in a message; None for one that is not in the store."""
    content = node.message.content
    parts = content if isinstance(content, list) else ()
    return [named_in(part.image_url.url) for part in parts if part.type == "image_url"]


def image_places(trace: WireTrace, node: MessageNode) -> list[tuple[int, int]]:
    """First token and length of each run of placeholders that a message was given.

    One that the policy sampled is a token like others.
    """
    places: list[tuple[int, int]] = []
    kinds = trace.mm_token_type_id_map
    if not kinds:
        return places
    for place, (token, is_sampled) in enumerate(zip(node.token_ids, node.mask, strict=True)):
        if token not in kinds or is_sampled:
            continue
        first, length = places[-1] if places else (0, 0)
        if length and first + length == place:
            places[-1] = (first, length + 1)
        else:
            places.append((place, 1))
    return places


def image_spans(trace: WireTrace, nodes: Sequence[MessageNode]) -> list[ImageSpan]:
    """Where the images of a branch lie in its tokens; its messages were checked one by one."""
    spans, start = [], 0
    for node in nodes:
        places = image_places(trace, node)
        for sha256, (place, length) in zip(message_images(node), places, strict=True):
            assert sha256 is not None, "put into the store when the episode came"
            spans.append(ImageSpan(sha256, start + place, length))
        start += len(node.token_ids)
    return spans


def episode_versions(episode: WireEpisode) -> NDArray[np.int32]:
    """The same of all traces whose tokens are known, one after the other; empty where one of them
    does not say."""
    found = [token_versions(it, it.nodes) for it in episode.traces if _has_tokens(it)]
    return np.concatenate([_UNKNOWN, *found]) if all(map(len, found)) else _UNKNOWN


def _has_tokens(trace: WireTrace) -> bool:
    return any(True in node.mask for node in trace.nodes)


def weighted_parts(trace: WireTrace) -> dict[str, float]:
    """What each part of the reward adds to it; empty when one is missing or not finite."""
    parts = {name: None if r is None else r.score * r.weight for name, r in trace.rewards.items()}
    known = {n: float(v) for n, v in parts.items() if v is not None and math.isfinite(v)}
    return known if len(known) == len(parts) else {}


def cut_bytes(info: Mapping[str, Any]) -> float | None:
    """What `bound_info` cut; None for nothing, and for a note that is not ours."""
    note = info.get(CUT)
    found = note.get("bytes") if isinstance(note, Mapping) else None
    return float(found) if isinstance(found, int) else None


def control_spellings(trace: WireTrace) -> float | None:
    """How often what tools and others said spells the turns of a chat template; None for never.

    What stands before the first reply is the task's own.
    """
    numbers = [number for number, node in enumerate(trace.nodes) if node.sampled]
    if not numbers:
        return None
    said = [node.message for node in trace.nodes[numbers[0] :] if not node.sampled]
    found = sum(
        len(SPELLINGS.findall(content if isinstance(content, str) else repr(content)))
        for message in said
        if message.role != "assistant" and (content := message.content)
    )
    return float(found) if found else None


def named_values(traces: Sequence[WireTrace]) -> dict[str, tuple[float, ...]]:
    """By name, one per trace that has it: parts of the reward, metrics of the environment, seconds
    of each stage. What is missing or not finite is left out.
    """
    return _gathered(pair for trace in traces for pair in (*_measured(trace), *_spent(trace)))


def episode_values(episode: WireEpisode) -> dict[str, tuple[float, ...]]:
    """Metrics of the episode as a whole: their names begin with `episode/`, and any trace may hold
    them, also one that does not train, such as a judge's.
    """
    pairs = (pair for trace in episode.traces if trace.ok for pair in _measured(trace))
    return _gathered((name, value) for name, value in pairs if name.startswith(OF_THE_EPISODE))


def agent_values(episode: WireEpisode) -> dict[str, dict[str, tuple[float, ...]]]:
    """By agent and name: rewards, their parts and metrics; empty when only one agent played."""
    by_agent: dict[str, list[WireTrace]] = {}
    for trace in episode.traces:
        if trace.ok:
            by_agent.setdefault(trace.agent.name, []).append(trace)
    if len({trace.agent.name for trace in episode.traces}) < 2:
        return {}
    return {
        agent: _gathered(
            (name, value)
            for trace in traces
            for name, value in (("reward", trace.reward), *_measured(trace))
            if not name.startswith(OF_THE_EPISODE)
        )
        for agent, traces in by_agent.items()
    }


def _measured(trace: WireTrace) -> Iterator[tuple[str, float | None]]:
    """What the environment says of a trace."""
    for name, reward in trace.rewards.items():
        yield f"reward/{name}", None if reward is None else reward.score
    for name, metric in trace.metrics.items():
        yield f"metric/{name}", metric


def _spent(trace: WireTrace) -> Iterator[tuple[str, float | None]]:
    """What a trace cost."""
    yield "info_cut_bytes", cut_bytes(trace.info)
    yield "control_spellings", control_spellings(trace)
    for stage in STAGES:
        span = getattr(trace.timing, stage)
        if span.end:
            yield f"{stage}_seconds", span.duration


def _gathered(pairs: Iterable[tuple[str, float | None]]) -> dict[str, tuple[float, ...]]:
    found: dict[str, list[float]] = {}
    for name, value in pairs:
        if value is not None and math.isfinite(value):
            found.setdefault(name, []).append(float(value))
    return {name: tuple(values) for name, values in found.items()}


def forget_credit(episode: WireEpisode) -> None:
    """Take all credit off an episode, so that its record holds nothing wrong."""
    for trace in episode.traces:
        for node in trace.nodes:
            node.advantages = node.reference_logprobs = node.loss_weights = None
