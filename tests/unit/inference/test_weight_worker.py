"""What the worker loads and tells, on small models without vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gradus.errors import CorruptStateError
from gradus.files import DurableFiles
from gradus.inference.weight_worker import WeightWorker, pack_experts_again, served_tensors
from gradus.inference.weights_check import (
    WeightsCheck,
    find_initial_weights,
    iterate_tensors,
    tensor_shapes,
)
from gradus.sealed import seal, stage
from gradus.weights.published import VersionLabel

pytestmark = pytest.mark.torch

Tensors = dict[str, torch.Tensor]


def weights(**changes: torch.Tensor) -> Tensors:
    return {"body.weight": torch.ones(2, 3), "norm.weight": torch.ones(3), **changes}


def write_model(directory: Path, tensors: Tensors) -> Path:
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors")
    return directory


def publish(directory: Path, tensors: Tensors) -> str:
    """Write a version; returns its digest."""
    files = DurableFiles()
    with stage(directory, files) as staging:
        save_file(tensors, staging / "model.safetensors")
        return seal(staging, directory, VersionLabel(1, 1), files=files).digest


def check(tmp_path: Path, tensors: Tensors) -> None:
    """Check a version with `tensors` against a model with `weights()`."""
    initial = write_model(tmp_path / "initial", weights())
    digest = publish(tmp_path / "version", tensors)
    WeightsCheck.of(initial)(tmp_path / "version", digest)


def test_a_version_with_the_models_own_tensors_passes(tmp_path: Path) -> None:
    check(tmp_path, weights())


@pytest.mark.shows("SEC26")
@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (weights(**{"norm.weight": torch.ones(4)}), r"has shape \(4,\), the model needs \(3,\)"),
        (weights(**{"norm.weight": torch.tensor([1, 2, torch.nan])}), "not finite"),
        (weights(**{"norm.weight": torch.tensor([1, 2, torch.inf])}), "not finite"),
        ({}, "holds no tensor"),
    ],
)
def test_a_version_that_cannot_be_served_is_refused_with_the_reason(
    tmp_path: Path, tensors: Tensors, words: str
) -> None:
    with pytest.raises(CorruptStateError, match=words):
        check(tmp_path, tensors)


@pytest.mark.shows("F30")
def test_a_changed_byte_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    digest = publish(tmp_path / "version", weights())
    file = tmp_path / "version" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CorruptStateError, match="SHA-256"):
        WeightsCheck(expected=None)(tmp_path / "version", digest)


@pytest.mark.shows("SEC26")
def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for shard in ("a", "b"):
        save_file({"norm.weight": torch.ones(3)}, tmp_path / f"{shard}.safetensors")
    with pytest.raises(CorruptStateError, match="there twice"):
        tensor_shapes(tmp_path)


def test_tensors_of_all_shards_are_streamed(tmp_path: Path) -> None:
    save_file({"one": torch.ones(1)}, tmp_path / "a.safetensors")
    save_file({"two": torch.ones(2)}, tmp_path / "b.safetensors")
    assert {name: len(t) for name, t in iterate_tensors(tmp_path)} == {"one": 1, "two": 2}


def test_initial_weights_are_found_on_disk_and_else_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert find_initial_weights(str(tmp_path)) == tmp_path.resolve()
    assert find_initial_weights("nobody/has-this-model") is None
    assert WeightsCheck.of(None).expected is None


class FakeRunner:
    """The two calls of vLLM's model runner that the worker needs."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.loaded: Tensors = {}

    def reload_weights(self, weights_iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loaded = dict(weights_iterator)

    def get_model(self) -> torch.nn.Module:
        return self.model


def worker_with(model: torch.nn.Module) -> WeightWorker:
    model.load_weights = dict
    worker = WeightWorker()
    worker.model_runner = FakeRunner(model)
    return worker


def test_the_worker_loads_every_tensor_and_counts_them(tmp_path: Path) -> None:
    write_model(tmp_path / "model", weights())
    worker = worker_with(torch.nn.Linear(2, 2))
    assert worker.gradus_load(str(tmp_path / "model")) == 2
    assert worker.model_runner.loaded.keys() == weights().keys()


class CPUUnquantizedExperts:
    """Bears the name of vLLM's class; packs by turning the weight round."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.w2_weight.data = layer.w2_weight.data.flip(0)  # type: ignore[union-attr, operator]


class X86CPUUnquantizedExperts(CPUUnquantizedExperts):
    pass


def expert_layer(experts: object) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.w2_weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    layer.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=experts))
    return layer


def test_reloaded_experts_are_packed_again_for_the_kernel_of_a_cpu(tmp_path: Path) -> None:
    write_model(tmp_path / "model", weights())
    layer = expert_layer(X86CPUUnquantizedExperts())
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), layer)
    worker_with(model).gradus_load(str(tmp_path / "model"))
    assert layer.w2_weight.tolist() == [2.0, 1.0]  # type: ignore[union-attr, operator]


def test_models_without_such_experts_are_left_alone() -> None:
    other = expert_layer(object())
    assert pack_experts_again(torch.nn.Sequential(torch.nn.Linear(2, 2), other)) == 0
    assert other.w2_weight.tolist() == [1.0, 2.0]  # type: ignore[union-attr, operator]


def test_served_tensors_are_told_by_shape_type_and_digest() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False))
    told = worker_with(model).gradus_served_tensors()
    raw = model[0].weight.detach().numpy().tobytes()
    digest = hashlib.sha256(raw).hexdigest()
    assert told == {"0.weight": {"shape": [2, 3], "dtype": "float32", "sha256": digest}}


class PackedLinear(torch.nn.Module):
    """A linear layer as vLLM keeps it on CPU: the weight lives in the kernel's closure."""

    def __init__(self, weight: torch.Tensor, *, keeps_parameter: bool = False) -> None:
        super().__init__()
        kept = weight.clone() if keeps_parameter else torch.empty(0, dtype=weight.dtype)
        self.weight = torch.nn.Parameter(kept, requires_grad=False)
        self.embedding_dim = weight.shape[1]

        def cpu_linear(x: torch.Tensor, _: Any, bias: Any) -> torch.Tensor:
            return torch.nn.functional.linear(x, weight, bias)

        self.cpu_linear = cpu_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_weight_is_read_back_bit_by_bit(dtype: torch.dtype) -> None:
    weight = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    model = torch.nn.ModuleDict({"layer": PackedLinear(weight)})
    found = dict(served_tensors(model))
    assert found.keys() == {"layer.weight"}
    assert torch.equal(found["layer.weight"], weight)


def test_a_stale_packed_copy_beside_a_parameter_would_be_seen() -> None:
    layer = PackedLinear(torch.ones(2, 3), keeps_parameter=True)
    layer.weight.data.fill_(5.0)
    found = dict(served_tensors(torch.nn.ModuleDict({"head": layer})))
    assert torch.equal(found["head.weight"], torch.full((2, 3), 5.0))
    assert torch.equal(found["head.packed_weight"], torch.ones(2, 3))


def test_outside_a_child_process_there_is_no_parent_to_watch() -> None:
    assert worker_with(torch.nn.Linear(2, 2)).gradus_die_with_parent() > 0
