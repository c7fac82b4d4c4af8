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

from gradus.orchestrator.algorithms.base import Floats, TokenCredit, credit_by_node
from gradus.orchestrator.traces import quarantined_nodes
from gradus.wire.sample import LOSS_NAMES, BoolArray, FloatArray, Sample
from gradus.wire.versions import VersionSpan


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
    credit = credit_by_node(trace)
    trained = {id(node) for node in quarantined_nodes(trace)}
    for branch in trace.branches:
        if not branch.trainable:
            continue
        fresh = _per_token(branch.nodes, [id(node) not in trained for node in branch.nodes])
        trained.update(id(node) for node in branch.nodes)
        name = f"{origin.episode_id}/{index}/{branch.index}"
        nodes = [credit[id(node)] for node in branch.nodes]
        sample = _branch_sample(branch, nodes, fresh, name, origin, trace.reward)
        if bool(sample.loss_mask.any()):
            samples.append(sample)
    return samples


def _branch_sample(
    branch: Branch,
    credit: list[TokenCredit],
    fresh: BoolArray,
    name: str,
    origin: SampleOrigin,
    reward: float,
) -> Sample:
    """All arrays are [T], cut together to the longest allowed length."""
    end = origin.max_length_tokens
    fresh = fresh[:end]
    length = len(fresh)
    sampled = np.array(branch.sampled_mask[:end], dtype=np.bool_)
    loss_weights = _loss_weights(credit, fresh)
    loss_mask = np.zeros(length, dtype=np.bool_)
    for weights in loss_weights.values():
        loss_mask |= weights != 0
    advantages = _joined([it.advantages for it in credit], length)
    return Sample(
        id=name,
        environment=origin.environment,
        group_id=origin.group_id,
        episode_id=origin.episode_id,
        reward=reward,
        versions=origin.versions,
        token_ids=np.array(branch.token_ids[:end], dtype=np.int32),
        loss_mask=loss_mask,
        sampling_logprobs=np.array(branch.logprobs[:end], dtype=np.float32),
        temperatures=np.where(sampled, np.float32(origin.temperature), np.float32(1.0)),
        advantages=np.where(loss_mask, advantages, np.float32(0.0)),
        reference_logprobs=_joined([it.reference_logprobs for it in credit], length),
        loss_weights=loss_weights,
    )


def _loss_weights(credit: list[TokenCredit], fresh: BoolArray) -> dict[str, FloatArray]:
    """What the algorithm weighed; a message with advantages that was not weighed for `rl` weighs 1
    on its sampled tokens."""
    weights: dict[str, FloatArray] = {}
    for name in LOSS_NAMES:
        parts = [
            it.loss_weights.get(name, it.default_weight if name == "rl" else it.nothing)
            for it in credit
        ]
        if name == "rl" or any(name in it.loss_weights for it in credit):
            weights[name] = np.where(fresh, _joined(parts, len(fresh)), np.float32(0.0))
    return weights


def _per_token(nodes: list[MessageNode], values: list[bool]) -> BoolArray:
    """One value per message widened to its tokens, [T]."""
    return np.repeat(np.array(values, dtype=np.bool_), [len(node.token_ids) for node in nodes])


def _joined(parts: list[Floats], length: int) -> FloatArray:
    """The arrays of the messages end to end, the first `length` values, [T]."""
    joined: FloatArray = np.concatenate(parts)[:length].astype(np.float32)
    return joined
