"""Keeping fewer activations changes memory and time, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import build_micro_batch
from torch._dynamo.utils import counters

from gradus.config import ModelConfig, ParallelConfig, learning
from gradus.errors import ConfigError
from gradus.trainer.distributed import CPU, World
from gradus.trainer.losses import Dppo
from gradus.trainer.model.kernels import Platform
from gradus.trainer.model.layers import decoder_layers
from gradus.trainer.model.load import load_model
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import shard_model
from gradus.trainer.step import GradientStep
from gradus.trainer.tensors import TrainTensors

pytestmark = pytest.mark.torch


@pytest.fixture
def build_policy_with(tiny_model: Path, world: World) -> Any:
    def build(backend: str = "inductor", **choices: Any) -> PolicyModel:
        model = load_model(ModelConfig(name=str(tiny_model)), world.device)
        parallel = ParallelConfig(**choices)
        platform = replace(Platform.of(CPU), compile_backend=backend)
        return shard_model(
            PolicyModel(model, platform=platform), world.mesh, torch.float32, parallel
        )

    return build


def gradients_and_loss(policy: PolicyModel, world: World, samples: Any) -> tuple[Any, float]:
    step = GradientStep(policy, Dppo(learning.DppoConfig()), world)
    loss = step.run([build_micro_batch([sample]) for sample in samples])
    gradients = {n: p.grad.full_tensor().clone() for n, p in policy.named_parameters()}
    return gradients, loss.total


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_activations_give_bitwise_the_same_gradient(
    build_policy_with: Any, world: World, ragged_samples: Any, mode: str
) -> None:
    samples = ragged_samples([12, 7, 260])
    plain, loss = gradients_and_loss(build_policy_with(), world, samples)
    policy = build_policy_with(activation_checkpointing=mode)
    again, loss_again = gradients_and_loss(policy, world, samples)
    assert loss == loss_again
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def kept_bytes(policy: PolicyModel, world: World, samples: Any) -> int:
    """Bytes that the forward of one micro batch keeps for backward."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tensors = TrainTensors.build(build_micro_batch(samples), world.device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy(tensors)
    return sum(kept.values())


def test_full_recomputation_keeps_only_the_input_of_each_layer(
    build_policy_with: Any, world: World, ragged_samples: Any
) -> None:
    samples = ragged_samples([200, 200])
    plain = kept_bytes(build_policy_with(), world, samples)
    full = kept_bytes(build_policy_with(activation_checkpointing="full"), world, samples)
    assert full < plain / 3


def test_parameters_keep_their_names(build_policy_with: Any) -> None:
    plain = [name for name, _ in build_policy_with().named_parameters()]
    prepared = build_policy_with(activation_checkpointing="full", compile=True)
    assert [name for name, _ in prepared.named_parameters()] == plain


def test_every_layer_of_the_model_is_found(build_policy_with: Any) -> None:
    assert len(decoder_layers(build_policy_with().model)) == 2


# Dynamo itself looks at the gradient of the hidden states.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("mode", ["none", "selective"])
def test_compiled_layers_give_the_same_gradient(
    build_policy_with: Any,
    world: World,
    ragged_samples: Any,
    mode: Any,
) -> None:
    """Captured and differentiated ahead of time, but run by plain kernels, which is quick. Full
    recomputation is compiled in `test_gpu_path`."""
    samples = ragged_samples([12, 7, 5])
    plain, loss = gradients_and_loss(build_policy_with(), world, samples)
    policy = build_policy_with("aot_eager", compile=True, activation_checkpointing=mode)
    torch._dynamo.reset()
    counters.clear()
    compiled, loss_compiled = gradients_and_loss(policy, world, samples)
    assert loss_compiled == pytest.approx(loss, rel=1e-6)
    assert all(torch.allclose(plain[n], compiled[n], rtol=1e-4, atol=2e-6) for n in plain)
    assert counters["frames"]["ok"] > 0


def test_compiling_without_a_compiler_is_refused(
    build_policy_with: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs a C compiler"):
        build_policy_with(compile=True)
