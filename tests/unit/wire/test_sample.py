"""Invariant 2: all per-token arrays of a sample have one length, and hold only finite values."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from builders import build_micro_batch, build_sample
from hypothesis import given
from hypothesis import strategies as st

from gradus.errors import ProtocolError
from gradus.wire.sample import Sample

PER_TOKEN = [
    "token_ids",
    "loss_mask",
    "sampling_logprobs",
    "temperatures",
    "advantages",
    "reference_logprobs",
]


def with_weights(sample: Sample, **weights: np.ndarray) -> Sample:
    return sample.with_arrays(loss_weights=weights)


@given(length=st.integers(1, 60), seed=st.integers(0, 1000))
def test_a_built_sample_has_arrays_of_one_length(length: int, seed: int) -> None:
    sample = build_sample(length, prompt_length=length // 2, seed=seed)
    sample.check()
    assert {array.shape for array in sample.arrays.by_name().values()} == {(length,)}


@pytest.mark.shows("F42")
@given(field=st.sampled_from(PER_TOKEN), length=st.integers(2, 20), cut=st.integers(1, 5))
def test_a_ragged_sample_is_refused_by_field_name(field: str, length: int, cut: int) -> None:
    sample = build_sample(length, prompt_length=1)
    shorter = getattr(sample.arrays, field)[: max(0, length - cut)]
    ragged = sample.with_arrays(**{field: shorter})
    with pytest.raises(ProtocolError, match=r"has shape|has no tokens"):
        ragged.check()


@pytest.mark.shows("F38", "SEC25")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *itertools.product(["sampling_logprobs", "advantages"], [np.nan, np.inf, -np.inf]),
        *itertools.product(["reference_logprobs"], [np.inf, -np.inf]),
    ],
)
def test_a_value_that_is_not_finite_is_refused(field: str, value: float) -> None:
    sample = build_sample()
    array = getattr(sample.arrays, field).copy()
    array[-1] = value
    with pytest.raises(ProtocolError, match=field):
        sample.with_arrays(**{field: array}).check()


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(reward: float) -> None:
    with pytest.raises(ProtocolError, match="reward is"):
        msgspec.structs.replace(build_sample(), reward=reward).check()


def test_an_unknown_loss_weight_is_refused() -> None:
    sample = build_sample()
    wrong = with_weights(sample, rl_typo=np.ones(len(sample), np.float32))
    with pytest.raises(ProtocolError, match="rl_typo"):
        wrong.check()


def test_a_ragged_loss_weight_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"loss_weights\.ce has shape"):
        with_weights(build_sample(6), ce=np.ones(5, np.float32)).check()


@pytest.mark.shows("F43")
def test_a_negative_token_is_refused() -> None:
    sample = build_sample()
    tokens = sample.arrays.token_ids.copy()
    tokens[0] = -1
    with pytest.raises(ProtocolError, match="negative id"):
        sample.with_arrays(token_ids=tokens).check()


def test_a_temperature_of_zero_is_refused() -> None:
    sample = build_sample()
    with pytest.raises(ProtocolError, match="temperatures"):
        sample.with_arrays(temperatures=np.zeros(len(sample), np.float32)).check()


def test_an_empty_sample_is_refused() -> None:
    with pytest.raises(ProtocolError, match="has no tokens"):
        build_sample(0, prompt_length=0).check()


def test_a_micro_batch_must_add_up() -> None:
    micro_batch = build_micro_batch([build_sample(4), build_sample(5, seed=1)])
    micro_batch.check()
    with pytest.raises(ProtocolError, match="add up to 8"):
        msgspec.structs.replace(micro_batch, sequence_lengths=[4, 4]).check()


def test_a_micro_batch_refuses_ragged_arrays() -> None:
    sample = build_sample()
    shorter = build_micro_batch([sample.with_arrays(advantages=sample.arrays.advantages[1:])])
    with pytest.raises(ProtocolError, match="advantages has shape"):
        shorter.check()


def test_a_micro_batch_without_samples_is_a_dummy() -> None:
    micro_batch = build_micro_batch()
    assert not micro_batch.is_dummy
    assert msgspec.structs.replace(micro_batch, sample_ids=[]).is_dummy
