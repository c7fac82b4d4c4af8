"""What is believed of a returned episode, and what each kind of nonsense is called."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from mishaps import MISHAPS
from verifiers.v1.episode import WireEpisode
from verifiers.v1.trace import Error, Reward

from gradus.orchestrator.play.episode_check import find_failure
from gradus.orchestrator.types import EpisodeFailed, Failure
from gradus.testing.episodes import build_episode, build_message, build_trace
from gradus.wire.episode import CONTEXT_FULL


def kind_of(episode: WireEpisode) -> str | None:
    failure = find_failure(episode)
    return failure.kind if failure else None


def test_a_sound_episode_passes() -> None:
    assert find_failure(build_episode()) is None


@pytest.mark.shows("F37")
@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, None])
def test_a_reward_that_is_no_number_is_an_invalid_reward(reward: float | None) -> None:
    assert kind_of(build_episode([build_trace(reward=reward)])) == "invalid_reward"


def test_a_reward_that_overflows_with_its_weight_is_invalid() -> None:
    trace = build_trace()
    trace.rewards = {"huge": Reward(score=1e308, weight=1e308)}
    assert kind_of(build_episode([trace])) == "invalid_reward"


@pytest.mark.shows("F37", "F50")
def test_no_reward_at_all_is_invalid_and_not_zero() -> None:
    trace = build_trace()
    trace.rewards = {}
    failure = find_failure(build_episode([trace]))
    assert failure == Failure("invalid_reward", "agent 'agent' got no reward at all")


def test_the_reward_of_an_agent_that_does_not_train_does_not_matter() -> None:
    judge = build_trace(reward=math.nan, trainable=False)
    assert find_failure(build_episode([judge, build_trace()])) is None


def test_an_error_comes_before_everything_else() -> None:
    trace = build_trace([build_message(None, [1, 2])], reward=math.nan, error="ProviderError")
    failure = find_failure(build_episode([trace]))
    assert failure == Failure("ProviderError", "scripted")


def test_the_last_error_is_the_one_that_counts() -> None:
    episode = build_episode()
    episode.ok = False
    episode.errors = [Error(type="A", message="first"), Error(type="B", message="then")]
    assert kind_of(episode) == "B"


def test_a_failed_episode_without_an_error_is_called_by_its_deadline_or_unknown() -> None:
    episode = build_episode()
    episode.ok = False
    assert kind_of(episode) == "unknown"
    episode.traces[0].is_timeout = True
    assert kind_of(episode) == "timeout"


def test_an_episode_without_a_sampled_token_is_empty() -> None:
    trace = build_trace([build_message(None, [1, 2])])
    assert kind_of(build_episode([trace])) == "no_sampled_tokens"


@pytest.mark.shows("F63")
def test_a_first_prompt_that_fills_the_context_is_told_with_the_key_and_its_length() -> None:
    trace = build_trace([build_message(None, [1, 2])])
    trace.stop_condition = CONTEXT_FULL
    trace.info[CONTEXT_FULL] = "the prompt has 1224 tokens of 1024"
    failure = find_failure(build_episode([trace]))
    assert failure is not None
    assert failure.kind == "prompt_too_long"
    assert "model.max_length_tokens; raise it" in failure.message
    assert "(the prompt has 1224 tokens of 1024)" in failure.message


def shorten_logprobs(episode: WireEpisode) -> None:
    episode.traces[0].nodes[1].logprobs.pop()


def shorten_mask(episode: WireEpisode) -> None:
    episode.traces[0].nodes[1].mask.pop()


def spoil_logprob(value: float, episode: WireEpisode) -> None:
    episode.traces[0].nodes[1].logprobs[0] = value


def spoil_token(episode: WireEpisode) -> None:
    episode.traces[0].nodes[0].token_ids[0] = -1


def enlarge_token(episode: WireEpisode) -> None:
    episode.traces[0].nodes[0].token_ids[0] = 1 << 31


@pytest.mark.shows("F38", "F42", "F43")
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (shorten_logprobs, "4 sampled tokens have 3 logprobs"),
        (shorten_mask, "5 tokens have 4 mask values"),
        (partial(spoil_logprob, math.nan), "a logprob is nan"),
        (partial(spoil_logprob, 30.0), "a logprob is 30; one of a sampled token"),
        (partial(spoil_logprob, 2e-3), "a logprob is 0.002"),
        (partial(spoil_logprob, -1.1e4), "a logprob is -11000"),
        (spoil_token, "a token id is negative"),
        (enlarge_token, "token id 2147483648 is beyond the vocabulary of 2147"),
    ],
)
def test_ragged_or_impossible_tokens_are_refused_never_padded(
    spoil: Callable[[WireEpisode], None], words: str
) -> None:
    episode = build_episode()
    spoil(episode)
    failure = find_failure(episode)
    assert failure is not None
    assert failure.kind == "invalid_tokens"
    assert words in failure.message


def test_a_failure_tells_its_kind_first() -> None:
    assert str(EpisodeFailed(Failure("ProviderError", "refused"))) == "ProviderError: refused"


@pytest.mark.parametrize(("name", "mishap"), MISHAPS.items())
def test_every_mishap_is_a_failure_except_long_and_cut_episodes(name: str, mishap: Any) -> None:
    assert (kind_of(mishap(3)) is None) == (name in {"truncated", "huge"})


@pytest.mark.parametrize("numbers", [[1], [-1], ["0"], [True], 0, None])
def test_a_quarantine_of_turns_that_there_are_not_is_invalid(numbers: object) -> None:
    trace = build_trace()
    trace.info["quarantined_turns"] = numbers
    failure = find_failure(build_episode([trace]))
    assert failure is not None
    assert failure.kind == "invalid_quarantine"
    assert "it must list numbers of its 1 turns" in failure.message


@pytest.mark.parametrize("noted", [{"top_p": 1}, {"top_p": [1]}, {"top_p": ["0"]}, [0, 1], "x"])
def test_reasons_of_turns_that_there_are_not_are_invalid(noted: object) -> None:
    trace = build_trace()
    trace.info["untrained_turns"] = noted
    failure = find_failure(build_episode([trace]))
    assert failure is not None
    assert "info.untrained_turns" in failure.message


@pytest.mark.parametrize("noted", [{"1": 0}, {"1": "hot"}, {"1": float("inf")}, {"1": True}, [1]])
def test_a_temperature_that_is_none_is_invalid(noted: object) -> None:
    trace = build_trace()
    trace.info["temperatures"] = noted
    failure = find_failure(build_episode([trace]))
    assert failure is not None
    assert failure.kind == "invalid_temperature"


def test_a_quarantined_turn_is_no_failure() -> None:
    trace = build_trace(turns=2)
    trace.info["quarantined_turns"] = [0]
    assert find_failure(build_episode([trace])) is None


def test_rewards_whose_sum_is_not_finite_fail_the_episode() -> None:
    trace = build_trace()
    part = type(trace.rewards["reward"])
    trace.rewards = {"a": part(score=1e308), "b": part(score=1e308)}
    failure = find_failure(build_episode([trace]))
    assert failure is not None
    assert (failure.kind, "inf" in failure.message) == ("invalid_reward", True)


def test_an_error_that_says_nothing_is_told_by_the_end_of_its_traceback() -> None:
    episode = build_episode([build_trace(error="TaskError")])
    error = episode.traces[0].errors[0]
    error.message, error.traceback = " ", "Traceback (most recent call last):\nAssertionError\n"
    failure = find_failure(episode)
    assert failure is not None
    assert failure.message == "AssertionError"


@pytest.mark.parametrize("logprob", [-9999.0, 9e-4])
def test_a_logprob_as_engines_round_it_is_accepted(logprob: float) -> None:
    episode = build_episode()
    spoil_logprob(logprob, episode)
    assert find_failure(episode) is None
