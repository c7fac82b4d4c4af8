from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from configs import build_algorithm_config
from verifiers.v1.types import AssistantMessage, UserMessage

from gradus.config import algorithms
from gradus.config.schema.algorithms import AlgorithmConfig
from gradus.orchestrator.algorithms import build_algorithm, needs_reference
from gradus.orchestrator.algorithms.base import CreditContext
from gradus.orchestrator.algorithms.distill import (
    FrozenSampler,
    SelfDistillation,
    TokenizesExternal,
    score_branches,
)
from gradus.orchestrator.algorithms.retokenize import tokenize_trace
from gradus.orchestrator.groups.grading import SourceGrader
from gradus.orchestrator.groups.samples import SampleOrigin, build_samples
from gradus.orchestrator.play.episode_check import find_failure
from gradus.orchestrator.types import EpisodeFailed, Group, PlayedEpisode, Task, TaskPointer
from gradus.testing.episodes import build_episode, build_group, build_message, build_trace
from gradus.wire.images import name_of
from gradus.wire.versions import VersionSpan

CONTEXT = CreditContext("words", task_key="key-0")
ORIGIN = SampleOrigin("words", "g0", "g0.0", VersionSpan(0, 0), 1.0, 100)


class NumberedScorer:
    """Scores token number n of a prompt -n/10; writes each message as its letters' codes."""

    stop_token_ids = frozenset({0})

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        self.prompts.append(list(token_ids))
        return [-position / 10 for position in range(len(token_ids))]

    async def tokenize(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool,
    ) -> list[int]:
        written: list[int] = []
        for message in messages:
            role = {"system": 1, "user": 2, "assistant": 3}[message["role"]]
            written += [role, *map(ord, message["content"]), 0]
        return [*written, 3] if add_generation_prompt else written


async def test_opd_weighs_every_sampled_token_and_lays_the_teachers_logprobs_on_it() -> None:
    scorer = NumberedScorer()
    episode = build_episode([build_trace(turns=2)])
    await build_algorithm(build_algorithm_config("opd"), scorer).score_episode(episode, CONTEXT)
    (sample,) = build_samples(episode, ORIGIN)
    assert scorer.prompts == [sample.arrays.token_ids.tolist()]
    expected = -np.arange(len(sample)) / 10
    mask = sample.arrays.loss_weights["ref_kl"] != 0
    assert mask.tolist() == sample.arrays.loss_mask.tolist()
    assert int(mask.sum()) == 8
    assert np.allclose(
        sample.arrays.reference_logprobs, np.where(mask, expected, np.nan), equal_nan=True
    )
    assert not sample.arrays.loss_weights["rl"].any()


async def test_opd_asks_once_per_branch_and_scores_a_shared_turn_with_the_first() -> None:
    nodes = [
        build_message(None, [4, 5]),
        build_message(0, [6, 7], sampled=2),
        build_message(1, [8]),
        build_message(2, [9], sampled=1),
        build_message(1, [10]),
        build_message(4, [11], sampled=1),
    ]
    scorer = NumberedScorer()
    episode = build_episode([build_trace(nodes)])
    await build_algorithm(build_algorithm_config("opd"), scorer).score_episode(episode, CONTEXT)
    assert len(scorer.prompts) == 2
    samples = build_samples(episode, ORIGIN)
    assert sum(int(s.arrays.loss_mask.sum()) for s in samples) == 4


@pytest.mark.parametrize("name", ["opd", "opsd", "sft", "grpo with a reference"])
async def test_an_episode_that_shows_an_image_asks_nobody_who_would_not_see_it(name: str) -> None:
    scorer, shown = NumberedScorer(), build_message(0, [], sampled=0)
    shown.message = UserMessage(
        content=[{"type": "image_url", "image_url": {"url": name_of("ab" * 32)}}]
    )
    has_tokens = name != "sft"
    first = build_message(None, [4, 5] if has_tokens else [])
    reply = build_message(1, [6, 7] if has_tokens else [], sampled=2 if has_tokens else 0)
    reply.sampled = True
    episode = build_episode([build_trace([first, shown, reply])])
    hinted = algorithms.OpsdConfig(demonstration="prompt", hint="{demonstration}")
    sampler = FrozenSampler(algorithms.SftAlgorithmConfig(), reference=scorer)
    opd = build_algorithm(build_algorithm_config("opd"), scorer)
    asked = {
        "opd": opd.score_episode(episode, CONTEXT),
        "opsd": SelfDistillation(hinted, reference=scorer).score_episode(episode, CONTEXT),
        "sft": sampler.tokenize_external(episode),
        "grpo with a reference": score_branches(episode.traces[0], scorer),
    }
    with pytest.raises(EpisodeFailed, match="message 1 shows an image") as failed:
        await asked.pop(name)
    for it in asked.values():
        it.close()
    assert failed.value.failure.kind == "unseen_image"
    assert scorer.prompts == []


async def test_opsd_shows_the_demonstration_first_and_cuts_its_tokens_off() -> None:
    scorer = NumberedScorer()
    algorithm = SelfDistillation(
        algorithms.OpsdConfig(demonstration="prompt", hint="{demonstration}"), reference=scorer
    )
    episode = build_episode([build_trace(turns=1)])
    await algorithm.score_episode(episode, CONTEXT)
    (sample,) = build_samples(episode, ORIGIN)
    hint = [1, ord("a"), 0]
    assert scorer.prompts == [[*hint, *sample.arrays.token_ids.tolist()]]
    first = int(np.flatnonzero(sample.arrays.loss_mask)[0])
    assert sample.arrays.reference_logprobs[first] == pytest.approx(-(first + len(hint)) / 10)


async def test_opsd_fails_an_episode_without_a_demonstration() -> None:
    algorithm = SelfDistillation(
        algorithms.OpsdConfig(demonstration="absent"), reference=NumberedScorer()
    )
    with pytest.raises(EpisodeFailed, match="no field 'absent'"):
        await algorithm.score_episode(build_episode([build_trace()]), CONTEXT)


def frozen_trace(texts: Sequence[str], reward: float = 1.0, *, trainable: bool = True) -> Any:
    """User and assistant in turns, without tokens, of an agent behind a plain chat API."""
    nodes = []
    for number, text in enumerate(texts):
        node = build_message(number - 1 if number else None, [])
        is_reply = number % 2 == 1
        node.message = AssistantMessage(content=text) if is_reply else UserMessage(content=text)
        node.sampled = is_reply
        nodes.append(node)
    return build_trace(nodes, trainable=trainable, reward=reward)


async def test_a_frozen_players_turns_get_the_students_tokens_and_train_as_ce() -> None:
    algorithm = FrozenSampler(algorithms.SftAlgorithmConfig(), reference=NumberedScorer())
    assert isinstance(algorithm, TokenizesExternal)
    episode = build_episode([frozen_trace(["a", "b", "c", "d"])])
    await algorithm.tokenize_external(episode)
    assert find_failure(episode) is None
    await algorithm.score_episode(episode, CONTEXT)
    (sample,) = build_samples(episode, ORIGIN)
    a, b, c, d = map(ord, "abcd")
    assert sample.arrays.token_ids.tolist() == [2, a, 0, 3, b, 0, 2, c, 0, 3, d, 0]
    trained = sample.arrays.token_ids[sample.arrays.loss_weights["ce"] != 0].tolist()
    assert trained == [b, 0, d, 0]
    assert not sample.arrays.sampling_logprobs.any()


async def test_what_the_environment_keeps_from_training_is_no_data() -> None:
    """A simulated user speaks through a frozen model too; the policy must not learn its lines."""
    algorithm = FrozenSampler(algorithms.SftAlgorithmConfig(), reference=NumberedScorer())
    user = frozen_trace(["c", "d"], trainable=False)
    episode = build_episode([frozen_trace(["a", "b"]), user])
    await algorithm.tokenize_external(episode)
    await algorithm.score_episode(episode, CONTEXT)
    (sample,) = build_samples(episode, ORIGIN)
    assert sample.id == "g0.0/0/0"
    assert not any(node.token_ids for node in user.nodes)


async def test_min_reward_leaves_worse_episodes_out() -> None:
    algorithm = FrozenSampler(
        algorithms.SftAlgorithmConfig(min_reward=0.5), reference=NumberedScorer()
    )
    episode = build_episode([frozen_trace(["a", "b"], reward=0.25)])
    await algorithm.tokenize_external(episode)
    await algorithm.score_episode(episode, CONTEXT)
    assert build_samples(episode, ORIGIN) == []


async def test_a_template_that_rewrites_earlier_turns_fails_the_episode() -> None:
    class Rewriting(NumberedScorer):
        async def tokenize(self, messages: Any, **settings: Any) -> list[int]:
            return [len(messages), *await super().tokenize(messages, **settings)]

    with pytest.raises(EpisodeFailed, match="rewrites the tokens"):
        await tokenize_trace(frozen_trace(["a", "b", "c", "d"]), Rewriting())


async def test_a_trace_that_has_tokens_keeps_them() -> None:
    trace = build_trace(turns=1)
    before = [list(node.token_ids) for node in trace.nodes]
    await tokenize_trace(trace, NumberedScorer())
    assert [node.token_ids for node in trace.nodes] == before


def test_only_distilling_algorithms_ask_a_model() -> None:
    asking = {
        name
        for name in AlgorithmConfig.registered()
        if needs_reference(build_algorithm_config(name))
    }
    assert asking == {"opd", "opsd", "sft"}


async def test_a_reward_that_reaches_the_bar_up_to_rounding_is_an_example() -> None:
    episode = build_episode([build_trace(reward=0.1 + 0.2 + 0.7 - 1e-16)])
    await FrozenSampler(
        algorithms.SftAlgorithmConfig(min_reward=1.0), reference=NumberedScorer()
    ).score_episode(episode, CONTEXT)
    assert build_samples(episode, ORIGIN)


def played_group() -> Group:
    group = Group("g0", TaskPointer("words", 0, 0), Task({}, "a"))
    for number, episode in enumerate(build_group([0.0, 1.0])):
        group.played.append(PlayedEpisode(f"g0.{number}", "g0", VersionSpan(0, 0), episode))
    return group


async def test_a_reference_model_that_is_too_slow_is_not_blamed_on_the_algorithm() -> None:
    class Slow(NumberedScorer):
        async def score(self, token_ids: Sequence[int]) -> list[float]:
            await asyncio.Event().wait()
            raise AssertionError(token_ids)

    algorithm = build_algorithm(build_algorithm_config("grpo"))
    grader = SourceGrader(
        *(algorithm, [], 1.0), max_length_tokens=100, reference=Slow(), timeout_seconds=0.01
    )
    group = played_group()
    ((played, episode), *_) = group.finished
    with pytest.raises(EpisodeFailed, match="reference model") as failed:
        await grader.score_episode(episode, group, played.id)
    assert failed.value.failure.kind == "scoring_timeout"


@pytest.mark.parametrize("name", ["grpo", "max_rl", "echo"])
async def test_a_served_reference_scores_what_any_algorithm_trains(name: str) -> None:
    """Beside the advantages, and in no component of its own: the loss of rl reads it."""
    algorithm, scorer = build_algorithm(build_algorithm_config(name)), NumberedScorer()
    grader = SourceGrader(algorithm, [], 1.0, max_length_tokens=100, reference=scorer)
    group = played_group()
    for played, episode in group.finished:
        await grader.score_episode(episode, group, played.id)
    grader.grade(group)
    assert len(group.samples) == 2
    for sample in group.samples:
        is_trained = sample.arrays.loss_weights["rl"] != 0
        expected = np.where(is_trained, -np.arange(len(sample)) / 10, np.nan)
        assert np.allclose(sample.arrays.reference_logprobs, expected, equal_nan=True)
        assert "ref_kl" not in sample.arrays.loss_weights
