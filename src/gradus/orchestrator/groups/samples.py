"""An episode becomes samples: one per branch of every trace that may train (pure).

A sampled turn that several branches share trains in the first of them only; the others carry it as
context, with weight 0. A quarantined turn is context too: the environment could not read its text,
so the reward says nothing about it. Next page: `../trainer_link.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs
from numpy.typing import NDArray
from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import Branch, WireTrace

from gradus.orchestrator.algorithms.base import EpisodeCredit, TokenCredit, settle_credit
from gradus.orchestrator.traces import (
    image_spans,
    token_experts,
    token_temperatures,
    token_versions,
    untrained_turns,
)
from gradus.orchestrator.types import Group, PlayedEpisode
from gradus.wire.episode import QUARANTINED_TURNS
from gradus.wire.images import whole_length
from gradus.wire.sample import Sample
from gradus.wire.tokens import LOSS_NAMES, BoolArray, FloatArray, TokenArrays
from gradus.wire.versions import VersionSpan, runs_of

TRAINED = "trained"
"""The fate of tokens that train."""


@dataclass(frozen=True)
class SampleOrigin:
    """What all samples of one episode share."""

    environment: str
    group_id: str
    episode_id: str
    versions: VersionSpan
    temperature: float
    """Of every sampled token that has no other."""
    max_length_tokens: int
    """Longer branches are cut at their end."""


@dataclass(frozen=True)
class BuiltEpisode:
    """A finished episode and its samples, before filters."""

    played: PlayedEpisode
    episode: WireEpisode
    samples: list[Sample]


def build_group_samples(
    group: Group,
    credit: Mapping[str, EpisodeCredit],
    *,
    temperature: float,
    max_length_tokens: int,
) -> list[BuiltEpisode]:
    """The samples of every finished episode of a scored group, with its credit by episode."""
    return [
        BuiltEpisode(
            played,
            episode,
            build_samples(
                episode,
                SampleOrigin(
                    environment=group.source,
                    group_id=group.id,
                    episode_id=played.id,
                    versions=played.versions,
                    temperature=temperature,
                    max_length_tokens=max_length_tokens,
                ),
                credit.get(played.id),
            ),
        )
        for played, episode in group.finished
    ]


def build_samples(
    episode: WireEpisode, origin: SampleOrigin, credit: EpisodeCredit | None = None
) -> list[Sample]:
    """The samples of one scored episode; branches without a token to train give none.

    `credit` is what `settle_credit` found on the episode; None reads it again.
    """
    credits = settle_credit(episode) if credit is None else credit
    samples: list[Sample] = []
    for index, trace in enumerate(episode.traces):
        if trace.ok and trace.agent.trainable:
            samples.extend(_trace_samples(trace, index, origin, credits))
    return samples


def _trace_samples(
    trace: WireTrace, index: int, origin: SampleOrigin, credit: EpisodeCredit
) -> list[Sample]:
    samples: list[Sample] = []
    # By identity: branches share their messages.
    trained = {id(node) for node in _quarantined_nodes(trace)}
    for branch in trace.branches:
        if not branch.trainable:
            continue
        fresh = _per_token(branch.nodes, [id(node) not in trained for node in branch.nodes])
        trained.update(id(node) for node in branch.nodes)
        name = f"{origin.episode_id}/{index}/{branch.index}"
        nodes = [credit[id(node)] for node in branch.nodes]
        images = image_spans(trace, branch.nodes)
        for image in images:  # whose placeholders renderers count to the body of their message
            fresh[image.start : image.end] = False
        length = whole_length(images, origin.max_length_tokens)
        versions = token_versions(trace, branch.nodes)[:length]
        of_branch = replace(origin, versions=origin.versions.within(versions))
        temperatures = token_temperatures(trace, branch.nodes, origin.temperature)
        of_branch = replace(of_branch, max_length_tokens=length)
        sample = _branch_sample(branch, nodes, fresh, name, of_branch, trace.reward, temperatures)
        sample = structs.replace(
            sample,
            token_versions=runs_of(versions),
            images=[it for it in images if it.end <= length],
        )
        if bool(sample.arrays.loss_mask.any()):
            samples.append(sample)
    return samples


def token_fates(group: Group) -> Counter[str]:
    """Sampled tokens of the episodes of a settled group: how many train, under TRAINED, and of the
    others how many for which reason. What branches share counts once."""
    kept = {sample.id: sample for sample in group.samples if sample.id not in group.dropped}
    fates: Counter[str] = Counter()
    for played in group.played:
        for index, trace in enumerate(played.episode.traces if played.episode else ()):
            if trace.agent.trainable and played.failure is None and trace.ok:
                named = f"{played.id}/{index}"
                otherwise = group.dropped.get(played.id, "no_credit")
                fates += _trace_fates(trace, named, kept, group.dropped, otherwise)
            elif trace.agent.trainable:
                fates["failed"] += sum(node.mask.count(True) for node in trace.nodes)
    return fates


def _trace_fates(
    trace: WireTrace,
    named: str,
    kept: Mapping[str, Sample],
    dropped: Mapping[str, str],
    otherwise: str,
) -> Counter[str]:
    fates: Counter[str] = Counter()
    seen = set[int]()
    for node, reason in _quarantine_reasons(trace):
        fates[reason] += node.mask.count(True)
        seen.add(id(node))
    for branch in trace.branches:
        name = f"{named}/{branch.index}"
        fresh = _per_token(branch.nodes, [id(node) not in seen for node in branch.nodes])
        seen.update(id(node) for node in branch.nodes)
        sampled = fresh & np.concatenate([np.array(it.mask, np.bool_) for it in branch.nodes])
        if name not in kept:
            fates[dropped.get(name, otherwise)] += int(np.count_nonzero(sampled))
            continue
        trains = kept[name].arrays.loss_mask
        fates["too_long"] += int(np.count_nonzero(sampled[len(trains) :]))
        sampled = sampled[: len(trains)]
        fates[TRAINED] += int(np.count_nonzero(sampled & trains))
        fates["no_credit"] += int(np.count_nonzero(sampled & ~trains))
    return fates


def _quarantine_reasons(trace: WireTrace) -> Iterator[tuple[MessageNode, str]]:
    """Each quarantined message, and why."""
    turns = [node for node in trace.nodes if node.sampled]
    reasons = {it: why for why, listed in untrained_turns(trace).items() for it in listed}
    for number in trace.info.get(QUARANTINED_TURNS, ()):
        yield turns[number], reasons.get(number, "quarantined").replace(" ", "_")


def _quarantined_nodes(trace: WireTrace) -> list[MessageNode]:
    """The sampled messages that the environment could not read; they train nothing."""
    turns = [node for node in trace.nodes if node.sampled]
    return [turns[number] for number in trace.info.get(QUARANTINED_TURNS, ())]


def _branch_sample(
    branch: Branch,
    credit: list[TokenCredit],
    fresh: BoolArray,
    name: str,
    origin: SampleOrigin,
    reward: float,
    temperatures: NDArray[np.float64],
) -> Sample:
    """The tokens of the branch, cut to the longest allowed length."""
    arrays = TokenArrays.build(
        np.array(branch.token_ids, dtype=np.int32),
        _loss_weights(credit, fresh),
        sampling_logprobs=np.array(branch.logprobs, dtype=np.float32),
        temperatures=temperatures,
        advantages=np.concatenate([it.advantages for it in credit]),
        reference_logprobs=np.concatenate([it.reference_logprobs for it in credit]),
        experts=token_experts(branch.nodes),
    ).cut(origin.max_length_tokens)
    advantages = np.where(arrays.loss_mask, arrays.advantages, np.float32(0.0))
    return Sample(
        id=name,
        environment=origin.environment,
        group_id=origin.group_id,
        episode_id=origin.episode_id,
        reward=reward,
        versions=origin.versions,
        arrays=structs.replace(arrays, advantages=advantages),
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
            joined = np.concatenate(parts).astype(np.float32)
            weights[name] = np.where(fresh, joined, np.float32(0.0))
    return weights


def _per_token(nodes: list[MessageNode], values: list[bool]) -> BoolArray:
    """One value per message widened to its tokens, [T]."""
    return np.repeat(np.array(values, dtype=np.bool_), [len(node.token_ids) for node in nodes])
