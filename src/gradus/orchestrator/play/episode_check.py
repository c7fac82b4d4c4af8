"""Checks what an environment returns, and cuts it to a bounded size.

An episode with an error counts as that error, never as empty and never as reward 0. What was cut
is noted in its place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import Error, WireTrace

from gradus.orchestrator.algorithms.base import LARGEST_REWARD
from gradus.orchestrator.traces import (
    CUT,
    image_places,
    image_spans,
    message_images,
    trainable_traces,
)
from gradus.orchestrator.types import Failure
from gradus.wire.episode import CONTEXT_FULL, QUARANTINED_TURNS, TEMPERATURES, UNTRAINED
from gradus.wire.packing import image_tokens, too_many_patches
from gradus.wire.tokens import HIGHEST_LOGPROB, LARGEST_VOCABULARY, LOWEST_LOGPROB

MAX_INFO_BYTES = 1 << 20
"""Of one trace's `info` as JSON, whatever the config names."""
MAX_OTHER_INFO_BYTES = 64 << 10
"""In a record, of the keys that `state_columns` does not name."""
MAX_TEXT_CHARACTERS = 256 << 10
"""In a record, of each text of a message."""
MAX_RECORD_BYTES = 16 << 20
"""Of a record; a larger one keeps only its `gradus` object."""

_NUM_NAMED = 10


def find_failure(
    episode: WireEpisode,
    *,
    needs_tokens: bool = True,
    vocabulary_size: int = LARGEST_VOCABULARY,
    max_image_tokens: int | None = None,
) -> Failure | None:
    """What is wrong with a returned episode; None when it may be scored.

    An evaluation needs no tokens: a plain chat endpoint gives none. `max_image_tokens` bounds the
    placeholders of one branch.
    """
    if not episode.ok:
        return _reported_error(episode)
    traces = trainable_traces([episode])
    for trace in traces:
        failure = _check_reward(trace)
        if failure is None and needs_tokens:
            failure = (
                _check_tokens(trace, vocabulary_size)
                or _check_images(trace)
                or _check_patches(trace, max_image_tokens)
                or _check_quarantine(trace)
                or _check_temperatures(trace)
            )
        if failure is not None:
            return failure
    if needs_tokens and not any(any(node.mask) for trace in traces for node in trace.nodes):
        return _no_tokens(traces)
    return None


def _no_tokens(traces: Sequence[WireTrace]) -> Failure:
    """Why nothing was sampled although no error was reported."""
    full = next((trace for trace in traces if trace.stop_condition == CONTEXT_FULL), None)
    if full is None:
        return Failure("no_sampled_tokens", "no trainable trace holds a sampled token")
    said = full.info.get(CONTEXT_FULL)
    return Failure(
        "prompt_too_long",
        "the first prompt, with the tools that it declares, leaves no token to sample in "
        "model.max_length_tokens; raise it, or offer shorter tasks or fewer tools"
        + (f" ({said})" if said else ""),
    )


def _reported_error(episode: WireEpisode) -> Failure:
    errors: list[Error] = [*episode.errors]
    for trace in episode.traces:
        if not trace.ok:
            errors.extend(trace.errors)
    if errors:
        return Failure(errors[-1].type, _message(errors[-1]), errors[-1].status_code)
    if episode.is_timeout or any(trace.is_timeout for trace in episode.traces):
        return Failure("timeout", "a deadline of the environment ended the episode")
    return Failure("unknown", "the environment calls the episode failed and gives no error")


def _message(error: Error) -> str:
    """The message of an error, or the last line of its traceback when it has none."""
    message: str = error.message
    if message.strip():
        return message
    lines = [line.strip() for line in (error.traceback or "").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _check_reward(trace: WireTrace) -> Failure | None:
    if not trace.rewards:
        return Failure("invalid_reward", f"agent {trace.agent.name!r} got no reward at all")
    for name, reward in trace.rewards.items():
        if reward is None:
            return Failure("invalid_reward", f"reward {name!r} was not computed")
        if not math.isfinite(reward.value):
            return Failure(
                "invalid_reward", f"reward {name!r} is {reward.score}, weight {reward.weight}"
            )
    if not abs(trace.reward) <= LARGEST_REWARD:
        text = f"the rewards add up to {trace.reward:g}; credit is float32, use at most"
        return Failure("invalid_reward", f"{text} {LARGEST_REWARD:g}")
    return None


def _check_tokens(trace: WireTrace, vocabulary_size: int) -> Failure | None:
    for number, node in enumerate(trace.nodes):
        problem = _node_problem(node, vocabulary_size)
        if problem:
            return Failure("invalid_tokens", f"message {number} of the trace: {problem}")
    return None


def _check_patches(trace: WireTrace, max_image_tokens: int | None) -> Failure | None:
    """A branch whose images no micro batch can hold."""
    for branch in trace.branches if max_image_tokens is not None else ():
        images = image_spans(trace, branch.nodes)
        if image_tokens([images]) > (max_image_tokens or 0):
            return Failure("too_many_patches", too_many_patches(images))
    return None


def _check_images(trace: WireTrace) -> Failure | None:
    for number, node in enumerate(trace.nodes):
        images, places = message_images(node), image_places(trace, node)
        if len(images) != len(places):
            return Failure(
                "invalid_images",
                f"message {number} of the trace shows {len(images)} images, and its tokens have "
                f"{len(places)} runs of placeholders",
            )
        if None in images:
            return Failure("invalid_images", f"message {number} has an image that is not stored")
    return None


def _check_quarantine(trace: WireTrace) -> Failure | None:
    noted = {QUARANTINED_TURNS: trace.info.get(QUARANTINED_TURNS, [])}
    reasons = trace.info.get(UNTRAINED, {})
    of_reasons = reasons if isinstance(reasons, dict) else {"": reasons}
    noted |= {f"{UNTRAINED}.{name}": turns for name, turns in of_reasons.items()}
    for name, numbers in noted.items():
        is_valid = isinstance(numbers, list) and all(
            type(number) is int and 0 <= number < trace.num_turns for number in numbers
        )
        if not is_valid:
            return Failure(
                "invalid_quarantine",
                f"info.{name} of agent {trace.agent.name!r} is {numbers!r}; it must list "
                f"numbers of its {trace.num_turns} turns, counted from 0",
            )
    return None


def _check_temperatures(trace: WireTrace) -> Failure | None:
    noted = trace.info.get(TEMPERATURES, {})
    if isinstance(noted, dict) and all(
        type(value) in (int, float) and 0 < value < math.inf for value in noted.values()
    ):
        return None
    text = f"info.{TEMPERATURES} of agent {trace.agent.name!r} must hold numbers above 0"
    return Failure("invalid_temperature", text)


def _node_problem(node: MessageNode, vocabulary_size: int) -> str | None:
    if len(node.mask) != len(node.token_ids):
        return f"{len(node.token_ids)} tokens have {len(node.mask)} mask values"
    sampled = node.mask.count(True)
    if sampled != len(node.logprobs):
        return f"{sampled} sampled tokens have {len(node.logprobs)} logprobs"
    for logprob in node.logprobs:
        if not LOWEST_LOGPROB <= logprob <= HIGHEST_LOGPROB:
            return f"a logprob is {logprob:g}; one of a sampled token is at most 0 and finite"
    if node.token_ids and min(node.token_ids) < 0:
        return "a token id is negative"
    if node.token_ids and max(node.token_ids) >= vocabulary_size:
        return f"token id {max(node.token_ids)} is beyond the vocabulary of {vocabulary_size}"
    return None


def bound_info(
    info: Mapping[str, Any], *, first: Collection[str] = (), max_bytes: int = MAX_INFO_BYTES
) -> dict[str, Any]:
    """The keys of `info` that fit, the small ones before the large ones, with a note of the others.

    Keys in `first` have all of MAX_INFO_BYTES to themselves, the others `max_bytes`.

    >>> bound_info({"a": "x" * 50, "b": 1}, max_bytes=20)
    {'b': 1, 'gradus_cut': {'keys': 1, 'bytes': 52, 'largest': {'a': 52}}}
    """
    sizes = {key: len(as_json(value)) for key, value in info.items() if key != CUT}
    named = {key: size for key, size in sizes.items() if key in first}
    others = {key: size for key, size in sizes.items() if key not in first}
    kept = _fitting(named, MAX_INFO_BYTES) | _fitting(others, max_bytes)
    bounded = {key: value for key, value in info.items() if key in kept or key == CUT}
    cut = {key: size for key, size in sizes.items() if key not in kept}
    return bounded | ({CUT: _note(cut, info.get(CUT))} if cut else {})


def bound_texts(message: Any) -> tuple[Any, int]:
    """A message whose texts are of bounded length, and how many of them were cut."""
    if isinstance(message, str):
        if len(message) <= MAX_TEXT_CHARACTERS:
            return message, 0
        kept = message[:MAX_TEXT_CHARACTERS]
        return f"{kept}… [gradus kept {len(kept)} of {len(message)} characters]", 1
    if isinstance(message, Mapping):
        parts = {key: bound_texts(value) for key, value in message.items()}
        return {key: part for key, (part, _) in parts.items()}, sum(n for _, n in parts.values())
    if isinstance(message, list | tuple):
        items = [bound_texts(value) for value in message]
        return [item for item, _ in items], sum(n for _, n in items)
    return message, 0


def as_json(value: Any) -> bytes:
    """Any value as JSON; what JSON cannot hold becomes the text of its `repr`."""
    try:
        return msgspec.json.encode(value, enc_hook=repr)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return msgspec.json.encode(repr(value).encode(errors="replace").decode())


def _fitting(sizes: Mapping[str, int], room: int) -> set[str]:
    kept = set()
    for key, size in sorted(sizes.items(), key=lambda item: item[1]):
        room -= size
        if room < 0:
            break
        kept.add(key)
    return kept


def _note(cut: Mapping[str, int], before: Any) -> dict[str, Any]:
    """What is missing, including what was cut when the episode arrived."""
    earlier = before if isinstance(before, Mapping) else {}
    named = {**earlier.get("largest", {}), **{key[:100]: size for key, size in cut.items()}}
    largest = sorted(named.items(), key=lambda item: -item[1])[:_NUM_NAMED]
    return {
        "keys": len(cut) + earlier.get("keys", 0),
        "bytes": sum(cut.values()) + earlier.get("bytes", 0),
        "largest": dict(largest),
    }
