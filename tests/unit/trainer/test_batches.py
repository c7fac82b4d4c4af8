"""Batches are checked and acknowledged before the model sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradus.errors import DeadlineError, ProtocolError
from gradus.testing.builders import build_micro_batch, build_sample
from gradus.trainer.batches import SpooledBatches
from gradus.trainer.distributed import World
from gradus.trainer.tensors import TrainTensors, check_trainable, count_members
from gradus.wire.events import BatchReceived, Event
from gradus.wire.micro_batch import MicroBatch, RankBatch
from gradus.wire.versions import VersionSpan

pytestmark = pytest.mark.torch


class ListReceiver:
    """Hands out prepared batches."""

    def __init__(self, *batches: RankBatch) -> None:
        self.batches = {batch.step: batch for batch in batches}
        self.events: list[Event] = []

    def receive(self, step: int, *, timeout_seconds: float) -> RankBatch:
        if step not in self.batches:
            raise DeadlineError(f"batch {step} did not come")
        return self.batches[step]

    def send_event(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def rank_batch(*micro_batches: MicroBatch, step: int = 0, rank: int = 0) -> RankBatch:
    return RankBatch(step, 1, rank, VersionSpan(0, 0), list(micro_batches))


def build_batches(receiver: ListReceiver, world: World) -> SpooledBatches:
    return SpooledBatches(receiver, world, term=1, vocabulary=32, timeout_seconds=1.0)


def test_a_good_batch_is_given_and_acknowledged(world: World) -> None:
    receiver = ListReceiver(rank_batch(build_micro_batch()))
    assert len(build_batches(receiver, world).receive(0).updates) == 1
    assert receiver.events == [BatchReceived(step=0, term=1)]


def test_a_batch_that_does_not_come_is_a_deadline(world: World) -> None:
    with pytest.raises(DeadlineError):
        build_batches(ListReceiver(), world).receive(0)


def test_a_bad_batch_is_not_acknowledged(world: World) -> None:
    receiver = ListReceiver(rank_batch())
    with pytest.raises(ProtocolError, match="no micro batches"):
        build_batches(receiver, world).receive(0)
    assert receiver.events == []


def test_the_part_of_another_rank_is_refused(world: World) -> None:
    receiver = ListReceiver(rank_batch(build_micro_batch(), rank=1))
    with pytest.raises(ProtocolError, match="rank 1"):
        build_batches(receiver, world).receive(0)


def poison(field: str, value: float) -> Callable[[MicroBatch], None]:
    def change(micro_batch: MicroBatch) -> None:
        getattr(micro_batch.arrays, field)[1] = value

    return change


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
