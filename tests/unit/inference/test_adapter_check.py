"""Which adapters are served, and which are refused before the engine sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gradus.errors import CorruptStateError
from gradus.files import DurableFiles
from gradus.inference.weight_worker import WeightWorker, served_tensors
from gradus.inference.weights_check import AdapterCheck, WeightsCheck, build_check
from gradus.run.model_files import model_digest
from gradus.sealed import seal, stage
from gradus.weights.published import BASE_FILE, VersionLabel

pytestmark = pytest.mark.torch

Tensors = dict[str, torch.Tensor]
A, B = "base_model.model.q.lora_A.weight", "base_model.model.q.lora_B.weight"
OTHER = "base_model.model.k.lora_A.weight"
BASE = {"q.weight": (5, 3), "k.weight": (2, 3), "q.bias": (5,)}


def adapter(**changes: torch.Tensor | None) -> Tensors:
    """An adapter of rank 2 for the layer q, with changes; None removes a factor."""
    tensors: dict[str, Any] = {A: torch.ones(2, 3), B: torch.ones(5, 2)} | changes
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def publish(
    directory: Path, tensors: Tensors, *, config: Any, base_sha256: str | None = "0ff1ce"
) -> str:
    """Write a version; returns its digest."""
    files = DurableFiles()
    with stage(directory, files) as staging:
        save_file(tensors, staging / "adapter_model.safetensors")
        if config is not None:
            (staging / "adapter_config.json").write_text(json.dumps(config))
        if base_sha256 is not None:
            (staging / BASE_FILE).write_text(json.dumps({"sha256": base_sha256}))
        return seal(staging, directory, VersionLabel(1, 1), files=files).digest


def check(tmp_path: Path, tensors: Tensors, *, config: Any = None, base: Any = BASE) -> None:
    digest = publish(tmp_path / "version", tensors, config={"r": 2} if config is None else config)
    AdapterCheck(base=base, rank=2)(tmp_path / "version", digest)


def test_an_adapter_that_fits_passes(tmp_path: Path) -> None:
    check(tmp_path, adapter())


def test_without_the_base_on_disk_only_the_adapter_itself_is_checked(tmp_path: Path) -> None:
    check(tmp_path, adapter(**{A: torch.ones(2, 9)}), base=None)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "holds no tensor"),
        (adapter(**{"q.weight": torch.ones(5, 3)}), "not a factor of an adapter"),
        (adapter(**{B: None}), "only the factor"),
        (adapter(**{A: torch.ones(2, 4)}), "factors of q have shapes"),
        (adapter(**{A: torch.ones(3, 3), B: torch.ones(5, 3)}), "factors of q have shapes"),
        (adapter(**{OTHER: torch.ones(2, 3)}), "only the factor"),
        (adapter(**{A: torch.full((2, 3), torch.nan)}), "not finite"),
        (
            {n.replace(".q.", ".z."): t for n, t in adapter().items()},
            "has no layer 'z'",
        ),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused_with_the_reason(
    tmp_path: Path, tensors: Tensors, words: str
) -> None:
    with pytest.raises(CorruptStateError, match=words):
        check(tmp_path, tensors)


@pytest.mark.parametrize("config", [{"r": 4}, {}, [], "r"])
def test_an_adapter_of_another_rank_or_without_one_is_refused(tmp_path: Path, config: Any) -> None:
    with pytest.raises(CorruptStateError, match="adapter_config"):
        check(tmp_path, adapter(), config=config)


def test_a_changed_byte_is_refused(tmp_path: Path) -> None:
    digest = publish(tmp_path / "version", adapter(), config={"r": 2})
    (tmp_path / "version" / "adapter_config.json").write_text('{"r": 2 }')
    with pytest.raises(CorruptStateError, match="SHA-256"):
        AdapterCheck(base=BASE, rank=2)(tmp_path / "version", digest)


def test_the_check_follows_what_is_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"q.weight": torch.ones(5, 3)}, tmp_path / "model.safetensors")
    assert isinstance(build_check(tmp_path, None), WeightsCheck)
    assert build_check(tmp_path, 8) == AdapterCheck(
        base={"q.weight": (5, 3)}, rank=8, base_folder=tmp_path
    )
    assert build_check(None, 8) == AdapterCheck(base=None, rank=8)


class Slots:
    """What the worker uses of vLLM's adapter managers."""

    def __init__(self) -> None:
        self.embedding_modules: dict[str, str] = {}
        self.adapters: dict[int, Any] = {}
        self.active: list[int] = []
        self._adapter_manager = self

    def remove_adapter(self, adapter_id: int) -> None:
        self.adapters.pop(adapter_id, None)
        self.active = [other for other in self.active if other != adapter_id]

    def create_dummy_lora(self, adapter_id: int, rank: int, _: Any) -> Any:
        return type("Zero", (), {"id": adapter_id, "rank": rank, "loras": {"q": 0, "k": 0}})

    def add_adapter(self, adapter: Any) -> None:
        self.adapters[adapter.id] = adapter

    def activate_adapter(self, adapter_id: int) -> None:
        self.active.append(adapter_id)

    def get_adapter(self, adapter_id: int) -> Any:
        return self.adapters.get(adapter_id)


def test_a_zero_adapter_takes_the_slot_of_another() -> None:
    worker, slots = WeightWorker(), Slots()
    worker.model_runner = type("Runner", (), {"lora_manager": slots})
    assert worker.gradus_adapted_layers(1) == 0
    for _ in range(2):
        worker.gradus_zero_adapter(1)
    assert slots.active == [1]
    assert worker.gradus_adapted_layers(1) == 2


def test_adapter_slots_are_told_among_the_served_tensors() -> None:
    layer = torch.nn.Linear(3, 5, bias=False)
    layer.lora_a_stacked = (torch.zeros(1, 1, 2, 3),)
    layer.lora_b_stacked = (torch.zeros(1, 1, 5, 2),)
    names = [name for name, _ in served_tensors(torch.nn.ModuleDict({"q": layer}))]
    assert names == ["q.weight", "q.lora_a_stacked.0", "q.lora_b_stacked.0"]


def base_model(folder: Path, value: float) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    tensors = {name: torch.full(shape, value) for name, shape in BASE.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_an_adapter_is_served_only_beside_the_model_that_it_was_trained_beside(
    tmp_path: Path,
) -> None:
    base, rewritten = base_model(tmp_path / "base", 1.0), base_model(tmp_path / "other", 2.0)
    version = tmp_path / "version"
    digest = publish(version, adapter(), config={"r": 2}, base_sha256=model_digest(base))
    build_check(base, 2)(version, digest)
    with pytest.raises(CorruptStateError, match=r"another model than the one in .*other"):
        build_check(rewritten, 2)(version, digest)


def test_an_adapter_that_names_no_base_is_refused(tmp_path: Path) -> None:
    digest = publish(tmp_path / "version", adapter(), config={"r": 2}, base_sha256=None)
    with pytest.raises(CorruptStateError, match=r"gradus_base\.json names no base"):
        AdapterCheck(base=BASE, rank=2)(tmp_path / "version", digest)
