"""A model's size is read off its files, and what a trainer holds at least follows from it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from configs import write_headers

from gradus.config import LoraConfig, ParallelConfig, ServedLoraConfig, SftConfig, TrainerConfig
from gradus.plan.gpus import GIB
from gradus.plan.memory import (
    Footprint,
    ModelShape,
    footprint_of,
    read_model_shape,
    shape_of,
    stored_experts,
)

LAYER = "model.layers.0."
SMALL: dict[str, list[int]] = {
    "model.embed_tokens.weight": [50, 8],
    "lm_head.weight": [50, 8],
    f"{LAYER}self_attn.q_proj.weight": [16, 8],
    f"{LAYER}mlp.experts.0.up_proj.weight": [4, 8],
}
LARGE = ModelShape(8_030_261_248, 0, 0, 0, {"q_proj": 32 * 8192, "down_proj": 32 * 18432})
"""As Llama 3.1 8B."""


def predict(shape: ModelShape, **settings: Any) -> Footprint:
    return footprint_of(shape, TrainerConfig.model_validate(settings), on_gpu=True)


def test_the_headers_of_the_files_are_counted(tmp_path: Path) -> None:
    shape = read_model_shape(write_headers(tmp_path, {"tie_word_embeddings": True}, SMALL))
    assert shape is not None
    # A tied head counts once, though this folder holds it twice.
    assert shape.num_parameters == 50 * 8 + 16 * 8 + 4 * 8
    assert shape.num_expert_parameters == 4 * 8
    assert shape.adapted == {"q_proj": 24, "experts": 4 + 8}


@pytest.mark.parametrize("header", [b"\xff" * 20, b"[]", b'{"a": 3}', b'{"a": {"shape": ["x"]}}'])
def test_files_that_say_nothing_tell_no_size(tmp_path: Path, header: bytes) -> None:
    assert read_model_shape(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert read_model_shape(tmp_path) is None


def test_full_training_keeps_sixteen_bytes_for_each_parameter_over_all_ranks() -> None:
    found = predict(LARGE, num_processes=8, parallel=ParallelConfig(gradient_sync="each"))
    assert 8 * found.device_bytes == pytest.approx(16 * LARGE.num_parameters, rel=1e-6)


def test_gradients_shared_after_the_last_micro_batch_are_whole_on_each_rank() -> None:
    last, each = (
        predict(LARGE, num_processes=8, parallel=ParallelConfig(gradient_sync=sync))
        for sync in ("last", "each")
    )
    assert last.device["gradients"] - each.device["gradients"] == 4 * LARGE.num_parameters


def test_offloaded_states_lie_in_main_memory() -> None:
    found = predict(LARGE, parallel=ParallelConfig(offload_optimizer=True))
    assert found.device_bytes == 0
    assert found.host["weights (offloaded)"] == 4 * LARGE.num_parameters
    assert found.host_bytes > 16 * LARGE.num_parameters


def test_adapters_need_no_master_of_the_frozen_model() -> None:
    found = predict(LARGE, lora={"rank": 16})
    adapters = 16 * 32 * (8192 + 18432)
    assert found.device["weights"] == 2 * LARGE.num_parameters + 4 * adapters
    assert found.host["version being published"] == 2 * adapters
    named = predict(LARGE, lora={"rank": 16, "target_modules": ["q_proj"]})
    assert named.device["optimizer"] == 8 * 16 * 8192 * 32


def test_a_tower_stays_in_the_compute_dtype_unless_it_is_trained() -> None:
    text = {
        "model.language_model.embed_tokens.weight": [50, 8],
        "model.language_model.layers.0.mlp.up_proj.weight": [16, 8],
    }
    tower = {"model.visual.blocks.0.mlp.up_proj.weight": [30, 10], "visual.merger.weight": [7, 10]}
    shape = shape_of({**text, **tower}, is_tied=True)
    assert (shape.num_parameters, shape.num_tower_parameters) == (400 + 128 + 370, 370)
    assert shape.num_adapter_parameters(2, None) == 2 * (16 + 8)
    kept = predict(shape, compute_dtype="bfloat16").device
    assert (kept["weights"], kept["gradients"]) == (4 * 528 + 2 * 370, 4 * 528)
    sound = {"model.audio_tower.layers.0.up.weight": [20, 5]}
    shape = shape_of({**text, **tower, **sound}, is_tied=True)
    trained = predict(shape, compute_dtype="bfloat16", train_vision=True).device
    assert (trained["weights"], trained["optimizer"]) == (4 * 898 + 2 * 100, 8 * 898)


@pytest.mark.parametrize("change", [{"lora": {"rank": 16}}, {"optimizer": {"type": "sgd"}}])
def test_what_saves_memory_lowers_what_is_held(change: dict[str, Any]) -> None:
    assert predict(LARGE, **change).device_bytes < predict(LARGE).device_bytes


def test_a_trainer_on_cpus_has_everything_in_main_memory() -> None:
    found = footprint_of(LARGE, TrainerConfig(compute_dtype="float32"), on_gpu=False)
    assert found.device_bytes == 0
    assert found.host_bytes > 16 * LARGE.num_parameters
    assert str(found).startswith(f"host {found.host_bytes / GIB:.1f} GiB: weights 29.9, gradients")


def test_a_supervised_run_publishes_nothing() -> None:
    sft = SftConfig.model_validate(
        {"model": {"name": "m"}, "data": {"path": "d"}, "lora": LoraConfig().model_dump()}
    )
    assert set(footprint_of(LARGE, sft, on_gpu=True).host) == {"process"}


def test_weights_that_lie_there_twice_are_counted_once(tmp_path: Path) -> None:
    folder = write_headers(tmp_path, {}, {f"{LAYER}mlp.up_proj.weight": [14336, 4096]})
    copy = (folder / "model.safetensors").read_bytes().replace(b"model.", b"other.")
    (folder / "consolidated.safetensors").write_bytes(copy)
    shape = read_model_shape(folder)
    assert shape is not None
    assert shape.num_parameters == 14336 * 4096


def test_a_model_whose_files_are_not_all_here_has_no_size_yet(tmp_path: Path) -> None:
    folder = write_headers(tmp_path, {}, SMALL)
    (folder / "model.safetensors").rename(folder / "model-1-of-2.safetensors")
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_model_shape(folder) is None


@pytest.mark.parametrize(
    ("num_processes", "compute_dtype", "compute_bytes"), [(1, "bfloat16", 2), (4, "float32", 4)]
)
def test_a_reference_is_one_copy_in_the_compute_dtype_over_all_ranks(
    num_processes: int, compute_dtype: Any, compute_bytes: int
) -> None:
    settings = TrainerConfig(num_processes=num_processes, compute_dtype=compute_dtype)

    def held(settings: TrainerConfig, **options: bool) -> int:
        return footprint_of(LARGE, settings, on_gpu=True, **options).device_bytes

    added = held(settings, keeps_reference=True) - held(settings)
    assert added == compute_bytes * LARGE.num_parameters // num_processes
    adapted = settings.model_copy(update={"lora": ServedLoraConfig()})
    assert held(adapted, keeps_reference=True) == held(adapted)


@pytest.mark.parametrize("header", [b"[]", b"[" * 20_000, b'{"a.experts.down_proj": 3}'])
def test_damaged_headers_have_no_experts(tmp_path: Path, header: bytes) -> None:
    text = struct.pack("<Q", len(header)) + header
    (tmp_path / "model.safetensors").write_bytes(text)
    assert stored_experts(tmp_path) == ()
