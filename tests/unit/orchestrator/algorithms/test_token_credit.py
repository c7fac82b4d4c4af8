"""One layout of credit: a value per token of a message, written and read through one check."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from verifiers.v1.graph import MessageNode

from gradus.errors import CreditError
from gradus.orchestrator.algorithms.base import (
    CreditContext,
    assign_advantage,
    read_credit,
    settle_credit,
    write_credit,
)
from gradus.orchestrator.groups.samples import SampleOrigin, build_samples
from gradus.testing.episodes import build_episode, build_message, build_trace
from gradus.wire.versions import VersionSpan

ORIGIN = SampleOrigin("words", "g0", "g0.0", VersionSpan(0, 0), 1.0, 100)
NAN = math.nan


def reply() -> MessageNode:
    """Two tokens of the template, three that the model sampled."""
    return build_message(0, [5, 6, 7, 8, 9], sampled=3)


def test_credit_is_read_as_it_was_written_one_value_per_token() -> None:
    node = reply()
    write_credit(
        node,
        advantages=[0.0, 0.0, 0.1, 0.2, 0.3],
        reference_logprobs=[NAN, NAN, NAN, 0.0, -2.0],
        loss_weights={"ce": [0.0, 1.0, 0.0, 0.0, 0.5]},
    )
    credit = read_credit(node)
    assert credit.advantages.tolist() == [0.0, 0.0, 0.1, 0.2, 0.3]
    np.testing.assert_array_equal(credit.reference_logprobs, [NAN, NAN, NAN, 0.0, -2.0])
    assert credit.loss_weights["ce"].tolist() == [0.0, 1.0, 0.0, 0.0, 0.5]


def test_one_number_goes_to_every_sampled_token() -> None:
    node = reply()
    write_credit(node, advantages=0.5)
    assert read_credit(node).advantages.tolist() == [0.0, 0.0, 0.5, 0.5, 0.5]


def test_numbers_of_numpy_are_kept_as_plain_ones() -> None:
    node = reply()
    write_credit(node, advantages=np.float64(0.5), loss_weights={"ce": np.ones(5, np.float32)})
    assert [type(a) for a in node.advantages or ()] == [float] * 3
    assert node.loss_weights == {"ce": [1.0] * 5}


@pytest.mark.parametrize(
    ("credit", "complaint"),
    [
        ({"advantages": [0.1, 0.2, 0.3]}, "advantages has 3 values for 5 tokens"),
        ({"advantages": [0.0, 0.0, 0.1, NAN, 0.1]}, "advantages is nan at token 3"),
        ({"advantages": [0.0, 0.0, 0.1, 1e39, 0.1]}, r"advantages is 1e\+39 at token 3"),
        ({"advantages": math.inf}, "advantages is inf"),
        ({"advantages": [0.5] * 5}, "advantages is set at token 0, which the model did not sample"),
        ({"advantages": [0.0, 0.0, 0.1, None, 0.1]}, "not numbers, e.g. None"),
        ({"advantages": ["0.1"] * 5}, "not numbers, e.g. '0.1'"),
        ({"reference_logprobs": [-1.0] * 5}, "reference_logprobs is set at token 0"),
        ({"reference_logprobs": [NAN, NAN, -1.0, 3.0, -1.0]}, "a logprob is at most 0"),
        ({"reference_logprobs": [NAN, NAN, -1.0, -math.inf, -1.0]}, "-inf at token 3"),
        ({"loss_weights": {"kl": [1.0] * 5}}, "names 'kl'; use rl, ce"),
        ({"loss_weights": {"ce": [1.0] * 3}}, "has 3 values for 5 tokens"),
        ({"loss_weights": {"rl": [1.0] * 5}}, "set at token 0, which the model did not sample"),
        ({"loss_weights": {"ref_kl": [0.0, 0.0, 1.0, 1.0, 1.0]}}, "without a reference logprob"),
        ({"loss_weights": [1.0] * 5}, "must be a dict"),
        ({"loss_weights": {"ce": 1.0}}, "must have one value per token"),
    ],
)
def test_wrong_credit_is_refused_and_leaves_the_message_as_it_was(
    credit: dict[str, Any], complaint: str
) -> None:
    node = reply()
    with pytest.raises(CreditError, match=complaint):
        write_credit(node, **credit)
    assert (node.advantages, node.reference_logprobs, node.loss_weights) == (None, None, None)


@pytest.mark.parametrize("length", [2, 4, 5])
def test_credit_written_past_the_accessor_is_checked_too(length: int) -> None:
    """Padding or cutting would take the credit from the first token of a turn."""
    episode = build_episode()
    episode.traces[0].nodes[1] = node = reply()
    node.advantages = [0.5] * length
    with pytest.raises(
        CreditError, match=r"trace 0, agent 'agent', message 1 .assistant, 5 tokens"
    ):
        settle_credit(episode)
    with pytest.raises(CreditError, match=f"advantages has {length} values for 3 sampled tokens"):
        build_samples(episode, ORIGIN)


def test_a_message_that_is_not_weighed_keeps_its_weight_beside_one_that_is() -> None:
    episode = build_episode()
    trace = episode.traces[0]
    trace.nodes += [build_message(1, [4]), build_message(2, [5, 6], sampled=2)]
    write_credit(trace.nodes[1], advantages=1.0, loss_weights={"rl": [0.0, 0.5, 0.5, 0.5, 0.5]})
    write_credit(trace.nodes[3], advantages=1.0)
    (sample,) = build_samples(episode, ORIGIN)
    assert sample.arrays.loss_weights["rl"].tolist() == [0.0] * 4 + [0.5] * 4 + [0.0] + [1.0] * 2


@pytest.mark.parametrize("value", [NAN, math.inf, "0.5", None, [0.5]])
def test_a_number_about_a_group_must_be_one(value: Any) -> None:
    with pytest.raises(CreditError, match="'best'"):
        CreditContext("words", 0).record("best", value)


def test_a_number_of_numpy_about_a_group_becomes_a_plain_one() -> None:
    context = CreditContext("words", 0)
    context.record("best", np.float32(0.5))
    assert [(type(v), v) for v in context.numbers.values()] == [(float, 0.5)]


def test_a_number_of_a_group_needs_a_text_as_its_name() -> None:
    """A checkpoint could not give another one back."""
    with pytest.raises(CreditError, match="the name must be a text"):
        CreditContext("words", task_key="a1").record(3, 0.5)  # type: ignore[arg-type]


def test_one_advantage_for_a_trace_is_what_writing_each_message_gives() -> None:
    one, each = build_trace(turns=3), build_trace(turns=3)
    assign_advantage(one, 0.25)
    for node in each.nodes:
        if node.sampled:
            write_credit(node, advantages=0.25)
    assert [n.advantages for n in one.nodes] == [n.advantages for n in each.nodes]
    assert [node.advantages for node in one.nodes if node.sampled] != []


@pytest.mark.parametrize("advantage", [math.nan, math.inf, 1e30, "1"])
def test_one_advantage_that_is_no_usable_number_is_refused_and_nothing_is_written(
    advantage: Any,
) -> None:
    trace = build_trace()
    with pytest.raises(CreditError, match="advantages"):
        assign_advantage(trace, advantage)
    assert all(node.advantages is None for node in trace.nodes)
