"""The loss on conversations that are never learned, per token and without gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradus.trainer.distributed import World, named_failures
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.tensors import TrainTensors, check_trainable
from gradus.wire.packing import pack
from gradus.wire.sample import Sample


class Validation:
    """Held-out samples, packed once.

    >>> validation.run()["validation/loss/mean"]  # doctest: +SKIP
    1.73
    """

    def __init__(
        self,
        policy: PolicyModel,
        world: World,
        samples: Sequence[Sample],
        *,
        micro_batch_tokens: int,
        vocabulary: int,
    ) -> None:
        self._policy = policy
        self._world = world
        ranks = pack(samples, max_tokens=micro_batch_tokens, num_ranks=world.data_size)
        self._micro_batches = ranks[world.data_rank]
        for micro_batch in self._micro_batches:
            check_trainable(micro_batch, vocabulary)

    @torch.no_grad()
    def run(self) -> dict[str, float]:
        """Nats per learned token over all ranks, summed in float64; all ranks call it together."""
        sums = {"loss": 0.0, "tokens": 0.0}
        for micro_batch in self._micro_batches:
            tensors = TrainTensors.build(micro_batch, self._world.device)
            with named_failures("validate a micro batch"):
                scores = self._policy(tensors)
            members = tensors.members("ce")
            losses = torch.where(members, -scores.logprobs, 0.0)
            sums["loss"] += float(losses.sum(dtype=torch.float64))
            sums["tokens"] += float(members.sum())
        totals = self._world.sums(sums)
        return {
            "validation/loss/mean": totals["loss"] / max(1.0, totals["tokens"]),
            "validation/tokens/sum": totals["tokens"],
        }
