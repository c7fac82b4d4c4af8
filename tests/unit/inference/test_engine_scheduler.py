"""What the engine's process keeps of a reply, and when it waits for more requests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from gradus.inference.engine.experts import ExpertSlots, StepExperts, slots_group
from gradus.inference.engine.scheduler import (
    ARRIVING_SECONDS,
    FEW_REQUESTS,
    HOLD_SECONDS,
    LONGEST_WAIT_SECONDS,
    TOKENS_ONLY_PREFIX,
    HeldReplies,
    OverlappedReplies,
    PacedReplies,
    StepPace,
    WholeReplies,
    merged,
)
from gradus.inference.settings import RECORDS_EXPERTS
from gradus.testing.tiny_model import build_tiny_model
from gradus.wire.episode import POLICY_VERSIONS

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


def test_a_step_beside_a_request_for_more_logprobs_has_columns_that_are_dropped() -> None:
    held = HeldReplies()
    wide = sampled(2)
    held.take(wide, now=0.0)
    narrow = sampled(3, finish_reason=FinishReason.STOP)
    assert narrow.new_logprobs is not None
    ids, logprobs, ranks, *_ = narrow.new_logprobs
    narrow.new_logprobs = LogprobsLists(ids[:, :1], logprobs[:, :1], ranks)
    told = held.take(narrow, now=0.1)
    assert told is not None
    assert told.new_logprobs is not None
    assert told.new_logprobs.logprob_token_ids.tolist() == [[2], [3]]
    assert told.new_logprobs.logprobs.tolist() == [[-0.25], [-0.375]]


def test_a_long_reply_is_told_in_parts() -> None:
    held = HeldReplies()
    assert held.take(sampled(1), now=0.0) is None
    part = held.take(sampled(2), now=HOLD_SECONDS)
    assert part is not None
    assert (part.new_token_ids, part.finish_reason) == ([1, 2], None)
    rest = held.take(sampled(3, finish_reason=FinishReason.LENGTH), now=HOLD_SECONDS)
    assert rest is not None
    assert rest.new_token_ids == [3]


def test_a_reply_that_is_read_while_it_grows_is_told_twenty_times_a_second_from_its_start() -> None:
    held = HeldReplies()
    held.version = 6
    due = {0.0: [0], 0.01: None, 0.02: None, 0.07: [1, 2, 3], 0.08: None, 0.09: [4, 5]}
    for place, (now, told) in enumerate(due.items()):
        more = {"finish_reason": FinishReason.LENGTH} if place == 5 else {}
        found = held.take(sampled(place, **more), now=now, is_streamed=True)
        assert (found and found.new_token_ids) == told
    assert found is not None
    assert (found.kv_transfer_params or {})[POLICY_VERSIONS] == [(6, 6)]


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


def test_each_part_tells_which_version_sampled_all_tokens_up_to_its_end() -> None:
    held = HeldReplies()
    held.version = 8
    held.take(sampled(1), now=0.0)
    part = held.take(sampled(2), now=HOLD_SECONDS)
    held.version = 9
    held.take(sampled(3), now=HOLD_SECONDS)
    rest = held.take(sampled(4, finish_reason=FinishReason.STOP), now=HOLD_SECONDS)
    assert part is not None
    assert part.kv_transfer_params == {POLICY_VERSIONS: [(8, 2)]}
    assert rest is not None
    assert rest.kv_transfer_params == {POLICY_VERSIONS: [(8, 2), (9, 2)]}
    # The name may come again.
    again = held.take(sampled(5, finish_reason=FinishReason.STOP), now=HOLD_SECONDS)
    assert again is not None
    assert again.kv_transfer_params == {POLICY_VERSIONS: [(9, 1)]}


def test_an_engine_without_versions_says_nothing_of_them() -> None:
    only = sampled(1, finish_reason=FinishReason.STOP)
    told = HeldReplies().take(only, now=0.0)
    assert told is not None
    assert told.kv_transfer_params is None


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


def replies_of(
    kind: type[WholeReplies],
    model: Path,
    new_weights_at: int = 99,
    records_experts: bool = False,
    names: Iterable[str] = "abc",
    **sampling: Any,
) -> list[EngineCoreOutputs]:
    """All that a scheduler of vLLM's engine sends while it plays three requests of four tokens.

    An engine that overlaps steps schedules the next one before it knows the tokens of the last.
    """
    is_overlapped = kind is OverlappedReplies
    arguments = EngineArgs(
        model=str(model), enforce_eager=True, max_model_len=64, enable_chunked_prefill=False
    )
    config = arguments.create_engine_config()
    config.scheduler_config.async_scheduling = is_overlapped
    config.cache_config.num_gpu_blocks = 64
    config.additional_config = {RECORDS_EXPERTS: records_experts}
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    scheduler = kind(
        config,
        KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], spec)]),
        StructuredOutputManager(config),
        block_size=32,
        log_stats=True,
    )
    core = SimpleNamespace(scheduler=scheduler)
    EngineCore.set_weight_version(cast("Any", core), "6")
    for name in names:
        params = SamplingParams(
            **{"max_tokens": 4, "logprobs": 0, "output_kind": RequestOutputKind.FINAL_ONLY}
            | sampling
        )
        scheduler.add_request(Request(name, [1, 2, 3], params, None))
    sent: list[EngineCoreOutputs] = []
    waiting = [scheduler.schedule()]
    for step in range(12):
        if is_overlapped:
            waiting.append(scheduler.schedule())
        planned = waiting.pop(0)
        if step == new_weights_at:
            EngineCore.set_weight_version(cast("Any", core), "7")
        output = computed(planned, step)
        if records_experts and planned.num_scheduled_tokens:
            routed(scheduler, planned, step).put_into(output)
        sent += scheduler.update_from_output(planned, output).values()
        if not is_overlapped:
            waiting.append(scheduler.schedule())
    assert not scheduler.has_unfinished_requests()
    return sent


def computed(planned: SchedulerOutput, step: int) -> ModelRunnerOutput:
    """What a worker would answer: token 10 + step for every request."""
    names = list(planned.num_scheduled_tokens)
    logprobs = LogprobsLists(
        np.full((len(names), 1), 10 + step, np.int32),
        np.full((len(names), 1), -float(step), np.float32),
        np.ones(len(names), np.int32),
    )
    index = {name: at for at, name in enumerate(names)}
    return ModelRunnerOutput(names, index, [[10 + step] for _ in names], logprobs)


def routed(scheduler: WholeReplies, planned: SchedulerOutput, step: int) -> StepExperts:
    """Layer 0 of each token: its position and the step in which it was computed; layer 1 is dense.

    Blocks have 32 tokens, so a request's first has all.
    """
    slots, experts = [], []
    for name, count in planned.num_scheduled_tokens.items():
        first = scheduler.kv_cache_manager.get_block_ids(name)[0][0] * 32
        end = scheduler.requests[name].num_computed_tokens
        for position in range(end - count, end):
            slots.append(first + position)
            experts.append([[position, 300 + step], [0, 0]])
    return StepExperts(np.array(slots), np.array(experts, np.int16))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=64, num_layers=1)


@pytest.mark.parametrize("kind", [WholeReplies, PacedReplies, OverlappedReplies])
def test_each_scheduler_sends_three_whole_replies_and_nothing_else(
    kind: type[WholeReplies], model: Path
) -> None:
    sent = [output for message in replies_of(kind, model) for output in message.outputs]
    assert sorted(output.request_id for output in sent) == ["a", "b", "c"]
    for output in sent:
        assert output.new_token_ids == [10, 11, 12, 13]
        assert output.finish_reason == FinishReason.LENGTH
        assert output.new_logprobs is not None
        assert output.new_logprobs.logprobs[:, 0].tolist() == [0.0, -1.0, -2.0, -3.0]
        assert output.prefill_stats is not None


def test_a_stream_of_a_token_connection_is_told_from_its_first_token(model: Path) -> None:
    asked = {"output_kind": RequestOutputKind.DELTA}
    names = [f"{TOKENS_ONLY_PREFIX}{name}" for name in "abc"]
    sent = replies_of(WholeReplies, model, names=names, **asked)
    outputs = [out for message in sent for out in message.outputs]
    assert [out.new_token_ids for out in outputs[:3]] == [[10]] * 3
    assert outputs[-1].kv_transfer_params == {POLICY_VERSIONS: [(6, 4)]}


@pytest.mark.parametrize("kind", [WholeReplies, OverlappedReplies])
def test_a_reply_that_is_read_as_it_grows_is_sent_token_by_token(
    kind: type[WholeReplies], model: Path
) -> None:
    for sampling in ({"output_kind": RequestOutputKind.DELTA}, {"stop": ["x"]}):
        sent = [out for message in replies_of(kind, model, **sampling) for out in message.outputs]
        assert [output.new_token_ids for output in sent] == [
            [10 + step] for step in range(4) for _ in range(3)
        ]


def test_the_load_is_told_once_in_a_while_and_at_the_end(model: Path) -> None:
    sent = replies_of(WholeReplies, model)
    told = [message.scheduler_stats for message in sent if message.scheduler_stats is not None]
    assert (told[-1].num_running_reqs, told[-1].num_waiting_reqs) == (0, 0)
    assert len([stats for stats in told if stats.num_running_reqs > 0]) == 1


def test_the_scheduler_hears_of_new_weights_in_the_middle_of_a_reply(model: Path) -> None:
    replies = [it for m in replies_of(WholeReplies, model, new_weights_at=3) for it in m.outputs]
    assert [it.kv_transfer_params for it in replies] == [{POLICY_VERSIONS: [(6, 3), (7, 1)]}] * 3


def test_a_reply_tells_the_experts_of_all_its_tokens_but_the_last(model: Path) -> None:
    messages = replies_of(PacedReplies, model, records_experts=True)
    for output in (it for message in messages for it in message.outputs):
        assert output.routed_experts is not None
        assert output.routed_experts.dtype == np.uint16
        assert output.routed_experts[:, 0].tolist() == [
            *([0, 300], [1, 300], [2, 300]),  # the prompt
            *([3, 301], [4, 302], [5, 303]),
        ]
        assert not output.routed_experts[:, 1].any()
    later = replies_of(PacedReplies, model, records_experts=True, routed_experts_prompt_start=2)
    told = [it.routed_experts for message in later for it in message.outputs]
    assert [it[:, 0, 0].tolist() for it in told if it is not None] == [[2, 3, 4, 5]] * 3
    growing = replies_of(
        PacedReplies, model, records_experts=True, stop=["x"], routed_experts_prompt_start=1
    )
    parts = [it for message in growing for it in message.outputs if it.request_id == "a"]
    # At whichever token the server finds its stop string, what was told until then is whole.
    assert [
        it.routed_experts[:, 0, 0].tolist() for it in parts if it.routed_experts is not None
    ] == [
        [1, 2],
        *([3], [4], [5]),
    ]
    silent = replies_of(PacedReplies, model)
    assert all(it.routed_experts is None for message in silent for it in message.outputs)


def test_parts_of_a_reply_join_their_experts() -> None:
    parts = [sampled(1), sampled(2, routed_experts=np.ones((1, 2, 2), np.uint8))]
    parts.append(sampled(3, routed_experts=np.zeros((2, 2, 2), np.uint8)))
    found = merged(parts).routed_experts
    assert found is not None
    assert found[:, 0, 0].tolist() == [1, 0, 0]
    assert merged([sampled(1), sampled(2)]).routed_experts is None


def test_slots_keep_the_experts_of_whoever_computed_them_last() -> None:
    slots = ExpertSlots(num_slots=12, block_tokens=4)
    assert slots.of_blocks([0], 0, 1) is None
    experts = np.arange(8, dtype=np.int16).reshape(8, 1, 1)
    # Blocks 2 and 0 of a request of seven tokens.
    slots.note(StepExperts(np.array([8, 9, 10, 11, 0, 1, 2]), experts[:7]))
    assert slots.of_blocks([2, 0], 0, 7).ravel().tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert slots.of_blocks([2, 0], 3, 6).ravel().tolist() == [3, 4, 5]
    # What nobody computed, and more than the blocks hold, is not told.
    assert slots.of_blocks([2, 0], 3, 8) is None
    assert slots.of_blocks([2], 2, 5) is None
    slots.note(StepExperts(np.array([9]), experts[7:]))
    assert slots.of_blocks([2], 0, 4).ravel().tolist() == [0, 7, 2, 3]


@pytest.mark.parametrize(("highest", "dtype"), [(255, np.uint8), (256, np.uint16)])
def test_experts_are_told_in_the_dtype_that_holds_them(highest: int, dtype: Any) -> None:
    slots = ExpertSlots(num_slots=2, block_tokens=2)
    slots.note(StepExperts(np.arange(2), np.array([[[0]], [[highest]]], np.int16)))
    found = slots.of_blocks([0], 0, 2)
    assert (found.dtype, found.ravel().tolist()) == (dtype, [0, highest])


def test_the_slots_are_those_of_layers_that_see_everything() -> None:
    sizes = {"block_size": 4, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    window = SlidingWindowSpec(**sizes, sliding_window=8)
    groups = [KVCacheGroupSpec(["a"], window), KVCacheGroupSpec(["b"], FullAttentionSpec(**sizes))]
    assert slots_group(KVCacheConfig(1, [], groups)) == 1
