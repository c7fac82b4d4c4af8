"""What the engine's process keeps of a reply, and when it waits for more requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from gradus.inference.engine.scheduler import (
    ARRIVING_SECONDS,
    FEW_REQUESTS,
    HOLD_SECONDS,
    LONGEST_WAIT_SECONDS,
    HeldReplies,
    StepPace,
)

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def sampled(token: int, name: str = "a", **more: Any) -> EngineCoreOutput:
    logprobs = LogprobsLists(
        np.array([[token, 0]], np.int32),
        np.array([[-token / 8, -0.5]], np.float32),
        np.array([1], np.int32),
    )
    return EngineCoreOutput(request_id=name, new_token_ids=[token], new_logprobs=logprobs, **more)


def test_a_reply_is_told_once_and_whole() -> None:
    held = HeldReplies()
    event = EngineCoreEvent.new_event(EngineCoreEventType.SCHEDULED, 1.0)
    stats = PrefillStats()
    assert held.take(sampled(1, events=[event], prefill_stats=stats), now=0.0) is None
    assert held.take(sampled(9, name="b"), now=0.0) is None
    assert held.take(sampled(2), now=0.1) is None
    told = held.take(sampled(3, finish_reason=FinishReason.STOP, stop_reason=3), now=0.2)
    assert told is not None
    assert told.new_token_ids == [1, 2, 3]
    assert told.new_logprobs is not None
    assert told.new_logprobs.logprobs[:, 0].tolist() == [-0.125, -0.25, -0.375]
    assert told.new_logprobs.logprob_token_ids[:, 0].tolist() == [1, 2, 3]
    assert (told.finish_reason, told.stop_reason) == (FinishReason.STOP, 3)
    assert (told.events, told.prefill_stats) == ([event], stats)


def test_a_long_reply_is_told_in_parts() -> None:
    held = HeldReplies()
    assert held.take(sampled(1), now=0.0) is None
    part = held.take(sampled(2), now=HOLD_SECONDS)
    assert part is not None
    assert (part.new_token_ids, part.finish_reason) == ([1, 2], None)
    rest = held.take(sampled(3, finish_reason=FinishReason.LENGTH), now=HOLD_SECONDS)
    assert rest is not None
    assert rest.new_token_ids == [3]


def test_a_reply_of_one_token_is_told_at_once() -> None:
    only = sampled(1, finish_reason=FinishReason.LENGTH)
    assert HeldReplies().take(only, now=0.0) is only


def test_nothing_is_kept_of_a_request_that_was_aborted() -> None:
    held = HeldReplies()
    held.take(sampled(1), now=0.0)
    held.forget(["a", "never seen"])
    told = held.take(sampled(2, finish_reason=FinishReason.STOP), now=0.0)
    assert told is not None
    assert told.new_token_ids == [2]


def test_steps_wait_only_while_requests_arrive() -> None:
    pace = StepPace()
    pace.stepped(seconds=0.004)
    assert pace.wait_seconds(now=1.0, num_requests=1) == 0.0
    pace.arrived(now=1.0)
    assert pace.wait_seconds(now=1.0, num_requests=1) == 0.004
    assert pace.wait_seconds(now=1.001 + ARRIVING_SECONDS, num_requests=1) == 0.0


def test_a_full_or_a_slow_step_is_not_made_to_wait_long() -> None:
    pace = StepPace()
    pace.arrived(now=1.0)
    pace.stepped(seconds=3.0)
    assert pace.wait_seconds(now=1.0, num_requests=FEW_REQUESTS) == 0.0
    assert pace.wait_seconds(now=1.0, num_requests=FEW_REQUESTS - 1) == LONGEST_WAIT_SECONDS
