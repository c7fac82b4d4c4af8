"""The optimizer: schedules, clipping over all parameters, and the gate for non-finite gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gradus.config.trainer import OptimizerConfig
from gradus.errors import GradusError
from gradus.trainer.distributed import World
from gradus.trainer.optimizer import PolicyOptimizer, learning_rate

pytestmark = pytest.mark.torch


def build_optimizer(
    world: World, *parameters: torch.nn.Parameter, max_skipped_steps: int = 3, **options: Any
) -> PolicyOptimizer:
    return PolicyOptimizer(
        [(f"p{i}", p) for i, p in enumerate(parameters)],
        OptimizerConfig(**{"lr": 0.1, **options}),
        max_steps=10,
        max_skipped_steps=max_skipped_steps,
        world=world,
    )


def parameter(*gradient: float) -> torch.nn.Parameter:
    result = torch.nn.Parameter(torch.zeros(len(gradient)))
    result.grad = torch.tensor(gradient)
    return result


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.5, 0.0]),
        ("cosine", [1.0, 0.5, 0.0]),
    ],
)
def test_schedules_start_at_the_peak_and_end_at_their_floor(
    schedule: str, rates: list[float]
) -> None:
    config = OptimizerConfig.model_validate({"lr": 1.0, "schedule": schedule})
    assert [learning_rate(config, step, 10) for step in (0, 5, 10)] == pytest.approx(rates)


def test_the_warm_up_rises_to_the_peak() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(config, step, 10) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_step_moves_parameters_by_the_rate_and_clears_gradients(world: World) -> None:
    weights = parameter(1.0, -1.0)
    update = build_optimizer(world, weights).step(0)
    assert weights.grad is None
    assert weights.tolist() == pytest.approx([-0.1, 0.1], rel=1e-4)
    assert update.grad_norm == pytest.approx(math.sqrt(2))
    assert update.lr == 0.1
    assert not update.is_skipped


def test_clipping_counts_all_parameters(world: World) -> None:
    first, second = parameter(3.0), parameter(4.0)
    seen: list[float] = []
    optimizer = build_optimizer(world, first, second, max_grad_norm=1.0)
    optimizer._adamw.register_step_pre_hook(
        lambda *_: seen.extend([float(first.grad), float(second.grad)])  # type: ignore[arg-type]
    )
    assert optimizer.step(0).grad_norm == pytest.approx(5.0)
    assert seen == pytest.approx([0.6, 0.8], rel=1e-4)


def test_decay_reaches_matrices_only(world: World) -> None:
    matrix = torch.nn.Parameter(torch.ones(2, 2))
    vector = torch.nn.Parameter(torch.ones(2))
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    build_optimizer(world, matrix, vector, weight_decay=0.5).step(0)
    assert matrix[0, 0].item() == pytest.approx(1 - 0.1 * 0.5)
    assert vector[0].item() == 1.0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(world: World, poison: float) -> None:
    healthy, sick = parameter(1.0), parameter(poison)
    optimizer = build_optimizer(world, healthy, sick)
    assert optimizer.step(0).is_skipped
    assert optimizer.num_skipped == 1
    assert healthy.item() == 0.0
    assert healthy.grad is None


def test_a_good_step_between_resets_the_streak(world: World) -> None:
    weights = parameter(math.nan)
    optimizer = build_optimizer(world, weights, max_skipped_steps=2)
    for step in range(3):
        weights.grad = torch.tensor([math.nan])
        optimizer.step(step)
        weights.grad = torch.tensor([1.0])
        optimizer.step(step)
    assert optimizer.num_skipped == 3


def test_too_many_skips_in_a_row_end_the_run(world: World) -> None:
    weights = parameter(math.nan)
    optimizer = build_optimizer(world, weights, max_skipped_steps=2)
    optimizer.step(0)
    weights.grad = torch.tensor([math.nan])
    with pytest.raises(GradusError, match="2 steps in a row"):
        optimizer.step(1)


def test_a_skip_does_not_shift_the_schedule(world: World) -> None:
    weights = parameter(math.nan)
    optimizer = build_optimizer(world, weights, schedule="linear")
    optimizer.step(0)
    weights.grad = torch.tensor([1.0])
    assert optimizer.step(1).lr == pytest.approx(0.09)
