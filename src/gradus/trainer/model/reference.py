"""Reference logprobs by the trainer itself: what the initial weights say of a batch.

They never change, so that a resume and a replay find the same ones. With adapters they are the
policy with its adapters off; otherwise they are a frozen copy in the compute dtype, split over the
ranks like the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from msgspec import structs
from torch import Tensor

from gradus.heartbeat import beat
from gradus.trainer.model.lora import adapted_layers
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import release_gathered
from gradus.trainer.tensors import ReadyMicroBatch, TrainTensors
from gradus.wire.micro_batch import MicroBatch


class Reference:
    """The policy of version 0, at the temperatures at which the tokens were sampled."""

    def __init__(self, policy: PolicyModel, device: torch.device) -> None:
        """`policy` is the frozen copy, or the trained one, whose adapters are then left out."""
        self._policy = policy
        self._device = device
        self._adapted = tuple(adapted_layers(policy).values())

    def score(self, micro_batches: Sequence[MicroBatch]) -> list[ReadyMicroBatch]:
        """The micro batches with a reference logprob on each rl token that has none.

        A collective: all ranks bring the same number of micro batches.
        """
        with self._without_adapters():
            return scored(self._policy, micro_batches, self._device, TrainTensors.with_reference)

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        for layer in self._adapted:
            layer.is_on = False
        try:
            yield
        finally:
            for layer in self._adapted:
                layer.is_on = True


@torch.no_grad()
def scored(
    policy: PolicyModel,
    micro_batches: Sequence[MicroBatch],
    device: torch.device,
    note: Callable[[TrainTensors, Tensor], TrainTensors],
) -> list[ReadyMicroBatch]:
    """The micro batches with the logprobs of their targets [T] noted; a collective.

    Their tensors stay in main memory: a whole batch of them need not fit on the device.
    """
    ready = [ReadyMicroBatch.of(micro_batch, device) for micro_batch in micro_batches]
    # Copied once all are computed, so that the device never waits for a copy.
    found = []
    for number, it in enumerate(ready, 1):
        beat(f"scoring micro batch {number}")
        found.append(policy(it.tensors.on(device)).logprobs)
    release_gathered(policy)
    return [
        structs.replace(micro_batch, tensors=note(micro_batch.tensors, logprobs.cpu()))
        for micro_batch, logprobs in zip(ready, found, strict=True)
    ]
