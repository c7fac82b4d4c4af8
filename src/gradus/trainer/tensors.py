"""One micro batch as tensors on the model's device, with the members of each loss component.

Shapes: T tokens of the micro batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from gradus.errors import ProtocolError
from gradus.trainer.images.pixels import Pixels
from gradus.trainer.images.tower import RowImages
from gradus.trainer.model.attention import PackedLayout
from gradus.wire.micro_batch import MicroBatch
from gradus.wire.tokens import COUNTED_BY_TRACE, LOSS_NAMES


@dataclass(frozen=True)
class TrainTensors:
    """What the model and the losses read; every tensor is [T] unless it says otherwise."""

    token_ids: Tensor
    position_ids: Tensor
    temperatures: Tensor
    sampling_logprobs: Tensor
    reference_logprobs: Tensor
    """0 where no reference model scored."""
    is_scored: Tensor
    advantages: Tensor
    sample_index: Tensor
    weights: dict[str, Tensor]
    """Loss weights of every component, 0 where a token is not a member."""
    trace_members: dict[str, Tensor]
    """By the names of `COUNTED_BY_TRACE`: how many tokens of the token's whole trace train in those
    components, at least 1."""
    targets: Tensor
    """[N] positions of the tokens that are members of any component."""
    layout: PackedLayout
    proximal_logprobs: Tensor | None = None
    """Of the trainer's weights before the first update of the batch, where they were computed."""
    experts: Tensor | None = None
    """[T, layers, k] int16, as in `TokenArrays`."""
    images: RowImages | None = None
    """None where the row has no image."""

    @classmethod
    def build(cls, micro_batch: MicroBatch, device: torch.device) -> TrainTensors:
        """The tensors of a micro batch without images that passed `check_trainable`, on the device.

        A GPU gets them from pinned memory, without waiting for what it computes.
        """
        if isinstance(micro_batch, ReadyMicroBatch):
            return micro_batch.tensors.on(device)
        return cls.on_host(micro_batch, is_pinned=device.type == "cuda").on(device)

    @classmethod
    def on_host(
        cls, micro_batch: MicroBatch, *, is_pinned: bool, pixels: Pixels | None = None
    ) -> TrainTensors:
        """The same tensors in main memory, with those of its images, which `pixels` makes."""
        if micro_batch.images and pixels is None:
            raise ProtocolError("micro batch: has images, and the model reads text alone")
        weights = _member_weights(micro_batch)
        is_target = np.any([weight != 0 for weight in weights.values()], axis=0)
        lengths = micro_batch.sequence_lengths
        arrays = micro_batch.arrays
        references = arrays.reference_logprobs
        is_scored = ~np.isnan(references)

        def tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
            # A copy: arrays off the wire are read-only views of the message.
            copied = torch.tensor(array, dtype=dtype)
            return copied.pin_memory() if is_pinned else copied

        return cls(
            token_ids=tensor(arrays.token_ids, torch.int64),
            position_ids=tensor(micro_batch.position_ids, torch.int64),
            temperatures=tensor(arrays.temperatures, torch.float32),
            sampling_logprobs=tensor(arrays.sampling_logprobs, torch.float32),
            # NaN would pass any later `torch.where` on the way back.
            reference_logprobs=tensor(np.where(is_scored, references, 0.0), torch.float32),
            is_scored=tensor(is_scored, torch.bool),
            advantages=tensor(arrays.advantages, torch.float32),
            sample_index=tensor(np.repeat(np.arange(len(lengths)), lengths), torch.int64),
            weights={name: tensor(weight, torch.float32) for name, weight in weights.items()},
            trace_members={
                name: tensor(np.repeat(np.maximum(counts, 1), lengths), torch.float32)
                for name, counts in _trace_members(micro_batch, weights).items()
            },
            targets=tensor(np.flatnonzero(is_target), torch.int64),
            layout=PackedLayout.build(lengths, torch.device("cpu"), is_pinned=is_pinned),
            experts=None if arrays.experts is None else tensor(arrays.experts, torch.int16),
            images=None if pixels is None else pixels.of(micro_batch),
        )

    def on(self, device: torch.device) -> TrainTensors:
        if device == self.token_ids.device:
            return self

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        proximal, experts, images = self.proximal_logprobs, self.experts, self.images

        return TrainTensors(
            token_ids=moved(self.token_ids),
            position_ids=moved(self.position_ids),
            temperatures=moved(self.temperatures),
            sampling_logprobs=moved(self.sampling_logprobs),
            reference_logprobs=moved(self.reference_logprobs),
            is_scored=moved(self.is_scored),
            advantages=moved(self.advantages),
            sample_index=moved(self.sample_index),
            weights={name: moved(weight) for name, weight in self.weights.items()},
            trace_members={name: moved(counts) for name, counts in self.trace_members.items()},
            targets=moved(self.targets),
            layout=self.layout.on(device),
            proximal_logprobs=None if proximal is None else moved(proximal),
            experts=None if experts is None else moved(experts),
            images=None if images is None else images.on(device),
        )

    def with_reference(self, logprobs: Tensor) -> TrainTensors:
        """With `logprobs` [T] on the rl tokens that no reference model scored."""
        is_missing = self.members("rl") & ~self.is_scored
        return replace(
            self,
            reference_logprobs=torch.where(is_missing, logprobs, self.reference_logprobs),
            is_scored=self.is_scored | is_missing,
        )

    def with_proximal(self, logprobs: Tensor) -> TrainTensors:
        """With the logprobs [T] that the trainer itself gives before the first update."""
        return replace(self, proximal_logprobs=logprobs)

    def members(self, name: str) -> Tensor:
        """Bool [T]: the tokens of component `name`."""
        return self.weights[name] != 0

    def members_in_sample(self, names: Sequence[str]) -> Tensor:
        """[T]: how many members of these components the token's own sample has, at least 1."""
        is_member = torch.stack([self.members(name) for name in names]).any(dim=0)
        counts = torch.zeros(len(self.layout.lengths), dtype=torch.float32, device=is_member.device)
        counts.index_add_(0, self.sample_index, is_member.float())
        return counts.clamp(min=1.0).index_select(0, self.sample_index)


class ReadyMicroBatch(MicroBatch, frozen=True, kw_only=True):
    """A micro batch whose tensors were made before its step; it never leaves the process."""

    tensors: TrainTensors
    """In main memory; all but images pinned for a GPU."""

    @classmethod
    def of(
        cls, micro_batch: MicroBatch, device: torch.device, pixels: Pixels | None = None
    ) -> ReadyMicroBatch:
        """For a step that computes on `device`; `pixels` makes the images where it has any."""
        if isinstance(micro_batch, ReadyMicroBatch):
            return micro_batch
        return cls(
            **structs.asdict(micro_batch),
            tensors=TrainTensors.on_host(
                micro_batch, is_pinned=device.type == "cuda", pixels=pixels
            ),
        )


def check_trainable(micro_batch: MicroBatch, vocabulary: int) -> None:
    """Refuse content that the model cannot read or that would make NaN; ProtocolError says what."""
    micro_batch.check()
    token_ids = micro_batch.arrays.token_ids
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or highest >= vocabulary:
        raise ProtocolError(
            f"micro batch: token ids {lowest}..{highest} do not fit the model's vocabulary of "
            f"{vocabulary}; trainer and environments must use the same tokenizer"
        )


def count_members(micro_batch: MicroBatch) -> dict[str, int]:
    """Members of each component: tokens with weight, in the loss mask, not first in a sample."""
    weights = _member_weights(micro_batch)
    return {name: int(np.count_nonzero(weight)) for name, weight in weights.items()}


def count_sequences(micro_batch: MicroBatch, names: Sequence[str]) -> int:
    """Samples with a member of any of these components."""
    weights = _member_weights(micro_batch)
    is_member = np.any([weights[name] != 0 for name in names], axis=0)
    samples = np.repeat(np.arange(len(micro_batch.sequence_lengths)), micro_batch.sequence_lengths)
    return int(np.unique(samples[is_member]).size)


def count_traces(micro_batch: MicroBatch) -> dict[str, float]:
    """By the names of `COUNTED_BY_TRACE`, the traces with a member: of one whose branches lie in
    several micro batches or ranks, the share that lies in this one."""
    weights = _member_weights(micro_batch)
    own = _members_by_sample(micro_batch, weights)
    whole = _trace_members(micro_batch, weights)
    return {name: float(np.sum(own[name] / np.maximum(whole[name], 1))) for name in own}


def count_targets(micro_batch: MicroBatch) -> int:
    """Tokens whose logprob any component needs."""
    weights = _member_weights(micro_batch).values()
    return int(np.count_nonzero(np.any([weight != 0 for weight in weights], axis=0)))


def _trace_members(
    micro_batch: MicroBatch, weights: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """For each sample, as the batch says; without a word of it each sample is a whole trace."""
    given = micro_batch.trace_members
    if given:
        return {name: np.array(counts) for name, counts in given.items()}
    return _members_by_sample(micro_batch, weights)


def _members_by_sample(
    micro_batch: MicroBatch, weights: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    starts = np.cumsum([0, *micro_batch.sequence_lengths[:-1]])
    return {
        name: np.add.reduceat(
            np.any([weights[it] != 0 for it in names], axis=0).astype(int), starts
        )
        for name, names in COUNTED_BY_TRACE.items()
    }


def _member_weights(micro_batch: MicroBatch) -> dict[str, np.ndarray]:
    # The first token of a sample has no predecessor that could predict it; it never trains.
    may_train = micro_batch.arrays.loss_mask & (micro_batch.position_ids > 0)
    nothing = np.zeros(len(micro_batch), np.float32)
    return {
        name: np.where(may_train, micro_batch.arrays.loss_weights.get(name, nothing), 0.0)
        for name in LOSS_NAMES
    }
