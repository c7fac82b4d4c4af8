"""Which samples a filter keeps, and what becomes of its verdict."""

from __future__ import annotations

import copy
import json
import math
import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from builders import build_sample
from configs import build_filter_config

from gradus.config import GibberishConfig, ModelConfig, RepetitionConfig, algorithms
from gradus.config.schema.orchestrator import DEFAULT_FILTERS
from gradus.errors import ConfigError
from gradus.orchestrator.algorithms.base import Algorithm
from gradus.orchestrator.algorithms.group_relative import GroupRelative
from gradus.orchestrator.groups.filters import (
    ActiveFilter,
    FilterContext,
    Gibberish,
    Repetition,
    ZeroAdvantage,
    build_filters,
    dropped_by,
    judge,
    read_vocabulary_size,
)
from gradus.orchestrator.groups.grading import SourceGrader
from gradus.orchestrator.types import Failure, Group, PlayedEpisode, Task, TaskPointer, Verdict
from gradus.testing.episodes import build_episode, build_trace
from gradus.wire.sample import Sample
from gradus.wire.versions import VersionSpan

V = 151_936
CONTEXT = FilterContext(build_trace(), is_truncated=False, task_key="a1", episodes=[])


def graded_rewards(
    *rewards: float, algorithm: Algorithm, filters: Sequence[ActiveFilter] = ()
) -> tuple[Group, SourceGrader]:
    """A complete group with these rewards, and its grader."""
    group = Group("g0", TaskPointer("words", 0, 3), Task({}, "a1"))
    for number, reward in enumerate(rewards):
        episode = build_episode(reward=reward, seed=number)
        group.played.append(PlayedEpisode(f"g0.{number}", "g0", VersionSpan(0, 0), episode))
    enforced = [ActiveFilter(ZeroAdvantage(), is_enforced=True, name="zero_advantage"), *filters]
    return group, SourceGrader(algorithm, enforced, temperature=1.0, max_length_tokens=64)


def with_token(token_id: int, logprob: float) -> Sample:
    """A sample whose last token is this one."""
    sample = build_sample()
    sample.arrays.token_ids[-1] = token_id
    sample.arrays.sampling_logprobs[-1] = logprob
    return sample


def with_probabilities(*rows: tuple[int, float]) -> Sample:
    """A prompt of two tokens, then (number, probability) of sampled ones."""
    sample = build_sample(2 + sum(number for number, _ in rows))
    values = [math.log(p) for number, p in rows for _ in range(number)]
    return sample.with_arrays(sampling_logprobs=np.array([0.0, 0.0, *values], np.float32))


def test_zero_advantage_drops_what_has_no_gradient() -> None:
    assert not ZeroAdvantage().keeps(build_sample(advantage=0.0), CONTEXT)
    assert ZeroAdvantage().keeps(build_sample(advantage=-0.25), CONTEXT)


@pytest.mark.parametrize(("advantage", "is_kept"), [(1.0, True), (1e-3, True), (1e-17, False)])
def test_zero_advantage_compares_credit_with_credit_and_not_with_the_reward(
    advantage: float, is_kept: bool
) -> None:
    sample = msgspec.structs.replace(build_sample(advantage=advantage), reward=2e9)
    context = replace(CONTEXT, largest_credit=1.0)
    assert ZeroAdvantage().keeps(sample, context) is is_kept


def test_a_success_of_two_billion_trains_beside_its_failures() -> None:
    group, grader = graded_rewards(
        0.0, 2e9, algorithm=GroupRelative(algorithms.GrpoConfig(scale_by_std=True))
    )
    grader.grade(group)
    assert [sample.reward for sample in group.samples] == [0.0, 2e9]


def test_an_advantage_on_a_token_without_weight_is_no_gradient() -> None:
    sample = build_sample(advantage=1.0)
    weightless = sample.with_arrays(loss_weights={"rl": np.zeros(len(sample), np.float32)})
    assert not ZeroAdvantage().keeps(weightless, CONTEXT)


def test_another_loss_component_keeps_a_sample_without_advantage() -> None:
    sample = build_sample(advantage=0.0)
    weights = sample.arrays.loss_weights | {"ce": np.ones(len(sample), np.float32)}
    assert ZeroAdvantage().keeps(sample.with_arrays(loss_weights=weights), CONTEXT)


@pytest.mark.parametrize(
    ("token_id", "logprob", "is_kept"),
    [
        (100_001, -math.log(V) - 2.01, False),
        (100_001, -math.log(V) - 1.99, True),
        (100_000, -100.0, True),
    ],
)
def test_gibberish_is_a_high_token_below_chance(
    token_id: int, logprob: float, is_kept: bool
) -> None:
    assert (
        Gibberish(GibberishConfig(), vocabulary_size=V).keeps(with_token(token_id, logprob))
        is is_kept
    )


@pytest.mark.parametrize(("length", "is_kept"), [(2_999, True), (3_000, False)])
def test_repetition_is_three_thousand_certain_tokens_in_a_row(length: int, is_kept: bool) -> None:
    assert Repetition(RepetitionConfig()).keeps(with_probabilities((length, 0.991))) is is_kept


def test_one_uncertain_token_breaks_a_repetition() -> None:
    sample = with_probabilities((2_000, 0.999), (1, 0.98), (2_000, 0.999))
    assert Repetition(RepetitionConfig()).keeps(sample)


def test_tokens_of_probability_one_count_and_the_prompt_does_not() -> None:
    sample = with_probabilities((4, 1.0))
    assert Repetition(RepetitionConfig(tokens=5)).keeps(sample)
    assert not Repetition(RepetitionConfig(tokens=4)).keeps(sample)


def test_an_enforced_filter_drops_and_another_flags() -> None:
    configs = [
        build_filter_config("repetition", enforce=False, tokens=1, probability=0.01),
        build_filter_config("zero_advantage"),
    ]
    filters = build_filters(configs, vocabulary_size=None)
    verdicts = judge(filters, build_sample(advantage=0.0), CONTEXT)
    assert verdicts == {"repetition": Verdict.FLAG, "zero_advantage": Verdict.DROP}
    assert dropped_by(verdicts) == "zero_advantage"
    verdicts = judge(filters, build_sample(), CONTEXT)
    assert verdicts == {"repetition": Verdict.FLAG, "zero_advantage": Verdict.KEEP}
    assert dropped_by(verdicts) is None


def test_only_zero_advantage_is_enforced_by_default() -> None:
    filters = build_filters(DEFAULT_FILTERS, vocabulary_size=V)
    assert {f.filter.name: f.is_enforced for f in filters} == {
        "gibberish": False,
        "repetition": False,
        "zero_advantage": True,
    }


def test_without_a_vocabulary_a_flagging_filter_is_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    filters = build_filters(DEFAULT_FILTERS, vocabulary_size=None)
    assert [f.filter.name for f in filters] == ["repetition", "zero_advantage"]
    assert "write it into its options as vocabulary_size" in caplog.text


def test_without_a_vocabulary_an_enforced_filter_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs the size of the vocabulary"):
        build_filters([build_filter_config("gibberish")], vocabulary_size=None)


def test_a_vocabulary_in_the_options_is_enough() -> None:
    config = build_filter_config("gibberish", vocabulary_size=V)
    assert len(build_filters([config], vocabulary_size=None)) == 1


class TooLong:
    """A filter as a user writes it."""

    name = "too_long"

    def __init__(self, *, tokens: int) -> None:
        self._tokens = tokens

    def keeps(self, sample: Sample) -> bool:
        return len(sample) <= self._tokens


def test_a_filter_of_the_user_works_from_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type("module", (), {"TooLong": TooLong})
    monkeypatch.setitem(sys.modules, "my_filters", module)
    config = build_filter_config("my_filters:TooLong", options={"tokens": 5})
    filters = build_filters([config], vocabulary_size=None)
    assert dropped_by(judge(filters, build_sample(6), CONTEXT)) == "too_long"
    assert dropped_by(judge(filters, build_sample(5), CONTEXT)) is None


class CutInAGoodGroup:
    """A filter of a user that looks at the trace, its truncation and the group."""

    name = "cut"
    needs_context = True

    def keeps(self, sample: Sample, context: FilterContext) -> bool:
        rewards = [trace.reward for episode in context.episodes for trace in episode.traces]
        is_good = max(rewards) == 1.0 and len(context.failed) == 1
        return not (is_good and context.is_truncated and context.trace.reward == sample.reward)


def test_a_filter_of_the_user_sees_the_trace_its_truncation_and_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = type("module", (), {"Cut": CutInAGoodGroup})
    monkeypatch.setitem(sys.modules, "my_filters", module)
    filters = build_filters([build_filter_config("my_filters:Cut")], vocabulary_size=None)
    group = Group("g0", TaskPointer("words", 0, 0), Task({}, "a1"))
    cut = build_trace(reward=0.5, seed=1)
    cut.stop_condition = "max_turns"
    traces = [build_trace(reward=1.0), cut, build_trace(error="TaskError")]
    for number, trace in enumerate(traces):
        failure = None if trace.ok else Failure("TaskError", "scripted")
        episode = build_episode([trace])
        played = PlayedEpisode(f"g0.{number}", "g0", VersionSpan(0, 0), episode, failure)
        group.played.append(played)
    SourceGrader(
        GroupRelative(algorithms.GrpoConfig()), filters, temperature=1.0, max_length_tokens=64
    ).grade(group)
    assert group.dropped == {"g0.1/0/0": "cut", "g0.2": "error:TaskError"}
    assert [sample.id for sample in group.samples] == ["g0.0/0/0"]


def test_a_filter_with_another_signature_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = type("Wrong", (TooLong,), {"needs_context": True})
    monkeypatch.setitem(sys.modules, "my_filters", type("module", (), {"Wrong": wrong}))
    config = build_filter_config("my_filters:Wrong", options={"tokens": 5})
    with pytest.raises(ConfigError, match=r"must have `keeps\(sample, context\)`"):
        build_filters([config], vocabulary_size=None)


@pytest.mark.parametrize(
    ("content", "size"),
    [
        ({"vocab_size": 100}, 100),
        ({"text_config": {"vocab_size": 7}}, 7),
        ({"vocab_size": "many"}, None),
        ([], None),
    ],
)
def test_the_vocabulary_is_read_from_the_model_s_config(
    tmp_path: Path, content: object, size: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read_vocabulary_size(ModelConfig(name=str(tmp_path))) == size


@pytest.mark.parametrize("name", ["someone/never-fetched-model", "no/such/folder", "./nowhere"])
def test_a_model_that_is_not_here_has_no_known_vocabulary(name: str) -> None:
    assert read_vocabulary_size(ModelConfig(name=name)) is None


def test_a_torn_config_has_no_known_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert read_vocabulary_size(ModelConfig(name=str(tmp_path))) is None


def test_what_rounding_left_of_an_advantage_is_no_gradient() -> None:
    """A user's own r - mean(r) of rewards that are equal up to rounding."""
    sample = build_sample(advantage=0.1 + 0.2 - 0.3)
    assert not ZeroAdvantage().keeps(sample, CONTEXT)


def test_two_filters_of_one_type_keep_both_verdicts() -> None:
    configs = [
        build_filter_config("repetition", enforce=True, tokens=3),
        build_filter_config("repetition", enforce=False, tokens=100),
    ]
    filters = build_filters(configs, vocabulary_size=V)
    verdicts = judge(filters, with_probabilities((9, 0.999)), CONTEXT)
    assert verdicts == {"repetition": Verdict.DROP, "repetition_2": Verdict.KEEP}
    assert dropped_by(verdicts) == "repetition"


class Listing:
    """Keeps what it was given."""

    name = "listing"
    needs_context = True

    def __init__(self) -> None:
        self.contexts: list[FilterContext] = []

    def keeps(self, sample: Sample, context: FilterContext) -> bool:
        self.contexts.append(context)
        return True


def test_a_group_is_listed_once_for_all_its_samples() -> None:
    """Once for each sample, a group of 2,048 held the event loop for seconds."""
    listing = Listing()
    rewards = [float(number % 2) for number in range(8)]
    chosen = ActiveFilter(listing, is_enforced=True, name="listing")
    group, grader = graded_rewards(
        *rewards, algorithm=GroupRelative(algorithms.GrpoConfig()), filters=[chosen]
    )
    grader.grade(group)
    assert len(listing.contexts) == 8
    assert len({id(context.episodes) for context in listing.contexts}) == 1
    assert len({id(context.failed) for context in listing.contexts}) == 1


def test_the_sample_of_a_filter_can_be_copied_and_its_copy_changed() -> None:
    sample = build_sample()
    for copied in (copy.deepcopy(sample.frozen()), pickle.loads(pickle.dumps(sample.frozen()))):
        assert (copied.arrays.token_ids == sample.arrays.token_ids).all()
        copied.arrays.advantages[:] = 0
        copied.arrays.loss_weights["rl"] = copied.arrays.advantages
    assert sample.arrays.loss_weights["rl"].any()
