"""From episodes to samples, with invariants 2 and 3 as properties over any tree of messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode

from gradus.orchestrator.algorithms.base import assign_advantage
from gradus.orchestrator.groups.samples import SampleOrigin, build_samples, token_fates
from gradus.orchestrator.traces import episode_versions
from gradus.orchestrator.types import Failure, Group, PlayedEpisode, Task, TaskPointer
from gradus.testing.episodes import build_episode, build_message, build_trace
from gradus.wire.versions import VersionSpan

ORIGIN = SampleOrigin(
    environment="words",
    group_id="g0",
    episode_id="g0.1",
    versions=VersionSpan(2, 3),
    temperature=0.7,
    max_length_tokens=1000,
)


def credited(episode: WireEpisode, advantage: float = 0.5) -> WireEpisode:
    for trace in episode.traces:
        assign_advantage(trace, advantage)
    return episode


def shared_turn() -> WireEpisode:
    """question → reply, then two different continuations, each with a reply of its own."""
    nodes = [
        build_message(None, [10, 11]),
        build_message(0, [20, 21, 22], sampled=2),
        build_message(1, [30]),
        build_message(2, [40, 41], sampled=1),
        build_message(1, [50, 51]),
        build_message(4, [60, 61], sampled=2),
    ]
    return credited(build_episode([build_trace(nodes)]))


def test_one_turn_is_one_sample_with_aligned_arrays() -> None:
    (sample,) = build_samples(credited(build_episode(reward=0.25)), ORIGIN)
    sample.check()
    assert sample.id == "g0.1/0/0"
    assert sample.reward == 0.25
    assert sample.versions == VersionSpan(2, 3)
    assert sample.arrays.loss_mask.tolist() == [False] * 4 + [True] * 4
    assert sample.arrays.advantages.tolist() == [0.0] * 4 + [0.5] * 4
    assert sample.arrays.loss_weights["rl"].tolist() == [0.0] * 4 + [1.0] * 4
    assert sample.arrays.sampling_logprobs.tolist() == [0.0] * 4 + [-0.5] * 4


def test_the_temperature_stands_on_sampled_tokens_only() -> None:
    (sample,) = build_samples(credited(build_episode()), ORIGIN)
    assert sample.arrays.temperatures.tolist() == pytest.approx([1.0] * 4 + [0.7] * 4)


def test_a_turn_with_a_temperature_of_its_own_trains_at_that_one() -> None:
    trace = build_trace(turns=2)
    trace.info["temperatures"] = {str(len(trace.nodes) - 1): 0.5}
    (sample,) = build_samples(credited(build_episode([trace])), ORIGIN)
    found = sample.arrays.temperatures[sample.arrays.loss_mask].tolist()
    assert found == pytest.approx([0.7] * 4 + [0.5] * 4)


def test_turns_of_one_conversation_are_one_sample() -> None:
    (sample,) = build_samples(credited(build_episode([build_trace(turns=3)])), ORIGIN)
    assert sample.arrays.loss_mask.sum() == 3 * 4
    assert len(sample) == 3 * 8


def test_a_turn_shared_by_branches_trains_in_the_first_only() -> None:
    first, second = build_samples(shared_turn(), ORIGIN)
    assert first.arrays.token_ids.tolist() == [10, 11, 20, 21, 22, 30, 40, 41]
    assert first.arrays.loss_mask.tolist() == [False, False, False, True, True, False, False, True]
    assert second.arrays.token_ids.tolist() == [10, 11, 20, 21, 22, 50, 51, 60, 61]
    assert second.arrays.loss_mask.tolist() == [False] * 7 + [True, True]
    assert [first.id, second.id] == ["g0.1/0/0", "g0.1/0/1"]


def test_a_shared_turn_is_context_with_its_temperature_and_without_weight() -> None:
    second = build_samples(shared_turn(), ORIGIN)[1]
    assert second.arrays.temperatures[3:5].tolist() == pytest.approx([0.7, 0.7])
    assert second.arrays.advantages[3:5].tolist() == [0.0, 0.0]
    assert second.arrays.loss_weights["rl"][3:5].tolist() == [0.0, 0.0]


def test_a_branch_without_a_token_of_its_own_gives_no_sample() -> None:
    episode = shared_turn()
    del episode.traces[0].nodes[5]
    episode.traces[0].nodes[4] = build_message(1, [50, 51])
    assert len(build_samples(episode, ORIGIN)) == 1


@pytest.mark.shows("F48")
def test_truncation_moves_all_arrays_together() -> None:
    origin = SampleOrigin("words", "g0", "g0.1", VersionSpan(0, 0), 0.7, max_length_tokens=6)
    (sample,) = build_samples(credited(build_episode()), origin)
    sample.check()
    assert len(sample) == 6
    assert sample.arrays.loss_mask.sum() == 2


def test_a_branch_cut_before_its_first_sampled_token_gives_no_sample() -> None:
    origin = SampleOrigin("words", "g0", "g0.1", VersionSpan(0, 0), 0.7, max_length_tokens=4)
    assert build_samples(credited(build_episode()), origin) == []


def test_a_trace_with_an_error_gives_no_sample() -> None:
    traces = [build_trace(error="ProviderError"), build_trace()]
    samples = build_samples(credited(build_episode(traces)), ORIGIN)
    assert [sample.id for sample in samples] == ["g0.1/1/0"]


def test_an_agent_that_does_not_train_gives_no_sample() -> None:
    assert build_samples(credited(build_episode([build_trace(trainable=False)])), ORIGIN) == []


def test_an_episode_without_credit_gives_no_sample() -> None:
    assert build_samples(build_episode(), ORIGIN) == []


def test_a_loss_weight_of_the_algorithm_brings_its_tokens_into_the_loss() -> None:
    episode = credited(build_episode())
    observation = episode.traces[0].nodes[0]
    observation.loss_weights = {"ce": [0.0, 0.1, 0.1]}
    (sample,) = build_samples(episode, ORIGIN)
    sample.check()
    assert sample.arrays.loss_weights["ce"].tolist() == pytest.approx([0.0, 0.1, 0.1] + [0.0] * 5)
    assert sample.arrays.loss_mask.tolist() == [False, True, True, False] + [True] * 4


def test_reference_logprobs_reach_the_sampled_tokens() -> None:
    episode = credited(build_episode())
    episode.traces[0].nodes[1].reference_logprobs = [-1.0, -2.0, -3.0, -4.0]
    (sample,) = build_samples(episode, ORIGIN)
    assert np.isnan(sample.arrays.reference_logprobs[:4]).all()
    assert sample.arrays.reference_logprobs[4:].tolist() == [-1.0, -2.0, -3.0, -4.0]


@st.composite
def message_trees(draw: st.DrawFn) -> list[MessageNode]:
    """Messages with any parent before them; each with tokens of its own, so that ids tell them."""
    nodes: list[MessageNode] = []
    for number in range(draw(st.integers(1, 10))):
        parent = draw(st.one_of(st.none(), st.integers(0, number - 1))) if number else None
        length = draw(st.integers(0, 4))
        sampled = draw(st.integers(0, length))
        tokens = list(range(100 * number, 100 * number + length))
        nodes.append(build_message(parent, tokens, sampled=sampled))
    return nodes


@settings(max_examples=80, deadline=None)
@given(nodes=message_trees(), longest=st.integers(1, 40))
def test_any_tree_trains_every_sampled_token_at_most_once(
    nodes: list[MessageNode], longest: int
) -> None:
    origin = SampleOrigin("words", "g0", "g0.1", VersionSpan(0, 0), 0.7, longest)
    samples = build_samples(credited(build_episode([build_trace(nodes)])), origin)
    trained: Counter[int] = Counter()
    for sample in samples:
        sample.check()
        assert len(sample) <= longest
        assert bool(sample.arrays.loss_mask.any())
        trained.update(sample.arrays.token_ids[sample.arrays.loss_mask].tolist())
    assert set(trained.values()) <= {1}


@settings(max_examples=50, deadline=None)
@given(nodes=message_trees())
def test_without_truncation_every_sampled_token_trains_exactly_once(
    nodes: list[MessageNode],
) -> None:
    episode = credited(build_episode([build_trace(nodes)]))
    trained = [
        token
        for sample in build_samples(episode, ORIGIN)
        for token in sample.arrays.token_ids[sample.arrays.loss_mask].tolist()
    ]
    sampled = [
        token
        for node in nodes
        for token, is_sampled in zip(node.token_ids, node.mask, strict=True)
        if is_sampled
    ]
    assert sorted(trained) == sorted(sampled)


@settings(max_examples=50, deadline=None)
@given(nodes=message_trees())
def test_unsampled_tokens_have_no_logprob_no_credit_and_temperature_one(
    nodes: list[MessageNode],
) -> None:
    sampled = {
        token
        for node in nodes
        for token, is_sampled in zip(node.token_ids, node.mask, strict=True)
        if is_sampled
    }
    for sample in build_samples(credited(build_episode([build_trace(nodes)])), ORIGIN):
        unsampled = ~np.isin(sample.arrays.token_ids, list(sampled))
        assert not sample.arrays.sampling_logprobs[unsampled].any()
        assert not sample.arrays.advantages[unsampled].any()
        assert (sample.arrays.temperatures[unsampled] == 1.0).all()


def quarantined(episode: WireEpisode, *turns: int) -> WireEpisode:
    episode.traces[0].info["quarantined_turns"] = list(turns)
    return episode


def test_a_quarantined_turn_masks_only_its_own_tokens() -> None:
    whole = build_samples(credited(build_episode([build_trace(turns=3)])), ORIGIN)[0]
    (sample,) = build_samples(
        quarantined(credited(build_episode([build_trace(turns=3)])), 1), ORIGIN
    )
    assert sample.arrays.loss_mask.tolist() == [
        is_trained and not 8 <= position < 16
        for position, is_trained in enumerate(whole.arrays.loss_mask.tolist())
    ]
    assert sample.arrays.token_ids.tolist() == whole.arrays.token_ids.tolist()
    assert sample.arrays.sampling_logprobs.tolist() == whole.arrays.sampling_logprobs.tolist()
    assert sample.arrays.temperatures.tolist() == whole.arrays.temperatures.tolist()


def test_a_quarantined_turn_that_branches_share_trains_in_none_of_them() -> None:
    first, second = build_samples(quarantined(shared_turn(), 0), ORIGIN)
    assert first.arrays.loss_mask.tolist() == [False] * 7 + [True]
    assert second.arrays.loss_mask.tolist() == [False] * 7 + [True, True]


def settled(episode: WireEpisode, limit: int = 1000) -> Group:
    """A group of one played episode with its samples."""
    played = PlayedEpisode(ORIGIN.episode_id, "g0", ORIGIN.versions, episode)
    group = Group("g0", TaskPointer("words", 0, 0), Task({}, 0), [played])
    group.samples = build_samples(episode, replace(ORIGIN, max_length_tokens=limit))
    return group


@settings(max_examples=50, deadline=None)
@given(nodes=message_trees(), limit=st.integers(1, 60), turn=st.integers(0, 3))
def test_each_sampled_token_has_one_fate(nodes: list[MessageNode], limit: int, turn: int) -> None:
    episode = credited(build_episode([build_trace(nodes)]))
    if turn < episode.traces[0].num_turns:
        quarantined(episode, turn)
    group = settled(episode, limit)
    fates = token_fates(group)
    assert fates.total() == sum(node.mask.count(True) for node in nodes)
    assert fates["trained"] == sum(int(it.arrays.loss_mask.sum()) for it in group.samples)


def test_why_tokens_do_not_train_is_told() -> None:
    # Five sampled tokens: two that branches share, then one and two of their own.
    assert token_fates(settled(shared_turn())) == {"trained": 5}
    cut = token_fates(settled(shared_turn(), limit=5))
    assert cut == {"trained": 2, "too_long": 1, "no_credit": 2}
    group = settled(shared_turn())
    group.dropped["g0.1/0/1"] = "gibberish"
    assert token_fates(group) == {"trained": 3, "gibberish": 2}
    group.give_up("stale")
    assert token_fates(group) == {"gibberish": 2, "stale": 3}
    group.played[0] = replace(group.played[0], failure=Failure("timeout", "late"))
    assert token_fates(group) == {"failed": 5}
    weighed = credited(build_episode())
    question, reply = weighed.traces[0].nodes
    question.loss_weights = {"ce": [1.0] * len(question.token_ids)}
    reply.loss_weights = {"rl": [float(is_sampled) for is_sampled in reply.mask]}
    reply.loss_weights["rl"][reply.mask.index(True)] = 0.0
    assert token_fates(settled(weighed)) == {"trained": 3, "no_credit": 1}
    asked = quarantined(shared_turn(), 0, 1)
    asked.traces[0].info["untrained_turns"] = {"temperature 0": [1], "unread": []}
    assert token_fates(settled(asked)) == {"trained": 2, "quarantined": 2, "temperature_0": 1}
    asked.traces[0].agent.trainable = False
    assert token_fates(settled(asked)) == {}


def test_a_trace_whose_every_turn_is_quarantined_gives_no_sample() -> None:
    assert build_samples(quarantined(credited(build_episode()), 0), ORIGIN) == []


def test_a_sample_has_the_versions_that_sampled_its_own_tokens() -> None:
    episode = shared_turn()
    trace = episode.traces[0]
    trace.info["policy_versions"] = {"1": [[2, 1], [3, 1]], "3": [[3, 1]], "5": [[3, 2]]}
    first, second = build_samples(episode, ORIGIN)
    assert first.token_versions == [(-1, 3), (2, 1), (3, 1), (-1, 2), (3, 1)]
    assert second.token_versions == [(-1, 3), (2, 1), (3, 1), (-1, 2), (3, 2)]
    assert episode_versions(episode).tolist() == [-1, -1, -1, 2, 3, -1, -1, 3, -1, -1, 3, 3]
    trace.info["policy_versions"] = {"1": [[3, 2]], "3": [[3, 1]], "5": [[3, 2]]}
    assert [it.versions for it in build_samples(episode, ORIGIN)] == [VersionSpan(3, 3)] * 2


def test_a_sample_that_was_cut_has_the_versions_of_what_is_left() -> None:
    episode = shared_turn()
    episode.traces[0].info["policy_versions"] = {"1": [[2, 1], [3, 1]], "3": [[3, 1]]}
    first, *_ = build_samples(episode, replace(ORIGIN, max_length_tokens=4))
    assert first.token_versions == [(-1, 3), (2, 1)]
    assert first.versions == VersionSpan(2, 2)


@pytest.mark.parametrize("noted", [None, 7, {"1": [[3, 1]]}, {"1": [[3, 2]], "3": "?"}])
def test_where_one_turn_has_no_versions_the_whole_episode_answers_for_it(noted: object) -> None:
    episode = shared_turn()
    episode.traces[0].info["policy_versions"] = noted
    first, *_ = build_samples(episode, ORIGIN)
    assert (first.versions, first.token_versions) == (VersionSpan(2, 3), [])
    assert len(episode_versions(episode)) == 0


def test_experts_of_a_branch_are_those_of_its_messages_where_they_are_known() -> None:
    episode = shared_turn()
    nodes = episode.traces[0].nodes
    for number in (0, 1, 2, 3):
        count = len(nodes[number].token_ids)
        nodes[number].routed_experts = np.full((count, 1, 2), number + 1, np.uint8)
    first, second = build_samples(episode, ORIGIN)
    first.check()
    for sample, expected in (
        # Nothing was computed with the last token.
        (first, [1, 1, 2, 2, 2, 3, 4, -1]),
        # What came after the shared reply does not say with what its last token was computed.
        (second, [1, 1, 2, 2, -1, -1, -1, -1, -1]),
    ):
        assert sample.arrays.experts is not None
        assert sample.arrays.experts[:, 0, 1].tolist() == expected
    short = replace(ORIGIN, max_length_tokens=5)
    cut = build_samples(episode, short)[0]
    cut.check()
    assert all(it.arrays.experts is None for it in build_samples(shared_turn(), ORIGIN))
