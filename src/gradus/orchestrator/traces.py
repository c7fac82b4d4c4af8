"""What the traces of an episode say, read in one place (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verifiers.v1.episode import WireEpisode
from verifiers.v1.trace import WireTrace

from gradus.wire.episode import CONTEXT_FULL

STAGES = ("boot", "setup", "agent", "finalize", "scoring")
"""Stages of an episode whose time verifiers measures, in their order."""
QUARANTINED_TURNS = "quarantined_turns"
"""Key in a trace's `info` under which an environment lists the turns that it could not read, by
their number among the sampled turns of the trace, from 0."""
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


def cut_bytes(info: Mapping[str, Any]) -> float | None:
    """What `bound_info` cut; None for nothing, and for a note that is not ours."""
    note = info.get(CUT)
    found = note.get("bytes") if isinstance(note, Mapping) else None
    return float(found) if isinstance(found, int) else None


def named_values(traces: Sequence[WireTrace]) -> dict[str, tuple[float, ...]]:
    """By name, one per trace that has it: parts of the reward, metrics of the environment, seconds
    of each stage. What is missing or not finite is left out.
    """
    found: dict[str, list[float]] = {}

    def note(name: str, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            found.setdefault(name, []).append(float(value))

    for trace in traces:
        for name, reward in trace.rewards.items():
            note(f"reward/{name}", None if reward is None else reward.score)
        for name, metric in trace.metrics.items():
            note(f"metric/{name}", metric)
        note("info_cut_bytes", cut_bytes(trace.info))
        for stage in STAGES:
            span = getattr(trace.timing, stage)
            if span.end:
                note(f"{stage}_seconds", span.duration)
    return {name: tuple(values) for name, values in found.items()}


def forget_credit(episode: WireEpisode) -> None:
    """Take all credit off an episode, so that its record holds nothing wrong."""
    for trace in episode.traces:
        for node in trace.nodes:
            node.advantages = node.reference_logprobs = node.loss_weights = None
