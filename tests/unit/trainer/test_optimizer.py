"""The optimizer step: clipping over all parameters, the gate for NaN, and its state on disk."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pydantic import TypeAdapter
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from gradus.config.schema.learning import OptimizerConfig
from gradus.errors import CorruptStateError, GradusError
from gradus.trainer.distributed import World
from gradus.trainer.optimizer.optimizer import PolicyOptimizer

pytestmark = pytest.mark.torch

CONFIG: TypeAdapter[OptimizerConfig] = TypeAdapter(OptimizerConfig)
RULES = [
    {"type": "adamw", "weight_decay": 0.1},
    {"type": "muon", "weight_decay": 0.1},
    {"type": "sgd", "momentum": 0.9},
    {"type": "sgd"},
]


def build_optimizer(
    world: World, *parameters: torch.nn.Parameter, max_skipped_steps: int = 3, **options: Any
) -> PolicyOptimizer:
    return PolicyOptimizer(
        torch.nn.ParameterList(parameters),
        CONFIG.validate_python({"lr": 0.1, **options}),
        max_steps=10,
        max_skipped_steps=max_skipped_steps,
        world=world,
    )


def parameter(*gradient: float) -> torch.nn.Parameter:
    result = torch.nn.Parameter(torch.zeros(len(gradient)))
    result.grad = torch.tensor(gradient)
    return result


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
    optimizer.rules[0].register_step_pre_hook(
        lambda *_: seen.extend([float(first.grad), float(second.grad)])  # type: ignore[arg-type]
    )
    assert optimizer.step(0).grad_norm == pytest.approx(5.0)
    assert seen == pytest.approx([0.6, 0.8], rel=1e-4)


@pytest.mark.shows("F39")
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


@pytest.mark.shows("F39")
def test_too_many_skips_in_a_row_end_the_run(world: World) -> None:
    weights = parameter(math.nan)
    optimizer = build_optimizer(world, weights, max_skipped_steps=2)
    optimizer.step(0)
    weights.grad = torch.tensor([math.nan])
    with pytest.raises(GradusError, match="2 steps in a row"):
        optimizer.step(1)


@pytest.mark.shows("F39")
def test_a_skip_does_not_shift_the_schedule(world: World) -> None:
    weights = parameter(math.nan)
    optimizer = build_optimizer(world, weights, schedule="linear")
    optimizer.step(0)
    weights.grad = torch.tensor([1.0])
    assert optimizer.step(1).lr == pytest.approx(0.09)


def sharded_model(world: World) -> torch.nn.Module:
    """A model with every kind of parameter, as FSDP holds it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(7, 5), torch.nn.Linear(5, 3), torch.nn.LayerNorm(3)
    )
    return fully_shard(model, mesh=world.mesh)


def optimizer_of(model: torch.nn.Module, world: World, rule: dict[str, Any]) -> PolicyOptimizer:
    config = CONFIG.validate_python({"lr": 0.1, **rule})
    return PolicyOptimizer(model, config, max_steps=10, max_skipped_steps=3, world=world)


def learn(model: torch.nn.Module, optimizer: PolicyOptimizer, step: int) -> None:
    tokens = torch.tensor([step, 1, 6])
    (model(tokens) * torch.arange(9.0).view(3, 3)).sum().backward()
    optimizer.step(step)


def weights_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor().detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule.values())))
def test_a_saved_and_loaded_optimizer_takes_the_same_next_step(
    world: World, tmp_path: Path, rule: dict[str, Any], steps_before: int
) -> None:
    model = sharded_model(world)
    optimizer = optimizer_of(model, world, rule)
    for step in range(steps_before):
        learn(model, optimizer, step)
    optimizer.num_skipped = 4
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path / "state")
    learn(model, optimizer, steps_before)

    fresh = sharded_model(world)
    resumed = optimizer_of(fresh, world, rule)
    state = {"model": fresh.state_dict(), "optimizer": resumed.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "state")
    resumed.load_state_dict(state["optimizer"])
    learn(fresh, resumed, steps_before)

    assert resumed.num_skipped == 4
    for expected, found in zip(weights_of(model), weights_of(fresh), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule.values())))
def test_torch_state_dict_functions_take_the_rules_too(world: World, rule: dict[str, Any]) -> None:
    model, fresh = sharded_model(world), sharded_model(world)
    optimizer, resumed = optimizer_of(model, world, rule), optimizer_of(fresh, world, rule)
    learn(model, optimizer, 0)
    fresh.load_state_dict(model.state_dict())
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer.rules))
    set_optimizer_state_dict(fresh, resumed.rules, state)
    learn(model, optimizer, 1)
    learn(fresh, resumed, 1)
    for expected, found in zip(weights_of(model), weights_of(fresh), strict=True):
        assert torch.equal(expected, found)


def test_state_of_another_optimizer_is_refused(world: World) -> None:
    model = sharded_model(world)
    adamw = optimizer_of(model, world, {"type": "adamw"})
    sgd = optimizer_of(model, world, {"type": "sgd", "momentum": 0.5})
    with pytest.raises(CorruptStateError, match="missing or unexpected"):
        sgd.load_state_dict(adamw.state_dict())


def test_state_is_tensors_under_the_names_of_the_model(world: World) -> None:
    state = optimizer_of(sharded_model(world), world, {"type": "muon"}).state_dict()
    assert {"1.weight.momentum_buffer", "0.weight.exp_avg", "2.bias.step"} <= state.keys()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
