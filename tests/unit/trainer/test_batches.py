"""Batches are checked before the model sees them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from builders import build_micro_batch, build_sample
from commands import wait_until

from gradus.errors import ConfigError, DeadlineError, ProtocolError, StorageError
from gradus.trainer.batches import ReadAhead, SpooledBatches
from gradus.trainer.distributed import World
from gradus.trainer.model.cpu.routing import Routers
from gradus.trainer.tensors import (
    ReadyMicroBatch,
    TrainTensors,
    check_trainable,
    count_members,
)
from gradus.wire.micro_batch import MicroBatch, RankBatch
from gradus.wire.tokens import NOT_CHOSEN
from gradus.wire.versions import VersionSpan

pytestmark = pytest.mark.torch


class ListReceiver:
    """Hands out prepared batches."""

    def __init__(self, *batches: RankBatch) -> None:
        self.batches = {batch.step: batch for batch in batches}
        self.arrived = threading.Event()
        self.readers: list[str] = []

    def receive(
        self, step: int, *, timeout_seconds: float, check: Callable[[], None] = lambda: None
    ) -> RankBatch:
        deadline = time.monotonic() + timeout_seconds
        while step not in self.batches:
            check()
            if not self.arrived.wait(0.01) and time.monotonic() >= deadline:
                raise DeadlineError(f"batch {step} did not come")
        self.readers.append(threading.current_thread().name)
        return self.batches[step]

    def send_event(self, event: object) -> None:
        raise AssertionError(f"no batch says {event}")


def rank_batch(*micro_batches: MicroBatch, step: int = 0, rank: int = 0) -> RankBatch:
    return RankBatch(step, 1, rank, VersionSpan(0, 0), list(micro_batches))


def build_batches(
    receiver: ListReceiver,
    world: World,
    *,
    end_step: int = 1,
    check: Callable[[], None] = lambda: None,
    routers: Routers | None = None,
) -> SpooledBatches:
    return SpooledBatches(
        receiver,
        world,
        vocabulary=32,
        routers=routers,
        timeout_seconds=0.2,
        end_step=end_step,
        check=check,
    )


def test_a_good_batch_is_given(world: World) -> None:
    receiver = ListReceiver(rank_batch(build_micro_batch()))
    assert len(build_batches(receiver, world).receive(0).updates) == 1


def test_a_batch_that_does_not_come_is_a_deadline(world: World) -> None:
    with pytest.raises(DeadlineError):
        build_batches(ListReceiver(), world).receive(0)


def test_a_batch_without_content_is_refused(world: World) -> None:
    receiver = ListReceiver(rank_batch())
    with pytest.raises(ProtocolError, match="no micro batches"):
        build_batches(receiver, world).receive(0)


def test_the_part_of_another_rank_is_refused(world: World) -> None:
    receiver = ListReceiver(rank_batch(build_micro_batch(), rank=1))
    with pytest.raises(ProtocolError, match="rank 1"):
        build_batches(receiver, world).receive(0)


def test_a_batch_that_comes_during_a_step_is_ready_for_the_next(world: World) -> None:
    good = rank_batch(build_micro_batch())
    receiver = ListReceiver(good, rank_batch(build_micro_batch(), step=1))
    with closing(build_batches(receiver, world, end_step=2)) as batches:
        batches.receive(0)
        wait_until(lambda: len(receiver.readers) == 2)
        [[ready]] = batches.receive(1).updates
    assert isinstance(ready, ReadyMicroBatch)
    assert receiver.readers[1].startswith("ahead")
    expected = TrainTensors.build(build_micro_batch(), world.device)
    assert torch.equal(ready.tensors.token_ids, expected.token_ids)


def test_a_batch_that_comes_late_is_read_by_the_step_itself(world: World) -> None:
    receiver = ListReceiver(rank_batch(build_micro_batch()))
    with closing(build_batches(receiver, world, end_step=2)) as batches:
        batches.receive(0)
        with pytest.raises(DeadlineError, match="batch 1"):
            batches.receive(1)
        receiver.batches[1] = rank_batch(build_micro_batch(), step=1)
        assert len(batches.receive(1).updates) == 1
    assert receiver.readers == [threading.current_thread().name] * 2


def test_a_bad_batch_read_ahead_is_refused_at_its_own_step(world: World) -> None:
    receiver = ListReceiver(rank_batch(build_micro_batch()), rank_batch(step=1))
    with closing(build_batches(receiver, world, end_step=2)) as batches:
        batches.receive(0)
        wait_until(lambda: len(receiver.readers) == 2)
        with pytest.raises(ProtocolError, match="no micro batches"):
            batches.receive(1)


def test_nothing_is_read_beyond_the_last_step(world: World) -> None:
    receiver = ListReceiver(*(rank_batch(build_micro_batch(), step=step) for step in range(3)))
    with closing(build_batches(receiver, world, end_step=2)) as batches:
        for step in range(2):
            batches.receive(step)
    assert len(receiver.readers) == 2


def test_a_version_that_cannot_be_published_ends_the_wait_for_a_batch(world: World) -> None:
    def fail() -> None:
        raise StorageError("disk full")

    with pytest.raises(StorageError, match="disk full"):
        build_batches(ListReceiver(), world, check=fail).receive(0)


def test_what_is_made_ahead_goes_in_order_one_step_at_a_time() -> None:
    made: list[int] = []

    def make(step: int) -> int:
        made.append(step)
        return step

    with closing(ReadAhead(make, end_step=5)) as ahead:
        for step in range(5):
            assert ahead.take(step) == step
            wait_until(lambda step=step: len(made) == min(5, step + 2))
    assert made == [0, 1, 2, 3, 4]


def test_what_cannot_be_made_ahead_is_raised_by_its_own_step() -> None:
    def make(step: int) -> int:
        if step == 1:
            raise ConfigError("row 7 is bad")
        return step

    with closing(ReadAhead(make, end_step=3)) as ahead:
        assert ahead.take(0) == 0
        with pytest.raises(ConfigError, match="row 7"):
            ahead.take(1)


def poison(field: str, value: float) -> Callable[[MicroBatch], None]:
    def change(micro_batch: MicroBatch) -> None:
        getattr(micro_batch.arrays, field)[1] = value

    return change


@pytest.mark.shows("F43")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (poison("advantages", np.nan), "advantages"),
        (poison("sampling_logprobs", -np.inf), "sampling_logprobs"),
        (poison("temperatures", 0.0), "temperatures"),
        (poison("token_ids", 32), "vocabulary"),
        (poison("token_ids", -1), "vocabulary"),
        (lambda m: m.sequence_lengths.append(0), "must be positive"),
        (lambda m: m.sequence_lengths.append(3), "add up"),
        (lambda m: m.arrays.loss_weights.update(rl=np.ones(2, np.float32)), "shape"),
        (
            lambda m: m.arrays.loss_weights.update(extra=np.ones(6, np.float32)),
            "unknown loss weights",
        ),
    ],
)
def test_content_that_cannot_train_is_refused(
    change: Callable[[MicroBatch], Any], message: str
) -> None:
    micro_batch = build_micro_batch()
    change(micro_batch)
    with pytest.raises(ProtocolError, match=message):
        check_trainable(micro_batch, vocabulary=32)


def test_tensors_know_their_members_and_samples(world: World) -> None:
    samples = [build_sample(4, prompt_length=2), build_sample(3, prompt_length=0, seed=1)]
    micro_batch = build_micro_batch(samples)
    tensors = TrainTensors.build(micro_batch, world.device)
    assert tensors.targets.tolist() == [2, 3, 5, 6]
    assert tensors.sample_index.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert tensors.members("rl").sum() == count_members(micro_batch)["rl"] == 4
    assert not tensors.members("ce").any()


def with_experts(micro_batch: MicroBatch, chosen: list[int], num_told: int = 99) -> MicroBatch:
    """The first `num_told` of its tokens were computed by these."""
    experts = np.full((len(micro_batch), 1, 2), NOT_CHOSEN, np.int16)
    experts[:num_told] = chosen
    arrays = msgspec.structs.replace(micro_batch.arrays, experts=experts)
    return msgspec.structs.replace(micro_batch, arrays=arrays)


ROUTERS = Routers({0: None}, num_layers=1, num_experts=4, num_chosen=2)


@pytest.mark.parametrize(
    ("chosen", "words"), [([1, 1], "twice for one token"), ([0, 4], "none of 4")]
)
def test_experts_that_the_model_does_not_have_are_refused(
    chosen: list[int], words: str, world: World
) -> None:
    told = with_experts(build_micro_batch(), chosen)
    with pytest.raises(ProtocolError, match=words):
        build_batches(ListReceiver(rank_batch(told)), world, routers=ROUTERS).receive(0)


def test_samples_without_experts_are_trained_and_told_of_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    plain = build_micro_batch([build_sample(4), build_sample(3, seed=1)])
    parts = [with_experts(plain, [0, 1]), with_experts(plain, [0, 1], num_told=2), plain]
    batches = [
        rank_batch(*them, step=step)
        for step, them in enumerate([parts[:1], parts, parts, [plain], [plain]])
    ]
    with closing(build_batches(ListReceiver(*batches), world, end_step=5, routers=ROUTERS)) as it:
        for step in range(5):
            assert len(it.receive(step).micro_batches) == len(batches[step].micro_batches)
    of_some, of_all = [record.getMessage() for record in caplog.records]
    told = "trainer.router_replay = 'engine', and"
    assert of_some.startswith(f"batch 1: {told} 3 of 6 samples do not say which experts")
    assert of_all.startswith(f"batch 3: {told} 2 of 2 samples")
    assert of_all.endswith("is the engine started with the same config?")


def test_a_dense_model_is_not_told_of_experts(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    build_batches(ListReceiver(rank_batch(build_micro_batch())), world).receive(0)
    assert caplog.records == []
