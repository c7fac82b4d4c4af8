"""`gradus lab check-loss`: whether each token gets the same gradient however samples are laid out.

The loss runs through the trainer's own gradient step over a table of logprobs instead of a
model: each token of each sample has its own logprob and entropy, so that the gradient is known
token by token. The truth is the same loss in float64, called with one sample at a time.
Shapes: T tokens of a micro batch, K tokens of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradus.cli.options import print_help, wants_help
from gradus.config import learning, load_config
from gradus.errors import ConfigError, ExitCode
from gradus.gate import interruptible
from gradus.trainer.distributed import CPU, World, join_world
from gradus.trainer.losses import LossInputs, LossOutput, TokenLoss, build_loss, guarded_loss
from gradus.trainer.model.policy_model import TokenScores
from gradus.trainer.step import Aggregation, GradientStep, count_locally
from gradus.trainer.tensors import TrainTensors, count_members
from gradus.wire.micro_batch import MicroBatch
from gradus.wire.packing import pack
from gradus.wire.sample import Sample
from gradus.wire.tokens import TokenArrays
from gradus.wire.versions import VersionSpan

BOUND = 1e-5
"""Largest difference to float64: of the loss relative to the sum of its absolute values, of a
token's gradient relative to the largest one."""
_LENGTHS = (9, 2, 31, 17, 5, 40, 12, 3, 24, 7, 28, 14, 36, 6, 19, 33, 11, 22)
_MICRO_BATCH_TOKENS = 48
_EXTREME = np.float32(1e30)
_SAME_SCALE = 1e-3

_NOT_FINITE = (
    "gives numbers that are not finite; put a harmless value into masked tokens with torch.where "
    "before exp, log and division"
)
_IMPRECISE = "is too far from float64; look for differences of large numbers"
_DIVIDES = (
    "scales all tokens of a sample by {factor:.3g}: it divides by something that it counts in the "
    "micro batch. Return nats per token; the trainer divides by the members of the whole batch"
)
_MIXES = (
    "lets a token depend on its neighbours: it computes across samples. Use inputs.sample_sums, "
    "inputs.sample_means or inputs.sample_index for anything across tokens"
)
_READS_OUTSIDE = (
    "reads tokens outside the mask, which may hold anything; use inputs.mask in a torch.where first"
)
_KEEPS_STATE = "differs from call to call: it keeps state or draws random numbers"
_PRECISION = "one sample at a time"
_OUTSIDE = "other numbers outside the mask"
_REASON_OF = {_PRECISION: _IMPRECISE, _OUTSIDE: _READS_OUTSIDE}


SUMMARY = (
    "Shows whether a loss, by name or as package.module:Class, is the same in micro batches, "
    "packed rows, with padding and over ranks, against float64 on single samples. Its options are "
    "flags: --threshold 0.1, or --options.x 1 for your own class. Ends with an error and its "
    "reason when it is not."
)


@dataclass(frozen=True)
class LayoutError:
    """How far one layout is from the truth."""

    layout: str
    loss: float
    gradient: float
    reason: str | None
    """What is wrong; None when both are within the bound."""


@dataclass(frozen=True)
class LossReport:
    """One row for each layout."""

    num_samples: int
    num_members: int
    rows: tuple[LayoutError, ...]

    @property
    def reason(self) -> str | None:
        """The first reason against the loss; None when it is invariant."""
        return next(
            (f"{row.layout}: the loss {row.reason}" for row in self.rows if row.reason), None
        )


def run(words: Sequence[str]) -> int:
    """Check the loss and print one row for each layout."""
    if wants_help(words):
        print_help("lab check-loss NAME", SUMMARY, learning.LossConfig)
        return ExitCode.DONE
    if not words or words[0].startswith(("-", "@")):
        raise ConfigError("name a loss: 'gradus lab check-loss dppo' or '... my_module:MyLoss'")
    config = load_config(learning.loss_config(words[0]), ["--type", words[0], *words[1:]])

    loss = build_loss(config)
    # Float64 is the measure, and a table in the place of a model needs no GPU.
    with join_world(CPU) as world, interruptible():
        report = check_loss(loss, world, aggregation=config.aggregation)
    print("\n".join(_table(config.type, report)))
    if report.reason is not None:
        raise ConfigError(f"{config.type} is not invariant. In {report.reason}")
    return ExitCode.DONE


def _table(name: str, report: LossReport) -> list[str]:
    width = max(len(row.layout) for row in report.rows)
    lines = [
        f"loss {name}: {report.num_samples} samples, {report.num_members} tokens that train; "
        f"relative difference to float64, bound {BOUND:g}",
        f"{'':<{width}}  {'loss':>8}  {'gradient':>8}",
    ]
    for row in report.rows:
        verdict = "same" if row.reason is None else "DIFFERENT"
        lines.append(f"{row.layout:<{width}}  {row.loss:>8.1e}  {row.gradient:>8.1e}  {verdict}")
    return lines


def check_loss(
    loss: TokenLoss, world: World, *, aggregation: Aggregation = "token_mean", seed: int = 0
) -> LossReport:
    """The loss in every layout; ConfigError when it fails or breaks promises of `TokenLoss`."""
    samples = _build_samples(np.random.default_rng(seed))
    step = _TableStep(samples, _Watched(loss), world, aggregation=aggregation, seed=seed)
    truth = step.truth()
    if not truth.gradient.any():
        raise ConfigError(
            "the loss has no gradient: it would train nothing; compute it from "
            "inputs.policy_logprobs, without detach"
        )
    alone = _alone(samples)
    rows = [_compare_calls(step.measure(alone), step.measure(alone))]
    rows += [
        _compare(name, step.measure(ranks, is_other_outside=name == _OUTSIDE), truth)
        for name, ranks in _layouts(samples)
    ]
    return LossReport(len(samples), int(truth.is_member.sum()), tuple(rows))


def _build_samples(random: np.random.Generator) -> list[Sample]:
    """Ragged samples whose token ids are places in the table."""
    starts = np.cumsum([0, *_LENGTHS])
    return [
        _build_sample(random, int(start), length)
        for start, length in zip(starts, _LENGTHS, strict=False)
    ]


def _build_sample(random: np.random.Generator, start: int, length: int) -> Sample:
    # The first token of a sample never trains and so keeps neighbours apart; short prompts leave
    # little else between the members of two samples.
    is_sampled = np.arange(length) >= min(int(random.choice([1, 1, 1, 3])), length - 1)

    sampling_logprobs = random.uniform(-3.0, -0.1, length)
    advantages = random.normal(size=length)
    reference_logprobs = random.uniform(-3.0, -0.1, length)
    weights = np.where(is_sampled, random.choice([0.0, 0.5, 1.0], length), 0.0)
    return Sample(
        id=f"sample-{start}",
        environment="check-loss",
        group_id="group",
        episode_id=f"episode-{start}",
        reward=0.0,
        versions=VersionSpan(oldest=0, newest=0),
        arrays=TokenArrays.build(
            np.arange(start, start + length),
            {"rl": weights},
            sampling_logprobs=sampling_logprobs,
            advantages=advantages,
            reference_logprobs=reference_logprobs,
        ),
    )


def _alone(samples: Sequence[Sample]) -> list[list[MicroBatch]]:
    return [[MicroBatch.join([sample]) for sample in samples]]


def _layouts(samples: Sequence[Sample]) -> list[tuple[str, list[list[MicroBatch]]]]:
    """Name and micro batches of each rank."""
    spaced = [part for sample in samples for part in (sample, _padding(sample))]
    return [
        (_PRECISION, _alone(samples)),
        (_OUTSIDE, _alone([_with_other_numbers_outside(sample) for sample in samples])),
        ("all samples in one row", [[MicroBatch.join(samples)]]),
        ("the row backwards", [[MicroBatch.join(samples[::-1])]]),
        ("padding in the row", [[MicroBatch.join(spaced)]]),
        ("micro batches", pack(samples, max_tokens=_MICRO_BATCH_TOKENS, num_ranks=1)),
        ("2 ranks", pack(samples, max_tokens=2 * _MICRO_BATCH_TOKENS, num_ranks=2)),
        ("3 ranks", pack(samples, max_tokens=_MICRO_BATCH_TOKENS, num_ranks=3)),
    ]


def _padding(sample: Sample) -> Sample:
    """Tokens that do not train, with numbers that overflow in whatever multiplies them."""
    count = len(sample)
    return sample.with_arrays(
        loss_mask=np.zeros(count, np.bool_),
        sampling_logprobs=np.full(count, -_EXTREME),
        advantages=np.full(count, _EXTREME),
    )


def _with_other_numbers_outside(sample: Sample) -> Sample:
    is_member = sample.arrays.loss_weights["rl"] != 0

    def changed(values: np.ndarray) -> np.ndarray:
        return np.where(is_member, values, _other(values)).astype(np.float32)

    arrays = sample.arrays
    return sample.with_arrays(
        sampling_logprobs=changed(arrays.sampling_logprobs),
        advantages=changed(arrays.advantages),
        reference_logprobs=changed(arrays.reference_logprobs),
    )


def _other(values: np.ndarray) -> np.ndarray:
    return 1.0 - 2.0 * values


class _Watched:
    """The loss behind the gate, with the place of each error, and 0 outside the mask."""

    def __init__(self, loss: TokenLoss) -> None:
        self._loss = guarded_loss(loss)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        tokens, dtype = len(inputs.mask), inputs.policy_logprobs.dtype
        try:
            output = self._loss(inputs)
        except ConfigError as error:
            raise ConfigError(f"on {tokens} tokens in {dtype}: {error}") from error
        if bool(torch.where(inputs.mask, 0.0, output.per_token).any()):
            raise ConfigError("the loss is not 0 outside the mask; use torch.where(inputs.mask, …)")
        return output


@dataclass(frozen=True)
class _Measured:
    """L, and its derivatives by the logprobs and entropies of the table, float64 [2, K]."""

    loss: float
    gradient: np.ndarray


@dataclass(frozen=True)
class _Truth(_Measured):
    scale: float
    """Sum of the absolute shares of all tokens in L."""
    sample_of: np.ndarray
    """[K] sample that a place of the table belongs to."""
    is_member: np.ndarray
    """[K]"""


class _TableStep(torch.nn.Module):
    """A gradient step whose model is a table: token id k has logprob k and entropy k."""

    def __init__(
        self,
        samples: Sequence[Sample],
        loss: TokenLoss,
        world: World,
        *,
        aggregation: Aggregation,
        seed: int,
    ) -> None:
        super().__init__()
        random = np.random.default_rng(seed + 1)
        size = sum(map(len, samples))
        shifts = random.choice([0.05, 0.3, 1.0], size) * random.normal(size=size)
        sampling = np.concatenate([sample.arrays.sampling_logprobs for sample in samples])
        values = np.stack([np.minimum(sampling + shifts, -0.01), random.uniform(0.1, 3.0, size)])
        self.table = torch.nn.Parameter(torch.tensor(values, dtype=torch.float32))
        self._samples = samples
        self._loss = loss
        self._aggregation = aggregation
        self._step = GradientStep(self, loss, world, aggregation=aggregation)

    def forward(self, tensors: TrainTensors) -> TokenScores:
        return self._look_up(self.table, tensors)

    def measure(
        self, ranks: Sequence[Sequence[MicroBatch]], *, is_other_outside: bool = False
    ) -> _Measured:
        """What ranks with these micro batches compute together.

        `is_other_outside`: from another table on tokens that are not members.
        """
        if is_other_outside:
            with self._other_scores_outside():
                return self.measure(ranks)
        self.table.grad = None
        members = count_locally([m for micro_batches in ranks for m in micro_batches])
        shares = [self._step.accumulate(micro_batches, members) for micro_batches in ranks]
        assert self.table.grad is not None
        return _Measured(
            loss=sum(float(share["total"]) for share in shares),
            gradient=self.table.grad.double().numpy().copy(),
        )

    @contextmanager
    def _other_scores_outside(self) -> Iterator[None]:
        before = self.table.detach().clone()
        is_member = np.concatenate(
            [sample.arrays.loss_weights["rl"] != 0 for sample in self._samples]
        )
        values = before.double().numpy()
        changed = torch.tensor(np.where(is_member, values, _other(values)))
        try:
            self.table.data.copy_(changed)
            yield
        finally:
            self.table.data.copy_(before)

    def truth(self) -> _Truth:
        """The loss in float64, called with one sample at a time; plain sums."""
        table = self.table.detach().double().requires_grad_()
        counts = [count_members(MicroBatch.join([sample]))["rl"] for sample in self._samples]
        shares, is_member = [], []
        for sample, count in zip(self._samples, counts, strict=True):
            tensors = TrainTensors.build(MicroBatch.join([sample]), torch.device("cpu"))
            mask = tensors.members("rl")
            if self._aggregation != "token_mean":  # each sample is a whole trace
                divisor = max(1, count) * sum(one > 0 for one in counts)
            else:
                divisor = sum(counts)
            per_token = self._loss(_double_inputs(tensors, self._look_up(table, tensors))).per_token
            shares.append(torch.where(mask, tensors.weights["rl"] * per_token, 0.0) / divisor)
            is_member.append(mask.numpy())
        # Zeros of the table, so that a loss without gradient has one of zeros.
        total = torch.cat(shares).sum() + 0.0 * table.sum()
        (gradient,) = torch.autograd.grad(total, table)
        lengths = [len(sample) for sample in self._samples]
        return _Truth(
            loss=total.item(),
            gradient=gradient.numpy(),
            scale=torch.cat(shares).abs().sum().item(),
            sample_of=np.repeat(np.arange(len(lengths)), lengths),
            is_member=np.concatenate(is_member),
        )

    @staticmethod
    def _look_up(table: Tensor, tensors: TrainTensors) -> TokenScores:
        """Every token carries gradient, so that one from outside the mask is seen."""
        logprobs, entropies = table[:, tensors.token_ids]
        return TokenScores(logprobs=logprobs, entropies=entropies)


def _double_inputs(tensors: TrainTensors, scores: TokenScores) -> LossInputs:
    return LossInputs(
        policy_logprobs=scores.logprobs,
        sampling_logprobs=tensors.sampling_logprobs.double(),
        reference_logprobs=tensors.reference_logprobs.double(),
        advantages=tensors.advantages.double(),
        entropies=scores.entropies,
        mask=tensors.members("rl"),
        sample_index=tensors.sample_index,
        is_scored=tensors.is_scored,
    )


def _compare(layout: str, found: _Measured, truth: _Truth) -> LayoutError:
    loss = abs(found.loss - truth.loss) / max(truth.scale, 1e-12)
    largest = max(float(np.abs(truth.gradient).max()), 1e-12)
    gradient = float(np.abs(found.gradient - truth.gradient).max()) / largest
    is_near = loss <= BOUND and gradient <= BOUND
    return LayoutError(layout, loss, gradient, None if is_near else _reason(layout, found, truth))


def _compare_calls(first: _Measured, second: _Measured) -> LayoutError:
    """Bit by bit: nothing but the loss could differ."""
    is_same = first.loss == second.loss or (np.isnan(first.loss) and np.isnan(second.loss))
    is_same &= np.array_equal(first.gradient, second.gradient, equal_nan=True)
    loss = abs(first.loss - second.loss)
    gradient = float(np.abs(first.gradient - second.gradient).max())
    return LayoutError("the same call twice", loss, gradient, None if is_same else _KEEPS_STATE)


def _reason(layout: str, found: _Measured, truth: _Truth) -> str:
    """The likeliest mistake."""
    if not all(np.isfinite(it.loss) and np.isfinite(it.gradient).all() for it in (found, truth)):
        return _NOT_FINITE
    if layout in _REASON_OF:
        return _REASON_OF[layout]
    factors = _factors(found, truth)
    if factors is None:
        return _MIXES
    return _DIVIDES.format(factor=max(factors, key=lambda factor: abs(np.log(factor))))


def _factors(found: _Measured, truth: _Truth) -> list[float] | None:
    """By how much each sample is scaled; None when its tokens are not scaled alike."""
    is_large = np.abs(truth.gradient[0]) > _SAME_SCALE * np.abs(truth.gradient[0]).max()
    factors = []
    for sample in np.unique(truth.sample_of[is_large]):
        chosen = is_large & (truth.sample_of == sample)
        ratios = found.gradient[0][chosen] / truth.gradient[0][chosen]
        if ratios.min() <= 0 or ratios.max() > ratios.min() * (1 + _SAME_SCALE):
            return None
        factors.append(float(ratios.mean()))
    return factors
