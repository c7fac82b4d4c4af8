"""From micro batches to gradients; the only place that divides a loss by a number of tokens.

L = Σ rl / N_rl + Σ ce / N_ce + Σ ref_kl / N_ref. Each N counts the members of that component over
all ranks and micro batches of one update, and is at least 1. A step is one update, unless its batch
is split into several. Members of ce_batch have the loss of ce, and count and divide with rl: (Σ rl
+ Σ ce_batch) / (N_rl + N_ce_batch). Packing, micro-batching and splitting over ranks therefore
change neither the loss nor the gradient. With the aggregation `sequence_mean`, rl and ce_batch are
first averaged over their members in each sample, and N is the number of samples that have any:
Σ_samples (Σ rl + Σ ce_batch) / n_sample / N. With `trace_mean` it is the same over traces, whose
branches may lie in several micro batches and ranks. ce_trace is divided by the traces with any:
its weights say what of a trace counts how much. Shapes: T tokens of a micro batch. Next page:
`losses.py`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from gradus.heartbeat import beat
from gradus.trainer.distributed import World, named_failures
from gradus.trainer.losses import (
    LossInputs,
    LossOutput,
    TokenLoss,
    cross_entropy,
    guarded_loss,
    reference_kl,
    refuse_not_finite,
)
from gradus.trainer.model.kernels import GradientSync
from gradus.trainer.model.policy_model import TokenScores
from gradus.trainer.model.shard import expect_backward
from gradus.trainer.ratios import COUNTS, ratio_shares, spread
from gradus.trainer.tensors import (
    TrainTensors,
    count_members,
    count_sequences,
    count_traces,
)
from gradus.wire.micro_batch import MicroBatch
from gradus.wire.tokens import COUNTED_BY_TRACE, LOSS_NAMES

_JOINT = ("rl", "ce_batch")
"""Components that share one denominator."""
SEQUENCES = "sequences"
"""Among the counts: samples with a member of one of those."""
TRACES = "traces/"
"""Among the counts, before a name of `COUNTED_BY_TRACE`: traces with a member."""
Aggregation = Literal["token_mean", "sequence_mean", "trace_mean"]
_NOT_FINITE = "rl/not_finite"
"""Among the shares: tokens for which the loss gave no number although the model did."""
_OBSERVED = ("ce", "ce_batch", "ce_trace")
"""Components whose members the policy learns to predict."""


@dataclass(frozen=True)
class StepLoss:
    """The loss of one step over all ranks; the gradients lie in the parameters."""

    total: float
    members: Mapping[str, int]
    """Tokens of each component, over all ranks."""
    tokens: int
    """Tokens read by the model, over all ranks, without dummies."""
    metrics: Mapping[str, float]
    """`loss/...`, averaged over members."""


def merge_losses(losses: Sequence[StepLoss]) -> StepLoss:
    """The loss of a batch from those of its updates: means of means, largest peaks, added sums."""
    if len(losses) == 1:
        return losses[0]
    names = sorted({name for loss in losses for name in loss.metrics})
    values = {name: [it.metrics[name] for it in losses if name in it.metrics] for name in names}
    return StepLoss(
        total=fmean(loss.total for loss in losses),
        members={name: sum(loss.members[name] for loss in losses) for name in losses[0].members},
        tokens=sum(loss.tokens for loss in losses),
        metrics={name: _merged(name, found) for name, found in values.items()},
    )


def _merged(name: str, values: Sequence[float]) -> float:
    if _is_peak(name):
        return max(values)
    return sum(values) if name.endswith("/sum") else fmean(values)


class Observer(Protocol):
    """Sees every forward before its backward, and changes nothing."""

    def __call__(self, micro_batch: MicroBatch, scores: TokenScores, num_counted: int) -> None:
        """`num_counted` tokens of rl and ce_batch divide their loss."""


class GradientStep:
    """Forward and backward of one step; owns every denominator."""

    def __init__(
        self,
        policy: Callable[[TrainTensors], TokenScores],
        rl_loss: TokenLoss,
        world: World,
        *,
        sync: GradientSync = "last",
        aggregation: Aggregation = "token_mean",
    ) -> None:
        self._policy = policy
        self._observe: Observer | None = None
        self._aggregation = aggregation
        self._world = world
        self._sync = sync
        self._losses: dict[str, Callable[[LossInputs], LossOutput]] = {
            "rl": guarded_loss(rl_loss),
            "ce": cross_entropy,
            "ref_kl": reference_kl,
            "ce_batch": cross_entropy,
            "ce_trace": cross_entropy,
        }

    def observed_by(self, observe: Observer) -> Self:
        """The same step, which tells of every forward."""
        observed = copy.copy(self)
        observed._observe = observe
        return observed

    def run(self, micro_batches: Sequence[MicroBatch]) -> StepLoss:
        """Add the gradients of one update to the parameters.

        Every rank must bring the same number of micro batches; each takes part in backward, with
        or without members, so that ranks stay in step.
        """
        members = self.count(micro_batches)
        totals = self._over_ranks(self.accumulate(micro_batches, members))
        refuse_not_finite(self._losses["rl"], totals.pop(_NOT_FINITE, 0.0))
        return StepLoss(
            total=totals.pop("total"),
            members={name: members[name] for name in LOSS_NAMES},
            tokens=members["tokens"],
            metrics={f"loss/{name}": value for name, value in totals.items()},
        )

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], members: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """Add this rank's gradients; gives its shares of L and of every metric.

        `members` counts each component over all ranks, so that shares only need to be added, and
        peaks compared. They are float64 and stay on the device: reading a number would wait for it
        before the next micro batch could begin.
        """
        sums: dict[str, Tensor] = {}
        for remaining, micro_batch in enumerate(micro_batches, 1 - len(micro_batches)):
            beat(f"micro batch {remaining + len(micro_batches)}")
            expect_backward(self._policy, is_last=remaining == 0, sync=self._sync)
            with named_failures("run a micro batch"):
                loss, parts = self._forward(micro_batch, members)
                # FSDP averages gradients over ranks; the denominators are global already.
                (loss * self._world.size).backward()  # type: ignore[no-untyped-call]
            for name, part in parts.items():
                before = sums.get(name)
                merge = torch.maximum if _is_peak(name) else torch.add
                sums[name] = part if before is None else merge(before, part)
        return sums

    def _over_ranks(self, shares: Mapping[str, Tensor]) -> dict[str, float]:
        """Every share merged over all ranks; the only look at numbers of the device."""
        names = self._world.names_of_all(name for name in shares if name != COUNTS)
        device = self._world.device
        zero, lowest = (
            torch.tensor(start, dtype=torch.float64, device=device) for start in (0, -math.inf)
        )
        peaks = {name: shares.get(name, lowest) for name in names if _is_peak(name)}
        added = {name: shares.get(name, zero) for name in names if name not in peaks}
        return self._world.sums(added) | self._world.maxima(peaks) | spread(self._world, shares)

    def count(self, micro_batches: Sequence[MicroBatch]) -> dict[str, int]:
        """Members of each component, and what else is counted, over all ranks."""
        totals = self._world.sums(count_locally(micro_batches))
        # Shares of traces are added up.
        return {name: round(value) for name, value in totals.items()}

    def _forward(
        self, micro_batch: MicroBatch, members: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro batch's share of L, and its share of every metric, float64 []."""
        tensors = TrainTensors.build(micro_batch, self._world.device)
        scores = self._policy(tensors)
        if self._observe is not None:
            self._observe(micro_batch, scores, int(_denominator("rl", members)))
        # Keeps the model in the graph of a micro batch without members.
        loss = scores.logprobs[:0].sum()
        shares: dict[str, Tensor] = {}
        for name in LOSS_NAMES:
            if not members[name]:
                continue
            output = self._losses[name](_loss_inputs(tensors, scores, name))
            weights = tensors.weights[name]
            weighted = torch.where(weights != 0, weights * output.per_token, 0.0)
            if self._aggregation == "sequence_mean" and name in _JOINT:
                component = (weighted / tensors.members_in_sample(_JOINT)).sum()
                component = component / max(1, members[SEQUENCES])
            elif self._aggregation == "trace_mean" and name in _JOINT:
                component = (weighted / tensors.trace_members["joint"]).sum()
                component = component / max(1, members[f"{TRACES}joint"])
            else:
                component = weighted.sum() / _denominator(name, members)
            loss = loss + component
            shares[f"{name}/mean"] = component.detach().double()
            shares |= _of_loss(name, output, scores, tensors, members[name])
            if name in _OBSERVED:
                shares |= _surprise(name, tensors, scores, members[name])
        shares |= _policy_means(tensors, scores, members)
        return loss, shares | {"total": loss.detach().double()}


def count_locally(micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
    """What this rank adds to `GradientStep.count`."""
    of_traces = [f"{TRACES}{name}" for name in COUNTED_BY_TRACE]
    counts: dict[str, float] = dict.fromkeys(
        (*LOSS_NAMES, "tokens", "scored", SEQUENCES, *of_traces), 0
    )
    for micro_batch in micro_batches:
        for name, number in count_members(micro_batch).items():
            counts[name] += number
        for name, share in count_traces(micro_batch).items():
            counts[f"{TRACES}{name}"] += share
        counts["tokens"] += 0 if micro_batch.is_dummy else len(micro_batch)
        counts["scored"] += int(np.count_nonzero(~np.isnan(micro_batch.arrays.reference_logprobs)))
        counts[SEQUENCES] += count_sequences(micro_batch, _JOINT)
    return counts


def _denominator(name: str, members: Mapping[str, float]) -> float:
    """How many tokens, or traces, a component is divided by."""
    if name == "ce_trace":
        return max(1, members[f"{TRACES}{name}"])
    if name in _JOINT:
        return max(1, sum(members[joint] for joint in _JOINT))
    return max(1, members[name])


def _loss_inputs(tensors: TrainTensors, scores: TokenScores, name: str) -> LossInputs:
    old, drift = tensors.sampling_logprobs, None
    if name == "rl" and tensors.proximal_logprobs is not None:
        old, drift = tensors.proximal_logprobs, tensors.proximal_logprobs - old
    return LossInputs(
        policy_logprobs=scores.logprobs,
        sampling_logprobs=old,
        drift=drift,
        reference_logprobs=tensors.reference_logprobs,
        is_scored=tensors.is_scored,
        advantages=tensors.advantages,
        entropies=scores.entropies,
        mask=tensors.members(name),
        sample_index=tensors.sample_index,
    )


@torch.no_grad()
def _surprise(
    name: str, tensors: TrainTensors, scores: TokenScores, num_members: float
) -> dict[str, Tensor]:
    """-policy logprob of the members, unweighted: its mean, its largest value, their number."""
    mask = tensors.members(name)
    surprise = torch.where(mask, -scores.logprobs, 0.0)
    return {
        f"{name}/nll/mean": surprise.sum(dtype=torch.float64) / num_members,
        f"{name}/nll/max": surprise.max().double(),
        f"{name}/tokens/sum": mask.sum(dtype=torch.float64),
    }


def _is_peak(metric: str) -> bool:
    """Tell whether parts of a metric are merged by taking the largest; all others are added up."""
    return metric.endswith("/max")


def _policy_means(
    tensors: TrainTensors, scores: TokenScores, members: Mapping[str, float]
) -> dict[str, Tensor]:
    """Entropy of the main component, and the ratios of the rl tokens."""
    main = next((name for name in LOSS_NAMES if members[name]), "rl")
    denominator = max(1, members[main])
    means = _means({"entropy/mean": scores.entropies}, tensors.members(main), denominator)
    if main == "rl" and members["rl"]:
        log_ratio = scores.logprobs - tensors.sampling_logprobs
        means |= ratio_shares(log_ratio, tensors.members("rl"), denominator)
    return means


@torch.no_grad()
def _of_loss(
    name: str, output: LossOutput, scores: TokenScores, tensors: TrainTensors, denominator: float
) -> dict[str, Tensor]:
    """Shares of its metrics, and tokens to which the loss of rl gave no number."""
    mask = tensors.members(name)
    shares = _means(output.metrics, mask, denominator)
    if name == "rl":
        is_wrong = mask & scores.logprobs.isfinite() & ~output.per_token.isfinite()
        shares[_NOT_FINITE] = is_wrong.sum(dtype=torch.float64)
    return shares


@torch.no_grad()
def _means(metrics: Mapping[str, Tensor], mask: Tensor, denominator: float) -> dict[str, Tensor]:
    """The shares of this micro batch: in averages over `denominator` tokens, in sums and peaks."""
    return {name: _share(name, metric, mask, denominator) for name, metric in metrics.items()}


def _share(name: str, values: Tensor, mask: Tensor, denominator: float) -> Tensor:
    if _is_peak(name):
        lowest = torch.full_like(values, -math.inf, dtype=torch.float64)
        return torch.cat([torch.where(mask, values, lowest), lowest[:1]]).max().double()
    total = torch.where(mask, values, 0.0).sum(dtype=torch.float64)
    return total if name.endswith("/sum") else total / denominator
