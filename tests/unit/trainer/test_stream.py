"""Conversations come in an order that follows from the seed, and what is left out is counted."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from gradus.errors import ConfigError
from gradus.trainer.data.conversation_samples import ConversationEncoder
from gradus.trainer.data.conversations import Conversation, PlainText
from gradus.trainer.data.mixture import Mixture
from gradus.trainer.data.stream import ConversationStream, RowsAhead
from gradus.wire.sample import Sample

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def build_stream(
    tokenizer: Any, rows: list[Conversation | PlainText], *, seed: int = 0, shuffle: bool = True
) -> ConversationStream:
    encoder = ConversationEncoder(tokenizer)
    return ConversationStream(rows, encoder, max_tokens=40, seed=seed, shuffle=shuffle)


def texts(count: int) -> list[Conversation | PlainText]:
    return [PlainText(f"row{i}", "p", "x" * (i + 1)) for i in range(count)]


def test_every_pass_takes_each_conversation_once_in_another_order(tokenizer: Any) -> None:
    stream = build_stream(tokenizer, texts(8))
    first = [sample.id for sample in stream.take(8)]
    second = [sample.id for sample in stream.take(8)]
    assert sorted(first) == sorted(second)
    assert first != second


def test_the_order_follows_from_the_seed(tokenizer: Any) -> None:
    orders = [
        [s.id for s in build_stream(tokenizer, texts(8), seed=seed).take(8)] for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]


def test_without_shuffling_rows_come_as_they_stand(tokenizer: Any) -> None:
    stream = build_stream(tokenizer, texts(3), shuffle=False)
    assert [s.id for s in stream.take(4)] == ["row0/0", "row1/0", "row2/0", "row0/0"]


def test_too_long_conversations_are_skipped_and_counted(tokenizer: Any) -> None:
    rows = [*texts(2), PlainText("long", "p", "x" * 100)]
    stream = build_stream(tokenizer, rows)
    assert all(sample.id != "long/0" for sample in stream.take(9))
    assert stream.num_skipped == 1


class CountingEncoder(ConversationEncoder):
    """Counts how often it encodes."""

    num_calls = 0

    def encode(self, conversation: Conversation | PlainText) -> list[Sample]:
        self.num_calls += 1
        return super().encode(conversation)


@pytest.mark.parametrize(
    ("kept_tokens", "num_calls"), [(0, 3 * 4 + 1), (10**6, 4 + 1)], ids=["nothing", "all"]
)
def test_what_does_not_fit_into_memory_is_encoded_again(
    tokenizer: Any, kept_tokens: int, num_calls: int
) -> None:
    encoder = CountingEncoder(tokenizer)
    rows = [*texts(4), PlainText("long", "a", "b " * 100)]
    stream = ConversationStream(
        rows, encoder, max_tokens=40, seed=0, shuffle=False, kept_tokens=kept_tokens
    )
    passes = [[sample.id for sample in stream.take(4)] for _ in range(3)]
    assert passes == [passes[0]] * 3
    assert encoder.num_calls == num_calls
    assert stream.num_skipped == 1


def test_data_without_anything_to_learn_is_refused(tokenizer: Any) -> None:
    stream = build_stream(tokenizer, [Conversation("row", [{"role": "user", "content": "hi"}], ())])
    with pytest.raises(ConfigError, match="none of 1 conversations"):
        stream.take(1)


def mixed_stream(tokenizer: Any, sizes: list[int], weights: list[float]) -> ConversationStream:
    rows = [
        PlainText(f"{name}{i}", "p", "x" * (i + 1))
        for name, size in zip("abc", sizes, strict=False)
        for i in range(size)
    ]
    encoder: Any = None if tokenizer is None else ConversationEncoder(tokenizer)
    mixture = Mixture(tuple(sizes), tuple(weights))
    return ConversationStream(rows, encoder, max_tokens=40, seed=0, shuffle=True, mixture=mixture)


@settings(max_examples=25, deadline=None)
@given(
    sets=st.lists(st.tuples(st.integers(1, 5), st.floats(0.1, 9)), min_size=2, max_size=3),
    num_read=st.integers(0, 40),
)
def test_each_data_set_has_its_share_at_any_time_and_a_resume_goes_on(
    sets: list[tuple[int, float]], num_read: int
) -> None:
    sizes, weights = (list(column) for column in zip(*sets, strict=True))
    stream = mixed_stream(None, sizes, weights)
    drawn = list(itertools.islice(stream._order, 60))
    for count in range(1, 61):
        for part, weight in enumerate(weights):
            taken = sum(one == part for one, _ in drawn[:count])
            assert abs(taken - count * weight / sum(weights)) < len(weights)
    for part, size in enumerate(sizes):
        mine = [index for one, index in drawn if one == part]
        for start in range(0, len(mine) - size + 1, size):
            assert len(set(mine[start : start + size])) == size, "each pass takes each once"
    first, second = mixed_stream(None, sizes, weights), mixed_stream(None, sizes, weights)
    assert list(itertools.islice(first._order, num_read)) == drawn[:num_read]
    assert second.resume_at(first.counters())
    assert list(itertools.islice(second._order, 60 - num_read)) == drawn[num_read:]


def test_a_data_set_of_a_mixture_that_teaches_nothing_is_refused(tokenizer: Any) -> None:
    rows = [*texts(3), PlainText("long", "p", "x" * 100)]
    mixture = Mixture((3, 1), (1.0, 1.0))
    stream = ConversationStream(
        rows, ConversationEncoder(tokenizer), max_tokens=40, seed=0, shuffle=True, mixture=mixture
    )
    with pytest.raises(ConfigError, match=r"none of 1 conversations .* \(the first is long\)"):
        stream.take(9)


def test_weights_belong_to_what_a_resume_must_find_again(tokenizer: Any) -> None:
    saved = mixed_stream(tokenizer, [2, 2], [1.0, 1.0]).counters()
    assert mixed_stream(tokenizer, [2, 2], [1.0, 1.0]).resume_at(saved)
    assert not mixed_stream(tokenizer, [2, 2], [1.0, 2.0]).resume_at(saved)
    assert not build_stream(tokenizer, texts(4)).resume_at(saved)


def test_rows_that_were_not_drawn_may_change_and_others_may_follow(tokenizer: Any) -> None:
    stream = build_stream(tokenizer, texts(6))
    drawn = {int(sample.id[3]) for sample in stream.take(3)}
    left = next(place for place in range(6) if place not in drawn)
    for changed, may_resume in ((left, True), (min(drawn), False)):
        rows = [*texts(6), PlainText("row6", "p", "new")]
        rows[changed] = PlainText(f"row{changed}", "p", "repaired")
        later = build_stream(tokenizer, rows)
        assert later.resume_at(stream.counters()) is may_resume
    later = build_stream(tokenizer, [*texts(6), PlainText("row6", "p", "new")])
    assert later.resume_at(stream.counters())
    rest = [int(sample.id[3]) for sample in later.take(3)]
    assert {*rest} == {*range(6)} - drawn, "this pass ends as it would have"
    assert {int(sample.id[3]) for sample in later.take(7)} == {*range(7)}
    again = build_stream(tokenizer, [*texts(6), PlainText("row6", "p", "new")])
    assert again.resume_at(later.counters())
    assert not build_stream(tokenizer, texts(6)).resume_at(later.counters())


def test_an_epoch_counts_the_rows_that_can_be_learned(tokenizer: Any) -> None:
    rows = [*texts(2), *(PlainText(f"long{n}", "p", "x" * 100) for n in range(18))]
    stream = build_stream(tokenizer, rows)
    ahead = RowsAhead(stream)
    ahead.wait(60, goes_on=False)
    assert (stream.skipped_share, stream.epoch) == (0.9, 0.0)
    stream.take(5)
    assert stream.epoch == 2.5


def test_a_wrong_row_is_found_before_it_is_drawn(tokenizer: Any) -> None:
    rows = [*texts(5), PlainText("data:6", "p", "\ud83d")]
    ahead = RowsAhead(build_stream(tokenizer, rows, shuffle=False))
    with pytest.raises(ConfigError, match="data:6"):
        ahead.wait(60, goes_on=True)
    ahead.close()
