"""Bytes that cross a process decode to what was sent, or to a named error."""

from __future__ import annotations

import contextlib
import tracemalloc
import zlib

import msgspec
import numpy as np
import pytest
from builders import build_micro_batch, build_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus.errors import ProtocolError
from gradus.wire.codec import decode, decode_rank_batch, encode
from gradus.wire.events import Event, PolicyPublished, StepFinished, TrainerDone
from gradus.wire.micro_batch import Batch, RankBatch
from gradus.wire.sample import Sample
from gradus.wire.versions import VersionSpan

EVENTS: list[Event] = [
    StepFinished(step=3, term=1, metrics={"loss/total/mean": 0.5}),
    PolicyPublished(version=4, term=1, directory="weights/version_00000004", digest="ab"),
    TrainerDone(step=9, term=1),
]


def build_rank_batch() -> RankBatch:
    batch = Batch(2, 1, VersionSpan(1, 2), [[build_micro_batch()], [build_micro_batch()]])
    return batch.by_rank()[1]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_survives_the_wire(event: Event) -> None:
    assert decode(encode(event), Event) == event


@given(length=st.integers(1, 40), seed=st.integers(0, 99))
def test_a_sample_survives_the_wire(length: int, seed: int) -> None:
    sample = build_sample(length, prompt_length=length // 2, seed=seed)
    back: Sample = decode(encode(sample), Sample)
    back.check()
    for name, array in sample.arrays.by_name().items():
        np.testing.assert_array_equal(back.arrays.by_name()[name], array)
        assert back.arrays.by_name()[name].dtype == array.dtype


def test_experts_of_tokens_are_small_on_the_wire() -> None:
    sample = build_sample(1000, prompt_length=500)
    experts = np.random.default_rng(0).integers(0, 8, (1000, 4, 2)).astype(np.int16)
    told = sample.with_arrays(experts=experts)
    back: Sample = decode(encode(told), Sample)
    back.check()
    np.testing.assert_array_equal(back.arrays.experts, experts)
    assert len(encode(told)) - len(encode(sample)) < experts.nbytes / 3


def test_experts_that_are_all_alike_survive_the_wire() -> None:
    alike = build_sample(9000).with_arrays(experts=np.full((9000, 48, 8), -1, np.int16))
    back: Sample = decode(encode(alike), Sample)
    np.testing.assert_array_equal(back.arrays.experts, alike.arrays.experts)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([1], "cannot have 3 bytes"),
        ([5_000_000], "claim to hold 10000000"),
        ([1 << 62, 4], "claim to hold"),
        ([0, 1 << 63], "not a valid Sample"),
    ],
)
def test_a_bomb_is_not_read_whatever_it_claims(shape: list[int], message: str) -> None:
    fields = msgspec.msgpack.decode(encode(build_sample()))
    bomb = zlib.compress(b"" if 0 in shape else b"\0" * 10_000_000)
    fields["arrays"]["experts"] = ["int16", shape, bomb]
    data = msgspec.msgpack.encode(fields)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=message):
            decode(data, Sample)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_an_array_that_is_nested_without_end_is_refused() -> None:
    fields = msgspec.msgpack.decode(encode(build_sample()))
    fields["arrays"]["experts"] = msgspec.Raw(b"\x91" * 100_000 + b"\x90")
    with pytest.raises(ProtocolError, match="not a valid Sample"):
        decode(msgspec.msgpack.encode(fields), Sample)


def test_each_rank_gets_its_own_part() -> None:
    part = decode_rank_batch(encode(build_rank_batch()))
    assert (part.rank, part.step, len(part.micro_batches)) == (1, 2, 1)


@pytest.mark.shows("SEC25")
def test_a_batch_with_a_value_that_is_not_finite_is_refused() -> None:
    part = build_rank_batch()
    part.micro_batches[0].arrays.advantages[0] = np.nan
    data = encode(part)
    with pytest.raises(ProtocolError, match="advantages"):
        decode_rank_batch(data)


@pytest.mark.parametrize(
    "array",
    [
        ["float64", [1], b"\0" * 8],
        ["object", [1], b"\0" * 8],
        ["int32", [2], b"\0" * 4],
        ["int32", [-1], b""],
        ["int32", "2", b"\0" * 8],
        ["int16", [2], b"\0" * 4],
        ["int16", [2], zlib.compress(b"\0" * 6)],
        ["int16", [2], zlib.compress(b"\0" * 4)[:-6]],
        [1, 2, 3],
        "int32",
    ],
)
def test_a_malformed_array_is_refused(array: object) -> None:
    message = msgspec.to_builtins(encode(build_sample()))
    fields = msgspec.msgpack.decode(encode(build_sample()))
    assert message
    fields["arrays"]["token_ids"] = array
    with pytest.raises(ProtocolError, match="not a valid Sample"):
        decode(msgspec.msgpack.encode(fields), Sample)


@pytest.mark.shows("SEC25")
def test_an_unknown_field_is_refused() -> None:
    fields = msgspec.msgpack.decode(encode(EVENTS[0]))
    with pytest.raises(ProtocolError, match="surprise"):
        decode(msgspec.msgpack.encode(fields | {"surprise": 1}), Event)


@pytest.mark.shows("SEC25", "SEC39")
@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_end_in_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_rank_batch(data)


@pytest.mark.shows("SEC39")
@given(position=st.integers(0, 5000), bit=st.integers(0, 7))
def test_a_flipped_bit_never_escapes_as_another_error(position: int, bit: int) -> None:
    data = bytearray(encode(build_rank_batch()))
    data[position % len(data)] ^= 1 << bit
    with contextlib.suppress(ProtocolError):
        assert decode_rank_batch(bytes(data)).micro_batches is not None
