"""Two ranks update split parameters as one rank updates whole ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.torch

PROGRAM = '''
import sys
from pathlib import Path

import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard

from gradus.config.schema.learning import OptimizerConfig
from gradus.trainer.distributed import CPU, join_world
from gradus.trainer.optimizer.optimizer import PolicyOptimizer

RULES = [
    {"type": "adamw", "weight_decay": 0.1},
    {"type": "muon", "weight_decay": 0.1},
    {"type": "sgd", "momentum": 0.9},
]


def train(rule, world):
    """Weights and summed state after three steps; five rows and three do not split evenly."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(7, 5), torch.nn.Linear(5, 3), torch.nn.LayerNorm(3)
    )
    fully_shard(model, mesh=world.mesh)
    config = TypeAdapter(OptimizerConfig).validate_python({"lr": 0.1, **rule})
    optimizer = PolicyOptimizer(model, config, max_steps=9, max_skipped_steps=1, world=world)
    for step in range(3):
        (model(torch.tensor([step, 1, 6])) * torch.arange(9.0).view(3, 3)).sum().backward()
        optimizer.step(step)
    found = {f"{rule['type']}.{n}": p.full_tensor() for n, p in model.named_parameters()}
    for name, value in optimizer.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[f"{rule['type']}.state.{name}"] = whole
    return found


def main(folder):
    with join_world(CPU, deterministic=True) as world:
        found = {}
        for rule in RULES:
            found |= {n: v.detach().contiguous() for n, v in train(rule, world).items()}
        if world.is_first:
            save_file(found, folder / f"ranks_{world.size}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
'''


def test_two_ranks_give_the_weights_and_moments_of_one(
    tmp_path: Path, run_ranks: Callable[..., str]
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    for num_ranks in (1, 2):
        run_ranks(script, tmp_path, num_ranks=num_ranks)
    one = load_file(tmp_path / "ranks_1.safetensors")
    two = load_file(tmp_path / "ranks_2.safetensors")
    assert one.keys() == two.keys()
    assert {"muon.1.weight", "muon.state.1.weight.momentum_buffer"} <= one.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-5, atol=1e-6, msg=name)


ONE_SICK_RANK = """
import math

import torch

from gradus.config import AdamWConfig
from gradus.trainer.distributed import CPU, join_world
from gradus.trainer.optimizer.optimizer import PolicyOptimizer

with join_world(CPU, deterministic=True) as world:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = PolicyOptimizer(
        torch.nn.ParameterList([weight]),
        AdamWConfig(lr=1e-5),
        max_steps=9,
        max_skipped_steps=2,
        world=world,
    )
    weight.grad = torch.tensor([1.0 if world.is_first else math.nan])
    assert optimizer.step(0).is_skipped
    assert weight.item() == 0.0
"""


def test_every_rank_skips_a_step_when_the_gradient_of_one_is_not_finite(
    tmp_path: Path, run_ranks: Callable[..., str]
) -> None:
    script = tmp_path / "program.py"
    script.write_text(ONE_SICK_RANK)
    run_ranks(script)
