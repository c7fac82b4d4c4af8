"""Experts that are split over ranks train, and are saved, as one rank trains and saves them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_experts import build_tiny_moe_model

from gradus.trainer.model.experts.groups import Groups

pytestmark = pytest.mark.torch

SPLIT = {"expert_parallel_size": 2}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "adamw", "lr": 1e-4, "weight_decay": 0.1},
    "muon": {"type": "muon", "lr": 1e-3, "weight_decay": 0.1},
    "sgd": {"type": "sgd", "lr": 1.0, "momentum": 0.9},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": SPLIT,
    "contexts": SPLIT | {"context_parallel_size": 2},
    "a ring": SPLIT | {"context_parallel_size": 2, "context_parallel_style": "ring"},
    "copies": SPLIT | {"replicate_size": 2},
    "four owners": {"expert_parallel_size": 4},
}
PROGRAM = """
import json
import sys
from pathlib import Path

import numpy as np
import torch
from builders import build_sample
from pydantic import TypeAdapter
from ranked_families import told

from gradus.config import ModelConfig, ParallelConfig, TrainerConfig, learning
from gradus.config.schema.learning import OptimizerConfig
from gradus.files import DurableFiles
from gradus.trainer.checkpoint.training_state import Origin, TrainingState
from gradus.trainer.distributed import CPU, build_world, join_world
from gradus.trainer.losses import Dppo
from gradus.trainer.model.build import build_policy
from gradus.trainer.optimizer.optimizer import PolicyOptimizer
from gradus.trainer.publish import serving_tensors
from gradus.trainer.step import GradientStep
from gradus.wire.packing import pack

LENGTHS = (19, 7, 30, 2)


def train(case, model, folder):
    parallel = ParallelConfig(**case["parallel"])
    world = build_world(parallel, CPU)
    settings = TrainerConfig(parallel=parallel, lora=case.get("lora"))
    torch.manual_seed(0)  # for adapters
    policy = build_policy(ModelConfig(name=model), settings, world, torch.float32)
    given = {**case["optimizer"], "max_grad_norm": 0.05}
    rule = TypeAdapter(OptimizerConfig).validate_python(given)
    optimizer = PolicyOptimizer(policy, rule, max_steps=9, max_skipped_steps=1, world=world)
    state = TrainingState(policy, optimizer, world, Origin(model={}, compute_dtype="float32"))
    gradients, first = GradientStep(policy, Dppo(learning.DppoConfig()), world), 0
    if case.get("resumes"):
        first = state.load(folder / case["resumes"] / "trainer").step
    norms = {}
    for step in range(first, case["steps"]):
        batch = [told(build_sample(n, seed=10 * step + n, vocabulary=60)) for n in LENGTHS]
        gradients.run(pack(batch, max_tokens=32, num_ranks=world.data_size)[world.data_rank])
        norms[f"norm.{step}"] = optimizer.step(step).grad_norm
        if step + 1 == case.get("saves_after"):
            files = DurableFiles()
            state.snapshot(step + 1, {}).write(folder / case["name"], world.rank, files)
    found = {name: it.numpy() for name, it in serving_tensors(policy.model, torch.float32)}
    if world.is_first:
        np.savez(folder / f"{case['name']}.npz", **found, **norms)


if __name__ == "__main__":
    torch.set_num_threads(1)
    model, folder, cases = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    with join_world(CPU, deterministic=True):
        for case in cases:
            train(case, model, folder)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "moe"
    return build_tiny_moe_model(folder, dtype=torch.float32)


Train = Callable[..., None]


@pytest.fixture
def train(tmp_path: Path, run_ranks: Callable[..., str], model: Path) -> Train:
    """Trains each case on some ranks, one after the other, and leaves NAME.npz."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    def run(num_ranks: int, *cases: dict[str, Any]) -> None:
        usual = {"parallel": {}, "optimizer": OPTIMIZERS["adamw"], "steps": 4}
        asked = [{**usual, **it} for it in cases]
        run_ranks(script, model, tmp_path, json.dumps(asked), num_ranks=num_ranks)

    return run


def assert_alike(folder: Path, one: str, other: str) -> None:
    """Published weights within 1e-5, and the norms of the steps that both trained."""
    with np.load(folder / f"{one}.npz") as a, np.load(folder / f"{other}.npz") as b:
        norms = {name for name in a if name.startswith("norm.")}
        assert a.keys() - norms == {name for name in b if not name.startswith("norm.")}
        for name in a.keys() & b.keys():
            np.testing.assert_allclose(b[name], a[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_every_optimizer_and_a_resume_at_another_size_give_the_weights_of_one_rank(
    tmp_path: Path, train: Train
) -> None:
    """Clipped by the norm over experts and the rest; from 1 to 2, and from 2 to 1."""
    rules = OPTIMIZERS.items()
    saved = {"saves_after": 2}
    train(1, *({"name": f"one {n}", "optimizer": it, **saved} for n, it in rules))
    split = [{"name": f"split {n}", "optimizer": it, "parallel": SPLIT, **saved} for n, it in rules]
    resumed = [
        {"name": f"1-2 {n}", "optimizer": it, "parallel": SPLIT, "resumes": f"one {n}"}
        for n, it in rules
    ]
    train(2, *split, *resumed)
    train(1, *({"name": f"2-1 {n}", "optimizer": it, "resumes": f"split {n}"} for n, it in rules))
    for name in OPTIMIZERS:
        for other in ("split", "1-2", "2-1"):
            assert_alike(tmp_path, f"one {name}", f"{other} {name}")


def test_adapters_beside_split_experts_are_those_of_one_rank(tmp_path: Path, train: Train) -> None:
    lora = {"rank": 2, "target_modules": ["q_proj", "experts"]}
    rule = {"type": "adamw", "lr": 1e-2}
    case = {"lora": lora, "optimizer": rule, "saves_after": 2}
    train(1, {"name": "one", **case})
    train(2, {"name": "split", **case, "parallel": SPLIT})
    train(1, {"name": "2-1", **case, "resumes": "split"})
    for other in ("split", "2-1"):
        assert_alike(tmp_path, "one", other)


@pytest.mark.slow
def test_four_ranks_share_experts_beside_shards_contexts_and_copies(
    tmp_path: Path, train: Train
) -> None:
    train(1, {"name": "one", "steps": 2})
    train(4, *({"name": n, "parallel": it, "steps": 2} for n, it in LAYOUTS.items()))
    for name in LAYOUTS:
        assert_alike(tmp_path, "one", name)


def test_one_expert_may_get_every_token(
    tmp_path: Path, ranks: Any, build_reference: Any, ragged_samples: Any
) -> None:
    """The second rank then gets no row in a layer, and still takes part."""
    folder = build_tiny_moe_model(
        tmp_path / "moe", dtype=torch.float32, num_experts=8, num_experts_per_tok=1
    )
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith("mlp.gate.weight"):
            weights[name].zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    samples = ragged_samples([11, 4, 17])
    reference = build_reference(folder)
    reference.model.set_experts_implementation("eager")
    total, expected = reference.loss(samples)
    used = [abs(g).max(axis=(1, 2)) > 0 for name, g in expected.items() if "experts." in name]
    assert [list(it).count(True) for it in used] == [1, 1, 1, 1]
    answer, found = ranks.run([samples], max_tokens=24, model=folder, **SPLIT)
    assert answer["total"] == pytest.approx(total, rel=1e-4, abs=1e-5)
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"num_experts": 3}, "layers of 3 experts"), ({}, "layers of 0 experts")],
)
def test_experts_that_cannot_be_shared_are_refused_by_every_rank(
    tmp_path: Path, ranks: Any, tiny_model: Path, ragged_samples: Any, settings: Any, words: str
) -> None:
    folder = build_tiny_moe_model(tmp_path / "moe", **settings) if settings else tiny_model
    answer, _ = ranks.run([ragged_samples([5])], model=folder, **SPLIT)
    assert f"expert_parallel_size = 2: the model has {words}" in answer["error"]


@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_groups_of_whole_blocks_give_the_values_and_gradients_of_bare_ones(tokens: int) -> None:
    """Among six experts of which the last three get nothing; the kernels of GPUs like 16 rows."""
    numbers = torch.Generator().manual_seed(1)
    chosen = torch.rand(tokens, 3, generator=numbers).argsort(dim=1)[:, :2]
    hidden = torch.randn(tokens, 4, dtype=torch.float64, generator=numbers)
    weights = torch.randn(6, 4, 4, dtype=torch.float64, generator=numbers)
    found = []
    for multiple in (1, 16):
        states, by_expert = (it.clone().requires_grad_() for it in (hidden, weights))
        groups = Groups.of(chosen, 6, multiple)
        sizes = torch.diff(groups.ends, prepend=groups.ends.new_zeros(1))
        assert groups.ends[-1] == len(groups.choice) == len(groups.spread(states))
        assert multiple == 1 or (bool((sizes > 0).all()) and not (sizes % multiple).any())
        parts = groups.spread(states).split(sizes.tolist())
        rows = torch.cat([part @ each for part, each in zip(parts, by_expert, strict=True)])
        said = groups.collect(rows)
        (said * torch.arange(1, 3, dtype=said.dtype)[:, None]).sum().backward()
        found.append([said.detach(), states.grad, by_expert.grad])
    for plain, padded in zip(*found, strict=True):
        torch.testing.assert_close(plain, padded)
    expected = torch.einsum("th,tkho->tko", hidden, weights[chosen])
    torch.testing.assert_close(found[0][0], expected)
