"""The check passes every registered loss and names what is wrong with bad ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from configs import build_loss_config
from torch import Tensor

from gradus.cli.main import main
from gradus.config.schema.learning import LossConfig
from gradus.errors import ConfigError, ExitCode
from gradus.trainer.distributed import World
from gradus.trainer.losses import (
    LossInputs,
    LossOutput,
    build_loss,
    clamped_exp,
    members_only,
)
from gradus.trainer.step import Aggregation
from gradus_lab.check_loss import BOUND, LossReport, check_loss

pytestmark = pytest.mark.torch

Spoil = Callable[[LossInputs, Tensor], Tensor]


def spoiled(spoil: Spoil) -> Callable[[LossInputs], LossOutput]:
    """A plain policy gradient, changed by `spoil`."""

    def loss(inputs: LossInputs) -> LossOutput:
        members = members_only(inputs)
        log_ratio = members.policy_logprobs - members.sampling_logprobs
        return LossOutput(spoil(inputs, -members.advantages * log_ratio.exp()))

    return loss


def failing_layouts(report: LossReport) -> set[str]:
    return {row.layout for row in report.rows if row.reason is not None}


PACKED = {
    "all samples in one row",
    "the row backwards",
    "padding in the row",
    "micro batches",
    "2 ranks",
    "3 ranks",
}


@pytest.mark.parametrize("name", sorted(LossConfig.registered()))
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_every_registered_loss_is_invariant(
    name: str, level: str, aggregation: Aggregation, world: World
) -> None:
    options = {
        "importance_sampling": "truncated",
        "importance_level": level,
        "entropy_coefficient": 0.1,
        "reference_kl_coefficient": 0.1,
    }
    loss = build_loss(build_loss_config(name, **options))
    report = check_loss(loss, world, aggregation=aggregation)
    assert report.reason is None
    assert report.num_members > 50
    assert all(row.loss < BOUND and row.gradient < BOUND for row in report.rows)


def test_a_loss_that_averages_over_its_sample_is_invariant(world: World) -> None:
    def spoil(inputs: LossInputs, per_token: Tensor) -> Tensor:
        sizes = inputs.sample_sums(torch.ones_like(per_token))
        return torch.where(inputs.mask, per_token / sizes.clamp(min=1), 0.0)

    assert check_loss(spoiled(spoil), world).reason is None


def test_a_loss_that_divides_by_the_members_of_the_micro_batch_is_caught(world: World) -> None:
    report = check_loss(
        spoiled(lambda inputs, per_token: per_token / inputs.mask.sum().clamp(min=1)), world
    )
    assert failing_layouts(report) == PACKED
    assert "divides by something that it counts in the micro batch" in (report.reason or "")


def test_a_loss_that_divides_by_no_members_at_all_is_caught(world: World) -> None:
    """A sample may have none; the gradient of x / 0 is NaN, also where it is masked."""

    def loss(inputs: LossInputs) -> LossOutput:
        gain = inputs.advantages * inputs.policy_logprobs / inputs.mask.sum()
        return LossOutput(torch.where(inputs.mask, -gain, 0.0))

    assert "not finite" in (check_loss(loss, world).reason or "")


@pytest.mark.parametrize("share", [0.0, None])
def test_a_loss_that_moves_no_logprob_is_refused(world: World, share: float | None) -> None:
    def spoil(inputs: LossInputs, per_token: Tensor) -> Tensor:
        return per_token.detach() if share is None else share * per_token

    with pytest.raises(ConfigError, match="has no gradient"):
        check_loss(spoiled(spoil), world)


def test_a_loss_that_divides_by_the_length_of_the_row_is_caught(world: World) -> None:
    report = check_loss(spoiled(lambda inputs, per_token: per_token / len(inputs.mask)), world)
    assert failing_layouts(report) == PACKED
    assert "all samples in one row: the loss scales all tokens" in (report.reason or "")


@pytest.mark.parametrize("places", [-2, 3, 5])
def test_a_loss_that_looks_at_its_neighbours_in_the_row_is_caught(
    places: int, world: World
) -> None:
    def spoil(inputs: LossInputs, per_token: Tensor) -> Tensor:
        return torch.where(inputs.mask, (per_token + per_token.roll(places)) / 2, 0.0)

    report = check_loss(spoiled(spoil), world)
    assert failing_layouts(report) >= {"all samples in one row", "the row backwards"}
    assert "across samples" in (report.reason or "")


def test_a_neighbour_beyond_the_first_token_of_a_sample_is_none(world: World) -> None:
    """The first token never trains, so one place to the left lies in the same sample."""

    def spoil(inputs: LossInputs, per_token: Tensor) -> Tensor:
        return torch.where(inputs.mask, per_token + per_token.roll(1), 0.0)

    assert check_loss(spoiled(spoil), world).reason is None


def test_a_loss_that_centres_advantages_over_the_micro_batch_is_caught(world: World) -> None:
    def spoil(inputs: LossInputs, per_token: Tensor) -> Tensor:
        mean = per_token.sum() / inputs.mask.sum().clamp(min=1)
        return torch.where(inputs.mask, per_token - mean, 0.0)

    report = check_loss(spoiled(spoil), world)
    assert failing_layouts(report) == PACKED
    assert "across samples" in (report.reason or "")


def test_a_loss_that_reads_tokens_outside_the_mask_is_caught(world: World) -> None:
    def spoil(inputs: LossInputs, per_token: Tensor) -> Tensor:
        return torch.where(inputs.mask, per_token * inputs.advantages.roll(1), 0.0)

    report = check_loss(spoiled(spoil), world)
    assert "other numbers outside the mask" in failing_layouts(report)


@pytest.mark.parametrize("field", ["policy_logprobs", "entropies"])
def test_a_loss_that_reads_scores_outside_the_mask_is_caught(world: World, field: str) -> None:
    """A baseline over the whole row: a plain loss otherwise, and the same in every layout."""

    def spoil(inputs: LossInputs, per_token: Tensor) -> Tensor:
        values = getattr(inputs, field).detach()
        sums = torch.zeros_like(values).index_add(0, inputs.sample_index, values)
        per_token = per_token * (1 + 0.01 * sums[inputs.sample_index])
        return torch.where(inputs.mask, per_token, 0.0)

    report = check_loss(spoiled(spoil), world)
    assert failing_layouts(report) == {"other numbers outside the mask"}


def test_the_check_runs_on_enough_tokens(world: World) -> None:
    assert check_loss(spoiled(lambda _, per_token: per_token), world).num_members >= 150


def test_the_check_needs_no_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is there and cannot be used: whoever asks for it fails."""
    monkeypatch.setattr("gradus.trainer.model.kernels.count_gpus", lambda: 1)
    monkeypatch.setattr("gradus.trainer.distributed.count_gpus", lambda: 1)
    assert main(["lab", "check-loss", "dppo"]) == ExitCode.DONE


def test_a_loss_that_masks_by_multiplication_is_caught(world: World) -> None:
    def loss(inputs: LossInputs) -> LossOutput:
        ratio = (inputs.policy_logprobs - inputs.sampling_logprobs).exp()
        return LossOutput(-inputs.advantages * ratio * inputs.mask)

    with pytest.raises(ConfigError, match="not 0 outside the mask"):
        check_loss(loss, world)


def test_a_way_back_through_a_masked_overflow_is_caught(world: World) -> None:
    """The value is masked after exp, so that the gradient of the overflow is 0 · inf."""

    def loss(inputs: LossInputs) -> LossOutput:
        ratio = (inputs.policy_logprobs - inputs.sampling_logprobs).exp()
        return LossOutput(torch.where(inputs.mask, -inputs.advantages * ratio, 0.0))

    report = check_loss(loss, world)
    assert failing_layouts(report) == {"padding in the row"}
    assert "not finite" in (report.reason or "")


class Counting:
    """Its loss grows with every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, inputs: LossInputs) -> LossOutput:
        self.calls += 1
        return LossOutput(torch.where(inputs.mask, inputs.policy_logprobs * self.calls, 0.0))


def test_a_loss_with_a_memory_is_caught(world: World) -> None:
    assert "keeps state" in (check_loss(Counting(), world).reason or "")


def test_a_loss_that_draws_random_numbers_is_caught(world: World) -> None:
    report = check_loss(spoiled(lambda _, per_token: per_token * torch.rand_like(per_token)), world)
    assert (report.reason or "").startswith("the same call twice")


def test_a_loss_of_low_precision_is_caught(world: World) -> None:
    report = check_loss(
        spoiled(lambda _, per_token: per_token.bfloat16().to(per_token.dtype)), world
    )
    assert report.reason is None  # The same rounding in both is not a layout's fault.

    def lossy(inputs: LossInputs, per_token: Tensor) -> Tensor:
        huge = torch.tensor(1e7, dtype=per_token.dtype)
        return torch.where(inputs.mask, (per_token + huge) - huge, 0.0)

    assert "too far from float64" in (check_loss(spoiled(lossy), world).reason or "")


def test_a_loss_that_averages_to_one_number_is_refused(world: World) -> None:
    with pytest.raises(ConfigError, match="does not sum or average"):
        check_loss(spoiled(lambda _, per_token: per_token.mean()), world)


def test_an_error_of_the_loss_says_where_it_happened(world: World) -> None:
    def broken(inputs: LossInputs) -> LossOutput:
        return LossOutput(inputs.policy_logprobs + torch.zeros(9999))

    with pytest.raises(ConfigError, match=r"on 9 tokens in torch\.float64: .*broken: RuntimeError"):
        check_loss(broken, world)


def test_something_else_than_a_loss_output_is_refused(world: World) -> None:
    with pytest.raises(ConfigError, match="returns a Tensor"):
        check_loss(lambda inputs: inputs.policy_logprobs, world)  # type: ignore[arg-type, return-value]


def test_the_check_can_tell_a_clamped_ratio_from_a_wrong_one(world: World) -> None:
    """A constant weight is fine: the gradient is compared with the loss's own, not with a rule."""

    def loss(inputs: LossInputs) -> LossOutput:
        members = members_only(inputs)
        weights = clamped_exp(members.policy_logprobs - members.sampling_logprobs)
        return LossOutput(-members.advantages * weights * members.policy_logprobs)

    assert check_loss(loss, world).reason is None
