"""Update rules against float64 arithmetic written down once more, and who gets which rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from gradus.config.schema.learning import OptimizerConfig
from gradus.trainer.optimizer.parameter_kinds import ParameterKind, trained_parameters
from gradus.trainer.optimizer.update_rules import Muon, build_update_rules, orthogonalise

pytestmark = pytest.mark.torch

CONFIG: TypeAdapter[OptimizerConfig] = TypeAdapter(OptimizerConfig)
LR, DECAY = 0.01, 0.1
STEPS = 4


def gradients(*shape: int) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.normal(size=shape) for _ in range(STEPS)]


def train(rule: dict[str, Any], start: np.ndarray, given: list[np.ndarray]) -> np.ndarray:
    """The matrix after a step with each gradient, by the rule in float32."""
    module = torch.nn.Linear(*start.shape[::-1], bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor(start))
    config = CONFIG.validate_python({"lr": LR, "weight_decay": DECAY, **rule})
    rules = build_update_rules(config, trained_parameters(module))
    for gradient in given:
        module.weight.grad = torch.tensor(gradient, dtype=torch.float32)
        for each in rules:
            for group in each.param_groups:
                group["lr"] = LR
            each.step()
    return module.weight.detach().numpy().astype(np.float64)


def plain_adamw(w: np.ndarray, given: list[np.ndarray]) -> np.ndarray:
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(given, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        w = w - LR * DECAY * w
        w = w - LR * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
    return w


def plain_sgd(w: np.ndarray, given: list[np.ndarray]) -> np.ndarray:
    m = np.zeros_like(w)
    for g in given:
        m = 0.9 * m + g
        w = w - LR * DECAY * w - LR * m
    return w


def plain_muon(w: np.ndarray, given: list[np.ndarray]) -> np.ndarray:
    """Through singular values: each passes five times through the same polynomial."""
    m = np.zeros_like(w)
    for g in given:
        m = 0.95 * m + 0.05 * g
        u, s, vt = np.linalg.svd(0.05 * g + 0.95 * m, full_matrices=False)
        s = s / np.sqrt((s**2).sum())
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        w = w - LR * DECAY * w - LR * 0.2 * np.sqrt(max(w.shape)) * (u * s) @ vt
    return w


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
@pytest.mark.parametrize(
    ("rule", "reference"),
    [
        ({"type": "adamw"}, plain_adamw),
        ({"type": "sgd", "momentum": 0.9}, plain_sgd),
        ({"type": "muon"}, plain_muon),
    ],
    ids=["adamw", "sgd", "muon"],
)
def test_a_rule_is_its_formula(rule: Any, reference: Any, shape: tuple[int, int]) -> None:
    start = np.random.default_rng(0).normal(size=shape)
    given = gradients(*shape)
    np.testing.assert_allclose(
        train(rule, start, given), reference(start, given), rtol=1e-4, atol=1e-6
    )


def test_orthogonalising_brings_all_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalise(torch.randn(20, 30)))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_each_expert_is_a_matrix_of_its_own() -> None:
    experts = torch.randn(3, 4, 6)
    together = orthogonalise(experts)
    for expert, found in zip(experts, together, strict=True):
        assert torch.allclose(orthogonalise(expert), found, atol=1e-5)


def test_a_gradient_of_zero_moves_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    weight.grad = torch.zeros(3, 2)
    Muon([weight]).step()
    assert torch.equal(weight, torch.ones(3, 2))


class Net(torch.nn.Module):
    """One of each kind, under the names of a causal language model."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(9, 4)
        self.conv = torch.nn.Conv1d(4, 4, 2)
        self.layer = torch.nn.Linear(4, 4)
        self.experts = torch.nn.Parameter(torch.zeros(2, 4, 4))
        self.norm = torch.nn.LayerNorm(4)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.head = torch.nn.Linear(4, 9, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def kinds_of(model: torch.nn.Module) -> dict[str, ParameterKind]:
    return {trained.name: trained.kind for trained in trained_parameters(model)}


def test_every_trained_parameter_has_its_kind() -> None:
    assert kinds_of(Net(is_tied=False)) == {
        "experts": ParameterKind.MATRIX,
        "embed.weight": ParameterKind.EMBEDDING,
        "conv.weight": ParameterKind.OUTER,
        "conv.bias": ParameterKind.VECTOR,
        "layer.weight": ParameterKind.MATRIX,
        "layer.bias": ParameterKind.VECTOR,
        "norm.weight": ParameterKind.VECTOR,
        "norm.bias": ParameterKind.VECTOR,
        "head.weight": ParameterKind.OUTER,
    }


def test_a_head_that_shares_the_embedding_is_an_embedding() -> None:
    kinds = kinds_of(Net(is_tied=True))
    assert kinds["embed.weight"] is ParameterKind.EMBEDDING
    assert "head.weight" not in kinds


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_decay_spares_norms_biases_and_embeddings(kind: str) -> None:
    model = Net(is_tied=False)
    config = CONFIG.validate_python({"type": kind, "lr": 0.1, "weight_decay": 0.5})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for rule in build_update_rules(config, trained_parameters(model)):
        for group in rule.param_groups:
            group["lr"] = 0.1
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        rule.step()
    for name, kind_of_it in kinds_of(model).items():
        factor = 1 - 0.1 * 0.5 if kind_of_it.is_decayed else 1.0
        assert torch.allclose(model.get_parameter(name), before[name] * factor), name


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    model = Net(is_tied=False)
    muon, adamw = build_update_rules(
        CONFIG.validate_python({"type": "muon", "lr": 0.1}), trained_parameters(model)
    )
    matrices = {id(p) for group in muon.param_groups for p in group["params"]}
    others = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert matrices == {id(model.experts), id(model.layer.weight)}
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert matrices | others == trained
