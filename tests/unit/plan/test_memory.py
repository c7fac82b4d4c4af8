"""A model's size is read off its files, and a trainer's memory follows from it by part."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from gradus.config import LoraConfig, ParallelConfig, ServedLoraConfig, SftConfig, TrainerConfig
from gradus.plan.gpus import GIB
from gradus.plan.memory.kept import widths
from gradus.plan.memory.prediction import Footprint, footprint_of, predict_memory
from gradus.plan.memory.shape import (
    ModelShape,
    read_model_shape,
    shape_of,
    shape_of_config,
    stored_experts,
)

QWEN3_SMALL = {
    "hidden_size": 1024,
    "vocab_size": 151936,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}
LLAMA_8B = {
    "hidden_size": 4096,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
}
LLAMA4 = {
    "model_type": "llama4_text",
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 16,
}
QWEN3_MIXTURE = {
    **{"hidden_size": 2048, "vocab_size": 151936, "num_attention_heads": 32, "head_dim": 128},
    **{"num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768},
    **{"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8},
}


def write_model(folder: Path, config: dict[str, Any], shapes: dict[str, list[int]]) -> Path:
    """A folder with a config.json and a safetensors header without tensors behind it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header = {
        name: {"dtype": "BF16", "shape": it, "data_offsets": [0, 0]} for name, it in shapes.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return folder


def predict(shape: ModelShape, **settings: Any) -> Footprint:
    return footprint_of(shape, TrainerConfig.model_validate(settings), on_gpu=True)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (QWEN3_SMALL, 596_049_920),
        (LLAMA_8B, 8_030_261_248),
        (QWEN3_MIXTURE, 30_532_122_624),
        (LLAMA4, 107_769_861_120),
        ({**LLAMA4, "num_local_experts": 128, "interleave_moe_layer_step": 2}, 400_711_848_960),
    ],
)
def test_a_config_alone_tells_the_number_of_parameters(
    config: dict[str, Any], parameters: int
) -> None:
    """The published numbers of Qwen3-0.6B, Llama 3.1 8B and Qwen3-30B-A3B, and those of what
    reads text in Llama 4 Scout and Maverick."""
    assert shape_of_config(config).num_parameters == pytest.approx(parameters, rel=1e-3)


def test_the_headers_of_the_files_are_counted_when_they_are_there(tmp_path: Path) -> None:
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": [50, 8],
        "lm_head.weight": [50, 8],
        f"{layer}self_attn.q_proj.weight": [16, 8],
        f"{layer}mlp.experts.0.up_proj.weight": [4, 8],
    }
    shape = read_model_shape(write_model(tmp_path, QWEN3_SMALL, shapes))
    assert shape is not None
    # A tied head counts once, though this folder holds it twice.
    assert shape.num_parameters == 50 * 8 + 16 * 8 + 4 * 8
    assert (shape.num_layers, shape.largest_layer) == (1, 16 * 8 + 4 * 8)
    assert shape.adapted == {"q_proj": 24, "experts": 4 + 8}


@pytest.mark.parametrize(
    ("config", "leaf"),
    [
        ({**QWEN3_SMALL, "tie_word_embeddings": False}, "mlp.up_proj"),
        ({"model_type": "mamba2", "hidden_size": 8, "vocab_size": 50, "head_dim": 4}, "mixer.A"),
    ],
)
def test_layers_of_several_sizes_are_counted_one_by_one(
    tmp_path: Path, config: dict[str, Any], leaf: str
) -> None:
    shapes = {f"model.layers.{n}.{leaf}.weight": [rows, 8] for n, rows in enumerate((4, 90, 6))}
    model = write_model(tmp_path, config, {"model.embed_tokens.weight": [50, 8], **shapes})
    shape = read_model_shape(model)
    assert shape is not None
    assert (shape.num_layer_parameters, shape.num_outer_parameters) == (100 * 8, 50 * 8)
    assert (shape.largest_layer, shape.query_size > 0) == (90 * 8, leaf.startswith("mlp"))
    whole = {"reshard_after_forward": False}
    found = [predict(shape, compute_dtype="float32", parallel=it) for it in ({}, whole)]
    # Two of the largest would be more than there is.
    assert [it.states["gathered layers"] for it in found] == [4 * (2 * 100 + 50) * 8] * 2


@pytest.mark.parametrize("is_saved_again", [False, True])
def test_layers_with_other_heads_count_by_what_they_have(is_saved_again: bool) -> None:
    """As the files of Gemma 4 say it, and as transformers writes it."""
    config = QWEN3_SMALL | {
        **{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4},
        **{"head_dim": 32, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
        **{"intermediate_size": 96, "moe_intermediate_size": 64},
    }
    if is_saved_again:
        config["per_layer_config"] = {"3": {"head_dim": 64, "num_key_value_heads": 1}}
    else:
        config |= {"global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
        config["layer_types"] = ["sliding_attention"] * 3 + ["full_attention"]
    shape = shape_of_config(config)
    assert shape.query_size == 8 * (3 * 32 + 64) // 4
    assert shape.key_size == (3 * 4 * 32 + 64) // 4
    assert (shape.widths["chosen units"], shape.widths["units"]) == (2 * 64, 96)


def test_files_that_say_nothing_predict_nothing(tmp_path: Path) -> None:
    def predicted() -> object:
        return predict_memory(tmp_path, TrainerConfig(), on_gpu=True)

    assert predicted() is None
    (tmp_path / "config.json").write_text("[]")
    assert predicted() is None
    write_model(tmp_path, QWEN3_SMALL, {})
    assert predicted() is not None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert predicted() is None


def test_full_training_keeps_sixteen_bytes_for_each_parameter_over_all_ranks() -> None:
    shape = shape_of_config(LLAMA_8B)
    found = predict(shape, num_processes=8, parallel=ParallelConfig(gradient_sync="each"))
    parts = ("weights", "gradients", "optimizer")
    assert 8 * sum(found.states[part] for part in parts) == pytest.approx(
        16 * shape.num_parameters, rel=1e-6
    )


def test_gradients_shared_after_the_last_micro_batch_are_whole_on_each_rank() -> None:
    shape = shape_of_config(LLAMA_8B)
    last, each = (
        predict(shape, num_processes=8, parallel=ParallelConfig(gradient_sync=sync))
        for sync in ("last", "each")
    )
    assert last.states["gradients"] - each.states["gradients"] == 4 * shape.num_parameters


def test_offloaded_states_lie_in_main_memory() -> None:
    shape = shape_of_config(LLAMA_8B)
    found = predict(shape, parallel=ParallelConfig(offload_optimizer=True))
    assert set(found.states) == {"gathered layers"}
    assert found.host["weights (offloaded)"] == 4 * shape.num_parameters
    assert found.host_bytes > 16 * shape.num_parameters > found.device_bytes


def test_adapters_need_no_master_of_the_frozen_model() -> None:
    shape = shape_of_config(LLAMA_8B)
    found = predict(shape, lora={"rank": 16})
    adapters = shape.num_adapter_parameters(16, None)
    # As PEFT counts them for all linear layers of Llama 3.1 8B.
    assert adapters == 41_943_040
    assert found.states["weights"] == 2 * shape.num_parameters + 4 * adapters
    assert found.host["version being published"] == 2 * adapters
    named = predict(shape, lora={"rank": 16, "target_modules": ["q_proj"]})
    assert named.states["optimizer"] == 8 * 16 * 2 * 4096 * 32


def test_a_tower_stays_in_the_compute_dtype_unless_it_is_trained() -> None:
    text = {
        "model.language_model.embed_tokens.weight": [50, 8],
        "model.language_model.layers.0.mlp.up_proj.weight": [16, 8],
    }
    tower = {"model.visual.blocks.0.mlp.up_proj.weight": [30, 10], "visual.merger.weight": [7, 10]}
    shape = shape_of({"text_config": QWEN3_SMALL}, {**text, **tower})
    assert (shape.num_parameters, shape.num_tower_parameters) == (400 + 128 + 370, 370)
    assert (shape.num_layers, shape.largest_layer) == (1, 128)
    assert shape.num_adapter_parameters(2, None) == 2 * (16 + 8)
    kept = predict(shape, compute_dtype="bfloat16").states
    assert (kept["weights"], kept["gradients"]) == (4 * 528 + 2 * 370, 4 * 528)
    trained = predict(shape, compute_dtype="bfloat16", train_vision=True).states
    assert (trained["weights"], trained["optimizer"]) == (4 * 898, 8 * 898)
    sound = {"model.audio_tower.layers.0.up.weight": [20, 5]}
    shape = shape_of({"text_config": QWEN3_SMALL}, {**text, **tower, **sound})
    trained = predict(shape, compute_dtype="bfloat16", train_vision=True).states
    assert (trained["weights"], trained["optimizer"]) == (4 * 898 + 2 * 100, 8 * 898)


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batch_tokens": 2048},
        {"parallel": ParallelConfig(activation_checkpointing="selective")},
        {"parallel": ParallelConfig(context_parallel_size=2), "num_processes": 2},
        {"lora": {"rank": 16}},
        {"optimizer": {"type": "sgd"}},
    ],
)
def test_what_saves_memory_lowers_the_prediction(change: dict[str, Any]) -> None:
    shape = shape_of_config(QWEN3_SMALL)
    assert predict(shape, **change).device_bytes < predict(shape).device_bytes


def test_owners_of_experts_gather_fewer_of_them() -> None:
    config = {**QWEN3_SMALL, "num_experts": 16, "moe_intermediate_size": 256}
    shape = shape_of_config(config)
    assert shape.num_expert_parameters == 28 * shape.largest_experts
    assert shape.largest_experts == 16 * 3 * 256 * QWEN3_SMALL["hidden_size"]
    plain, split = (
        predict(shape, num_processes=4, parallel=ParallelConfig(expert_parallel_size=it))
        for it in (1, 4)
    )
    saved = plain.states["gathered layers"] - split.states["gathered layers"]
    # In the compute dtype, and as float32 gradients; of two layers.
    assert saved == (2 + 4) * 2 * shape.largest_experts * 3 // 4
    assert split.states["weights"] == plain.states["weights"]


def test_a_trainer_on_cpus_has_everything_in_main_memory() -> None:
    settings = TrainerConfig(compute_dtype="float32")
    found = footprint_of(shape_of_config(QWEN3_SMALL), settings, on_gpu=False)
    assert found.device_bytes == 0
    assert found.host_bytes > 16 * 596_042_752
    assert str(found).startswith(f"host {found.host_bytes / GIB:.1f} GiB: weights 2.2, gradients")


def test_the_text_says_whose_activations_were_measured() -> None:
    known, unknown = (
        str(predict(shape_of_config({**LLAMA_8B, "model_type": it}))) for it in ("llama", "new")
    )
    told = "; activations as of qwen3, for this family's were not measured"
    assert unknown.endswith(told)
    assert told not in known


def test_scores_count_in_layers_with_a_window_and_odd_windows_are_none() -> None:
    settings = TrainerConfig.model_validate({"micro_batch_tokens": 512, "compute_dtype": "float32"})

    def kept(**window: Any) -> int:
        shape = shape_of_config({**QWEN3_SMALL, "num_hidden_layers": 2, **window})
        return footprint_of(shape, settings, on_gpu=False).working["activations"]

    kinds = ["sliding_attention", "full_attention"]
    one = kept(sliding_window=8, layer_types=kinds) - kept()
    assert one == 4 * 512 * 16 * (512 - 128)  # of each head scores, in the place of its result
    assert kept(sliding_window=8, layer_types="x") - kept() == 2 * one
    assert kept(sliding_window="x", layer_types=kinds) == kept(sliding_window=512) == kept()
    assert kept(sliding_window=8, layer_types=["full_attention"]) == kept()


def test_a_supervised_run_publishes_nothing() -> None:
    sft = SftConfig.model_validate(
        {"model": {"name": "m"}, "data": {"path": "d"}, "lora": LoraConfig().model_dump()}
    )
    found = footprint_of(shape_of_config(LLAMA_8B), sft, on_gpu=True)
    assert set(found.host) == {"process"}


@pytest.mark.parametrize(
    "change",
    [
        *({"vocab_size": value} for value in (None, "many", -5, 1.5, 10**400)),
        *({"hidden_size": value} for value in (0, float("inf"), 10**400)),
        *({"num_attention_heads": value} for value in ("16", [16], -1, 0, True)),
        *({name: "x"} for name in ("intermediate_size", "num_experts_per_tok")),
        {"head_dim": float("nan")},
        {"num_key_value_heads": -2},
    ],
)
@pytest.mark.parametrize("has_tensors", [True, False])
def test_a_config_that_holds_nonsense_tells_no_size_and_ends_no_check(
    tmp_path: Path, change: dict[str, Any], *, has_tensors: bool
) -> None:
    shapes = {"model.layers.0.mlp.up_proj.weight": [3072, 1024]} if has_tensors else {}
    assert read_model_shape(write_model(tmp_path, {**QWEN3_SMALL, **change}, shapes)) is None


def test_an_endless_number_of_layers_is_not_counted(tmp_path: Path) -> None:
    assert (
        read_model_shape(write_model(tmp_path, {**LLAMA_8B, "num_hidden_layers": 10**12}, {}))
        is None
    )


def test_a_config_nested_too_deep_to_be_read_tells_no_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert read_model_shape(tmp_path) is None


def test_weights_that_lie_there_twice_are_counted_once(tmp_path: Path) -> None:
    folder = write_model(tmp_path, LLAMA_8B, {"model.layers.0.mlp.up_proj.weight": [14336, 4096]})
    copy = (folder / "model.safetensors").read_bytes().replace(b"model.", b"other.")
    (folder / "consolidated.safetensors").write_bytes(copy)
    shape = read_model_shape(folder)
    assert shape is not None
    assert shape.num_parameters == 14336 * 4096


def test_a_model_whose_files_are_not_all_here_is_sized_by_its_config(tmp_path: Path) -> None:
    folder = write_model(tmp_path, LLAMA_8B, {"model.layers.0.mlp.up_proj.weight": [14336, 4096]})
    (folder / "model.safetensors").rename(folder / "model-1-of-2.safetensors")
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_model_shape(folder) == shape_of_config(LLAMA_8B)


@pytest.mark.parametrize(
    ("num_processes", "compute_dtype", "compute_bytes"), [(1, "bfloat16", 2), (4, "float32", 4)]
)
def test_a_reference_is_one_copy_in_the_compute_dtype_over_all_ranks(
    num_processes: int, compute_dtype: Any, compute_bytes: int
) -> None:
    shape = shape_of_config(LLAMA_8B)
    settings = TrainerConfig(num_processes=num_processes, compute_dtype=compute_dtype)

    def states(settings: TrainerConfig, **options: bool) -> int:
        return footprint_of(shape, settings, on_gpu=True, **options).certain_bytes

    added = states(settings, keeps_reference=True) - states(settings)
    assert added == compute_bytes * shape.num_parameters // num_processes
    adapted = settings.model_copy(update={"lora": ServedLoraConfig()})
    assert states(adapted, keeps_reference=True) == states(adapted)


def test_widths_are_found_in_kimis_own_form_and_of_llama_4s_two_mlps() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    flat = {"linear_num_heads": 4, "linear_head_dim": 16}
    part = {"num_heads": 4, "head_dim": 16}
    kimi = {**sizes, "model_type": "kimi_linear"}
    assert widths({**kimi, "linear_attn_config": part}) == widths({**kimi, **flat})
    llama = {**sizes, "model_type": "llama4_text", "intermediate_size_mlp": 256}
    found = widths({**llama, "num_local_experts": 4, "num_experts_per_tok": 1})
    assert (found["units"], found["chosen units"], found["shared units"]) == (256, 128, 128)


@pytest.mark.parametrize("header", [b"[]", b"[" * 20_000, b'{"a.experts.down_proj": 3}'])
def test_damaged_headers_have_no_experts(tmp_path: Path, header: bytes) -> None:
    text = struct.pack("<Q", len(header)) + header
    (tmp_path / "model.safetensors").write_bytes(text)
    assert stored_experts(tmp_path) == ()
