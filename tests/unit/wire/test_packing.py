"""Packing: every sample once, no bin too full, ranks alike."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from builders import build_sample
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gradus.errors import ConfigError, EmptyBatchError, ProtocolError
from gradus.wire.images import ImageSpan
from gradus.wire.micro_batch import MicroBatch
from gradus.wire.packing import (
    balance,
    build_dummy,
    fill_bins,
    image_tokens,
    pack,
    sample_cost,
    split_bins,
)
from gradus.wire.sample import Sample

lengths_of_batches = st.lists(st.integers(1, 24), min_size=1, max_size=40)


def samples_of(lengths: list[int]) -> list[Sample]:
    return [
        build_sample(length, prompt_length=1, seed=i, id=f"s{i}")
        for i, length in enumerate(lengths)
    ]


@settings(max_examples=60, deadline=None)
@given(lengths_of_batches, st.integers(1, 5), st.integers(24, 60))
def test_every_sample_is_packed_once_and_ranks_get_equally_many(
    lengths: list[int], num_ranks: int, max_tokens: int
) -> None:
    samples = samples_of(lengths)
    ranks = pack(samples, max_tokens=max_tokens, num_ranks=num_ranks)
    assert len(ranks) == num_ranks
    assert len({len(micro_batches) for micro_batches in ranks}) == 1
    packed = [id for micro_batches in ranks for m in micro_batches for id in m.sample_ids]
    assert sorted(packed) == sorted(sample.id for sample in samples)
    for micro_batch in (m for micro_batches in ranks for m in micro_batches):
        micro_batch.check()
        assert len(micro_batch) <= max_tokens


@settings(max_examples=30, deadline=None)
@given(lengths_of_batches, st.integers(1, 5))
def test_dummies_come_last_on_every_rank(lengths: list[int], num_ranks: int) -> None:
    for micro_batches in pack(samples_of(lengths), max_tokens=24, num_ranks=num_ranks):
        dummies = [m.is_dummy for m in micro_batches]
        assert dummies == sorted(dummies)


@settings(max_examples=60, deadline=None)
@given(lengths_of_batches, st.integers(1, 4))
def test_all_arrays_of_a_sample_move_together(lengths: list[int], num_ranks: int) -> None:
    samples = {sample.id: sample for sample in samples_of(lengths)}
    ranks = pack(list(samples.values()), max_tokens=48, num_ranks=num_ranks)
    for micro_batch in (m for micro_batches in ranks for m in micro_batches if m.sample_ids):
        start = 0
        for id, length in zip(micro_batch.sample_ids, micro_batch.sequence_lengths, strict=True):
            packed = micro_batch.arrays.by_name()
            for name, array in samples[id].arrays.by_name().items():
                np.testing.assert_array_equal(packed[name][start : start + length], array)
            assert np.array_equal(
                micro_batch.position_ids[start : start + length], np.arange(length)
            )
            start += length


def test_packing_is_deterministic() -> None:
    samples = samples_of([5, 9, 9, 3, 12, 1])
    first = pack(samples, max_tokens=16, num_ranks=2)
    second = pack(samples, max_tokens=16, num_ranks=2)
    assert [[m.sample_ids for m in r] for r in first] == [[m.sample_ids for m in r] for r in second]


def test_first_fit_decreasing_fills_the_first_bin_with_room() -> None:
    assert fill_bins([3, 7, 5, 4], 10) == [[1, 0], [2, 3]]


def test_the_dearest_bin_is_halved_until_ranks_are_even() -> None:
    bins = split_bins([[0, 1, 2], [3]], [5.0, 4.0, 1.0, 2.0], 3)
    assert sorted(map(sorted, bins)) == [[0], [1, 2], [3]]


def test_bins_of_one_sample_are_not_split() -> None:
    assert split_bins([[0]], [1.0], 2) == [[0]]


def test_one_sample_on_two_ranks_leaves_a_dummy_for_the_other() -> None:
    ranks = pack([build_sample(8)], max_tokens=16, num_ranks=2)
    assert sorted(m.is_dummy for micro_batches in ranks for m in micro_batches) == [False, True]


def test_a_dummy_carries_no_loss_weight() -> None:
    dummy = build_dummy(build_sample(8))
    dummy.check()
    assert dummy.arrays.loss_weights == {}
    assert not dummy.arrays.loss_mask.any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.5, 100), min_size=2, max_size=30))
def test_balance_is_never_worse_than_the_largest_cost(costs: list[float]) -> None:
    parts = balance(costs, 2)
    assert all(parts)
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    sums = [sum(costs[i] for i in part) for part in parts]
    assert abs(sums[0] - sums[1]) <= max(costs) + 1e-9


def test_balance_with_equal_counts_pairs_dear_with_cheap() -> None:
    parts = balance([8.0, 7.0, 2.0, 1.0], 2, equal_counts=True)
    assert sorted(parts) == [[0, 3], [1, 2]]


def test_cost_grows_faster_than_length() -> None:
    assert sample_cost(8192) > 2 * sample_cost(4096)


def test_names_missing_in_one_sample_weigh_zero_there() -> None:
    joined = MicroBatch.join([build_sample(3), build_sample_with_ce(4)])
    assert joined.arrays.loss_weights["ce"].tolist() == [0, 0, 0, 1, 1, 1, 1]


def build_sample_with_ce(length: int) -> Sample:
    sample = build_sample(length, seed=9)
    sample.arrays.loss_weights["ce"] = np.ones(length, np.float32)
    return sample


def showing(*images: tuple[int, int], number: int = 0) -> Sample:
    """A sample of 20 tokens that shows images, each by a number and its placeholders."""
    sample: Sample = build_sample(20, prompt_length=19, id=f"s{number}")
    start, spans = 0, []
    for name, length in images:
        spans.append(ImageSpan(f"{name:064x}", start, length))
        start += length
    return msgspec.structs.replace(sample, images=spans)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=2, unique=True), min_size=1, max_size=20),
    st.integers(1, 3),
)
def test_no_micro_batch_has_more_patches_than_it_may(
    shown: list[list[int]], num_ranks: int
) -> None:
    """Image n has n + 1 placeholders; together a sample has 11 at most."""
    samples = [showing(*((it, it + 1) for it in names), number=n) for n, names in enumerate(shown)]
    ranks = pack(samples, max_tokens=400, num_ranks=num_ranks, max_image_tokens=11)
    packed = [m for micro_batches in ranks for m in micro_batches]
    assert all(image_tokens(m.images) <= 11 for m in packed)
    assert sorted(it for m in packed for it in m.sample_ids) == sorted(s.id for s in samples)


def test_an_image_that_samples_share_counts_once_and_fills_a_micro_batch() -> None:
    samples = [showing((n // 4, 6), number=n) for n in range(8)]
    (one,) = pack(samples, max_tokens=400, num_ranks=1)
    (two,) = pack(samples, max_tokens=400, num_ranks=1, max_image_tokens=11)
    assert [len(m.sample_ids) for m in one] == [8]
    assert [sorted(m.sample_ids) for m in two] == [
        ["s0", "s1", "s2", "s3"],
        ["s4", "s5", "s6", "s7"],
    ]


def test_ranks_share_images_as_they_share_tokens() -> None:
    samples = [showing(*([(n, 18)] if n < 2 else []), number=n) for n in range(4)]
    ranks = pack(samples, max_tokens=20, num_ranks=2)
    assert [sum(bool(m.images) for m in of_rank) for of_rank in ranks] == [1, 1]


def test_a_sample_with_more_patches_than_a_micro_batch_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"sample s0: its 2 images stand for 9 tokens, the la.* 6"
    ):
        pack([showing((1, 3), (2, 6))], max_tokens=24, num_ranks=1, max_image_tokens=8)


@pytest.mark.shows("F48")
def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(EmptyBatchError):
        pack([], max_tokens=8, num_ranks=1)


@pytest.mark.shows("F48")
def test_a_sample_longer_than_a_micro_batch_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="episode-0/0/0 has 9 tokens"):
        pack([build_sample(9)], max_tokens=8, num_ranks=1)


def test_samples_of_which_some_have_experts_are_joined_and_cut_with_them() -> None:
    one, other, without = samples_of([3, 4, 2])
    one = one.with_arrays(experts=np.full((3, 2, 2), 5, np.int16))
    other = other.with_arrays(experts=np.full((4, 2, 2), 6, np.int16))
    joined = MicroBatch.join([one, without, other]).arrays
    joined.check("row")
    assert joined.experts is not None
    assert joined.experts[:, 1, 0].tolist() == [5, 5, 5, -1, -1, 6, 6, 6, 6]
    cut = joined.cut(4)
    assert cut.experts is not None
    assert len(cut.experts) == 4
    assert MicroBatch.join([without, without]).arrays.experts is None
    assert build_dummy(one).arrays.experts is None


@pytest.mark.parametrize(
    "experts",
    [np.zeros((2, 2, 2), np.int16), np.zeros((3, 2), np.int16), np.zeros((3, 2, 2), np.int32)],
)
def test_experts_that_do_not_fit_their_tokens_are_refused(experts: NDArray[Any]) -> None:
    (sample,) = samples_of([3])
    with pytest.raises(ProtocolError, match="sample s0: experts is int"):
        sample.with_arrays(experts=experts).check()


def test_samples_of_two_models_are_not_packed_together() -> None:
    one, other = samples_of([3, 3])
    one = one.with_arrays(experts=np.zeros((3, 2, 2), np.int16))
    other = other.with_arrays(experts=np.zeros((3, 4, 2), np.int16))
    with pytest.raises(ProtocolError, match="experts"):
        pack([one, other], max_tokens=8, num_ranks=1)
