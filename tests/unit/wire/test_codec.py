"""Bytes that cross a process decode to what was sent, or to a named error."""

from __future__ import annotations

import contextlib
import zlib

import msgspec
import numpy as np
import pytest
from builders import build_micro_batch, build_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus.errors import ProtocolError
from gradus.wire.codec import decode, decode_rank_batch, encode
from gradus.wire.events import BatchReceived, Event, PolicyPublished, StepFinished, TrainerDone
from gradus.wire.micro_batch import Batch, RankBatch
from gradus.wire.sample import Sample
from gradus.wire.versions import VersionSpan

EVENTS: list[Event] = [
    BatchReceived(step=3, term=1),
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


def test_experts_of_tokens_are_small_on_the_wire_and_a_bomb_is_not_read() -> None:
    sample = build_sample(1000, prompt_length=500)
    experts = np.random.default_rng(0).integers(0, 8, (1000, 4, 2)).astype(np.int16)
    told = sample.with_arrays(experts=experts)
    back: Sample = decode(encode(told), Sample)
    back.check()
    np.testing.assert_array_equal(back.arrays.experts, experts)
    assert len(encode(told)) - len(encode(sample)) < experts.nbytes / 3
    fields = msgspec.msgpack.decode(encode(told))
    fields["arrays"]["experts"] = ["int16", [1], zlib.compress(b"\0" * 10_000_000)]
    with pytest.raises(ProtocolError, match="cannot have 3 bytes"):
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
