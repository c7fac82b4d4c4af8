"""An episode becomes samples: one per branch of every trace that may train (pure).

A sampled turn that several branches share trains in the first of them only; the others carry it as
context, with weight 0. So does a quarantined turn, one whose text the environment could not read:
nobody answered it, so the outcome says nothing about it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import Branch, WireTrace

from gradus.orchestrator.episode_check import quarantined_nodes
from gradus.wire.policy import VersionSpan
from gradus.wire.sample import LOSS_NAMES, BoolArray, FloatArray, Sample


@dataclass(frozen=True)
class SampleOrigin:
    """What all samples of one episode share."""

    environment: str
    group_id: str
    episode_id: str
    versions: VersionSpan
    temperature: float
    """Of every sampled token of the source."""
    max_length_tokens: int
    """Longer branches are cut at their end."""


def build_samples(episode: WireEpisode, origin: SampleOrigin) -> list[Sample]:
    """The samples of one scored episode; branches without a token to train give none."""
    samples: list[Sample] = []
    for index, trace in enumerate(episode.traces):
        if trace.ok and trace.agent.trainable:
            samples.extend(_trace_samples(trace, index, origin))
    return samples


def _trace_samples(trace: WireTrace, index: int, origin: SampleOrigin) -> list[Sample]:
    samples: list[Sample] = []
    # By identity: the same message node stands in every branch that holds it.
    trained = {id(node) for node in quarantined_nodes(trace)}
    for branch in trace.branches:
        if not branch.trainable:
            continue
        fresh = _per_token(branch.nodes, [id(node) not in trained for node in branch.nodes])
        trained.update(id(node) for node in branch.nodes)
        name = f"{origin.episode_id}/{index}/{branch.index}"
        sample = _branch_sample(branch, fresh, name, origin, trace.reward)
        if bool(sample.loss_mask.any()):
            samples.append(sample)
    return samples


def _branch_sample(
    branch: Branch, fresh: BoolArray, name: str, origin: SampleOrigin, reward: float
) -> Sample:
    """All arrays are [T], cut together to the longest allowed length."""
    end = origin.max_length_tokens
    fresh = fresh[:end]
    length = len(fresh)
    sampled = np.array(branch.sampled_mask[:end], dtype=np.bool_)
    loss_weights = _loss_weights(branch, sampled & fresh, fresh)
    loss_mask = np.zeros(length, dtype=np.bool_)
    for weights in loss_weights.values():
        loss_mask |= weights != 0
    return Sample(
        id=name,
        environment=origin.environment,
        group_id=origin.group_id,
        episode_id=origin.episode_id,
        reward=reward,
        versions=origin.versions,
        token_ids=np.array(branch.token_ids[:end], dtype=np.int32),
        loss_mask=loss_mask,
        sampling_logprobs=_floats(branch.logprobs, length),
        temperatures=np.where(sampled, np.float32(origin.temperature), np.float32(1.0)),
        advantages=np.where(loss_mask, _floats(branch.advantages, length), np.float32(0.0)),
        reference_logprobs=_floats(branch.reference_logprobs, length),
        loss_weights=loss_weights,
    )


def _loss_weights(branch: Branch, trains: BoolArray, fresh: BoolArray) -> dict[str, FloatArray]:
    """What the algorithm weighed; unless it says otherwise, `rl` weighs 1 on tokens with credit."""
    weights: dict[str, FloatArray] = {}
    for name in LOSS_NAMES:
        chosen = branch.loss_weights(name)
        if chosen is not None:
            weights[name] = np.where(fresh, _floats(chosen, len(fresh)), np.float32(0.0))
    if "rl" not in weights:
        has_credit = _per_token(branch.nodes, [n.advantages is not None for n in branch.nodes])
        weights["rl"] = (trains & has_credit[: len(trains)]).astype(np.float32)
    return weights


def _per_token(nodes: list[MessageNode], values: list[bool]) -> BoolArray:
    """One value per message widened to its tokens, [T]."""
    return np.repeat(np.array(values, dtype=np.bool_), [len(node.token_ids) for node in nodes])


def _floats(values: list[float] | None, length: int) -> FloatArray:
    """The first `length` values, [T]; zeros where the trace has none."""
    if values is None:
        return np.zeros(length, dtype=np.float32)
    return np.array(values[:length], dtype=np.float32)
