"""A config.json says before anything starts whether its model can be trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradus.config import LoraConfig, ServedLoraConfig, SftConfig, TrainerConfig, families
from gradus.config.families import (
    adapter_problems,
    family_note,
    family_problems,
    mixture_note,
    mixture_problems,
    other_layers,
    turned_problem,
)

FITS = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "full_attention"],
    "hidden_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
}


def problems(
    *, has_gpus: bool = False, has_engine: bool = False, dtype: str = "auto", **changes: Any
) -> list[str]:
    found = family_problems(
        "m", FITS | changes, has_gpus=has_gpus, has_engine=has_engine, dtype=dtype
    )
    return [problem.message for problem in found]


def test_sizes_that_fit_have_no_problem() -> None:
    assert problems() == []
    assert problems(has_gpus=True, has_engine=True) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["full_attention"]}, "num_hidden_layers = 2 and 1 layer_types"),
        ({"num_key_value_heads": 3}, "4 attention heads, which 3 key heads"),
        ({"hidden_size": 97}, "hidden_size = 97, which 4 attention heads do not divide"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 of 8 experts"),
        ({"n_group": 3}, "8 experts in 3 groups"),
        ({"topk_group": 3}, "topk_group = 3 of 2 groups"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads = 4, which 3"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"weights are quantised (mxfp4)"),
        ({"quantization_config": ["odd"]}, "weights are quantised, which"),
    ],
)
def test_what_cannot_be_is_said_with_its_numbers(changes: dict[str, Any], said: str) -> None:
    (found,) = problems(**changes)
    assert found.startswith("model 'm' (qwen3_moe)")
    assert said in found


GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size": 96,
    "head_dim": 24,
    "global_head_dim": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 8,
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_global_key_value_heads": 3}, "4 attention heads, which 3 key heads"),
        ({"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "which 3 key heads"),
        ({"num_kv_shared_layers": 3}, "no layer before them is of the kind 'full_attention'"),
        ({"num_kv_shared_layers": 9}, "no layer before them is of the kind 'sliding_attention'"),
        ({"vocab_size": 65}, "vocab_size = 65 and vocab_size_per_layer_input = 64"),
        ({"top_k_experts": 9}, "top_k_experts = 9 of 8 experts"),
        ({"use_bidirectional_attention": "all"}, "attend to those after them"),
    ],
)
def test_what_cannot_be_in_gemma_4_is_said(changes: dict[str, Any], said: str) -> None:
    (found,) = problems(**(GEMMA4 | changes))
    assert said in found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_k_eq_v": False, "num_global_key_value_heads": 3},
        {"num_kv_shared_layers": 0},
        {"use_bidirectional_attention": "vision"},
        {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
        {"per_layer_config": {"1": {"head_dim": 48}, "3": 7}, "global_head_dim": "odd"},
    ],
)
def test_what_can_be_in_gemma_4_has_no_problem(changes: dict[str, Any]) -> None:
    assert problems(**(GEMMA4 | changes)) == []


@pytest.mark.parametrize(
    ("lora", "changes", "is_refused"),
    [
        ({}, {}, True),
        ({"target_modules": ["q_proj", "k_proj"]}, {}, True),
        ({"target_modules": ["q_proj", "v_proj"]}, {}, False),
        ({"serve": "merged"}, {}, False),
        ({}, {"attention_k_eq_v": False}, False),
    ],
)
def test_an_adapter_of_keys_that_are_values_too_is_served_merged(
    lora: dict[str, Any], changes: dict[str, Any], is_refused: bool
) -> None:
    settings = TrainerConfig(lora=ServedLoraConfig(**lora))
    found = list(mixture_problems(("trainer",), settings, "m", GEMMA4 | changes))
    assert [it.path for it in found] == [("trainer", "lora", "serve")] * is_refused
    trained = sft(ServedLoraConfig(**lora))
    assert list(mixture_problems((), trained, "m", GEMMA4 | changes)) == []


LLAMA4 = {
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 1, 1, 0],
    "layer_types": [*["chunked_attention"] * 3, "full_attention"],
    "interleave_moe_layer_step": 2,
    "moe_layers": [1, 3],
    "attention_chunk_size": 8192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_chunk_size": None}, "attention_chunk_size = None"),
        ({"attention_chunk_size": 0}, "attention_chunk_size = 0"),
        ({"attention_chunk_size": True}, "attention_chunk_size = True"),
        ({"no_rope_layers": [1, 1, 0]}, "num_hidden_layers = 4 and 3 no_rope_layers"),
        ({"no_rope_layers": [0, 1, 1, 0]}, "layer_types other than those of no_rope_layers"),
        ({"moe_layers": [0, 1, 3]}, "moe_layers = [0, 1, 3] beside interleave_moe_layer_step = 2"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 of 8 experts"),
        (
            {"num_hidden_layers": 10**30, "no_rope_layers": None, "layer_types": None},
            "moe_layers = [1, 3] beside interleave_moe_layer_step = 2",
        ),
    ],
)
def test_what_cannot_be_in_llama_4_is_said(changes: dict[str, Any], said: str) -> None:
    (found,) = problems(**(LLAMA4 | changes))
    assert said in found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"no_rope_layers": None, "layer_types": None, "moe_layers": None},
        {"no_rope_layers": [], "moe_layers": [0, 1, 2, 3], "interleave_moe_layer_step": 1},
        {"num_experts_per_tok": 2, "interleave_moe_layer_step": "odd", "no_rope_layers": 7},
    ],
)
def test_what_can_be_in_llama_4_has_no_problem(changes: dict[str, Any]) -> None:
    assert problems(**(LLAMA4 | changes)) == []


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({}, "the rows of k_proj and q_proj of model 'm' (llama4_text)"),
        ({"target_modules": ["q_proj", "v_proj"]}, "the rows of q_proj of"),
        ({"target_modules": ["v_proj", "o_proj"]}, ""),
        ({"serve": "merged"}, ""),
    ],
)
def test_an_adapter_of_rows_that_vllm_moves_is_served_merged(
    lora: dict[str, Any], said: str
) -> None:
    settings = TrainerConfig(lora=ServedLoraConfig(**lora))
    found = list(mixture_problems(("trainer",), settings, "m", LLAMA4))
    assert [it.path for it in found] == [("trainer", "lora", "serve")] * bool(said)
    assert all(said in it.message for it in found)


@pytest.mark.parametrize(
    ("lora", "changes", "is_refused"),
    [
        (ServedLoraConfig(), {}, True),
        (ServedLoraConfig(target_modules=["o_proj"]), {"model_type": "nobodys_moe"}, True),
        (ServedLoraConfig(serve="merged"), {}, False),
        (ServedLoraConfig(), {"num_experts": None}, False),
        (None, {}, False),
    ],
)
def test_adapters_beside_experts_are_served_merged_on_cpus(
    lora: ServedLoraConfig | None, changes: dict[str, Any], is_refused: bool
) -> None:
    settings = TrainerConfig(lora=lora)
    found = list(adapter_problems(("trainer",), settings, "m", FITS | changes))
    assert [it.path for it in found] == [("trainer", "lora", "serve")] * is_refused
    assert all("by Triton" in it.message for it in found)
    assert list(adapter_problems((), settings, "m", {})) == []


def test_a_model_with_a_tower_that_is_not_used_is_said_to_be_trained_on_text_alone() -> None:
    assert family_note({"model_type": "gemma4"}) == "family gemma4: trained, on text alone"
    seeing = {"model_type": "gemma4", "vision_config": {}}
    assert family_note(seeing) == "family gemma4: trained"
    both_ways = {"use_bidirectional_attention": "vision"}
    assert "on text alone" in family_note(seeing | {"text_config": both_ways})
    assert problems(model_type="gemma4", text_config=GEMMA4) == []
    (found,) = problems(model_type="gemma4", text_config=GEMMA4 | {"top_k_experts": 9})
    assert found.startswith("model 'm' (gemma4): its config.json says top_k_experts = 9")


@pytest.mark.parametrize(
    ("vision", "text", "said"),
    [
        ({"default_output_length": 280}, {}, ""),
        ({}, {}, "counts tokens of images by vision_config.default_output_length, which is not"),
        ({"default_output_length": 280}, {"pad_token_id": 3}, "and the model pad_token_id = 3"),
        (
            {"default_output_length": 280},
            {"pad_token_id": 3, "hidden_size_per_layer_input": 0},
            "",
        ),
        ({}, {"use_bidirectional_attention": "vision"}, ""),
    ],
)
def test_images_that_the_engine_would_read_otherwise_are_refused(
    vision: dict[str, Any], text: dict[str, Any], said: str
) -> None:
    options: dict[str, Any] = {"dtype": "float32", "has_engine": True, "model_type": "gemma4"}
    found = problems(**options, vision_config=vision, text_config=GEMMA4 | text)
    assert len(found) == bool(said)
    assert all(said in it for it in found)
    assert problems(model_type="gemma4", vision_config=vision, text_config=GEMMA4 | text) == []


def test_layers_of_gemma_4_that_a_config_does_not_write_are_those_that_it_gets() -> None:
    config = {"model_type": "gemma4_text", "num_hidden_layers": 13, "attention_k_eq_v": True}
    written = [*(["sliding_attention"] * 5 + ["full_attention"]) * 2, "full_attention"]
    given = config | {"layer_types": written, "global_head_dim": 512}
    assert other_layers(config) == other_layers(given) == [{"head_dim": 512}] * 3
    shared = {"num_global_key_value_heads": 2, "num_key_value_heads": 4}
    assert other_layers(config | shared) == [{"head_dim": 512, "num_key_value_heads": 2}] * 3
    assert other_layers({"model_type": "qwen3", "num_hidden_layers": 13}) == []


def test_experts_that_a_config_turns_off_are_none() -> None:
    settings = TrainerConfig(router_replay="engine")
    (found,) = mixture_problems((), settings, "m", GEMMA4 | {"enable_moe_block": False})
    assert "has no experts" in found.message
    assert list(mixture_problems((), settings, "m", GEMMA4)) == []


def test_the_part_that_reads_text_is_looked_at() -> None:
    (found,) = problems(text_config=FITS | {"num_key_value_heads": 3})
    assert "3 key heads" in found


@pytest.mark.parametrize("family", sorted(families.MISSING))
def test_a_family_that_lacks_something_is_refused_with_it(family: str) -> None:
    (found,) = problems(model_type=family, quantization_config={"quant_method": "fp8"})
    assert found.startswith(f"model 'm' ({family}) cannot be trained, for want of ")
    assert "not trained" in family_note({"model_type": family})


@pytest.mark.parametrize("family", sorted(families.TRAINED_ON_CPUS))
def test_a_family_that_is_exact_on_cpus_alone_is_refused_where_there_are_gpus(family: str) -> None:
    assert problems(model_type=family) == []
    (found,) = problems(model_type=family, has_gpus=True)
    assert "exact on CPUs only" in found
    assert family_note({"model_type": family}).endswith("GPUs")


@pytest.mark.parametrize("family", sorted(families.UNSAMPLED))
def test_a_family_that_vllm_computes_differently_is_refused_for_rl(family: str) -> None:
    (found,) = problems(model_type=family, has_engine=True)
    assert families.UNSAMPLED[family] in found
    assert "gradus sft" in found
    assert problems(model_type=family) == []
    *_, found = problems(model_type=family, has_engine=True, has_gpus=True)
    assert "on GPUs the two were not compared" in found
    assert "not with rl" in family_note({"model_type": family})


@pytest.mark.parametrize(
    "experts",
    [{"layers_block_type": ["mamba", "moe"]}, {"hybrid_override_pattern": "M*E-"}],
)
def test_a_family_that_vllm_has_without_experts_alone_is_refused_for_rl_with_them(
    experts: dict[str, Any],
) -> None:
    dense = {"layers_block_type": ["mamba", "mlp"], "hybrid_override_pattern": "M*-"}
    assert problems(model_type="nemotron_h", has_engine=True, **dense) == []
    (found,) = problems(model_type="nemotron_h", has_engine=True, **experts)
    assert families.UNSAMPLED_EXPERTS["nemotron_h"] in found
    assert problems(model_type="nemotron_h", **experts) == []
    assert problems(model_type="nemotron_h", has_engine=True, layers_block_type=7) == []


@pytest.mark.parametrize(
    ("family", "size"), [("granitemoehybrid", "mamba_n_groups"), ("deepseek_v2", "kv_lora_rank")]
)
def test_sizes_for_which_the_engine_has_no_kernel_are_refused_for_rl(
    family: str, size: str
) -> None:
    *_, found = problems(model_type=family, has_engine=True, **{size: 48})
    assert f"takes {size} = " in found
    assert "this has 48" in found
    assert problems(model_type=family, **{size: 48}) == []


@pytest.mark.parametrize(
    ("family", "wrong", "right"),
    [
        ("deepseek_v3", {}, {"scoring_func": "sigmoid"}),
        ("deepseek_v3", {"scoring_func": "softmax"}, {"scoring_func": "sigmoid"}),
        ("deepseek_v2", {"n_group": 8}, {"n_group": 8, "topk_method": "group_limited_greedy"}),
        ("deepseek_v2", {"n_group": 8, "topk_method": "greedy"}, {"n_group": 1}),
        ("llama4_text", {**LLAMA4, "attention_chunk_size": 48}, {**LLAMA4}),
        ("llama4_text", {**LLAMA4, "attention_bias": True}, {**LLAMA4}),
        ("qwen3_5", {}, {"text_config": {"rope_parameters": {"mrope_section": [11, 11, 10]}}}),
        ("qwen3_5_moe", {}, {"text_config": {"rope_parameters": {"mrope_section": [11, 11, 10]}}}),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, {"norm_topk_prob": True}),
        ("qwen3_vl_moe", {"text_config": {}}, {"text_config": {"norm_topk_prob": True}}),
    ],
)
def test_configs_that_the_engine_would_read_otherwise_are_refused_for_rl(
    family: str, wrong: dict[str, Any], right: dict[str, Any]
) -> None:
    told: dict[str, Any] = {"has_engine": True, "dtype": "float32"}
    (found,) = problems(**({"model_type": family} | wrong | told))
    assert any(word in found for word in ("unless", "greedy", "blocks of 32", "attention_bias"))
    assert problems(**({"model_type": family} | right | told)) == []
    assert problems(**({"model_type": family} | wrong)) == []


@pytest.mark.parametrize(
    ("hidden", "size", "is_square"), [(2048, 768, False), (96, 96, True), (96, 48, True)]
)
def test_experts_of_which_the_layout_cannot_be_told_are_refused(
    hidden: int, size: int, is_square: bool
) -> None:
    """Of Qwen3-VL-MoE, which transformers turns where the shapes differ."""
    text = FITS | {"hidden_size": hidden, "moe_intermediate_size": size}
    found = problems(model_type="qwen3_vl_moe", text_config=text)
    assert ["square experts" in it for it in found] == [True] * is_square
    assert problems(model_type="qwen3_5_moe", text_config=text) == []


@pytest.mark.parametrize(
    ("family", "shape", "is_refused"),
    [
        ("qwen3_vl_moe", (128, 2048, 768), True),
        ("qwen3_vl_moe", (128, 768, 2048), False),
        ("qwen3_vl_moe", (), False),
        ("qwen3_5_moe", (128, 2048, 768), False),
    ],
)
def test_experts_that_vllm_would_read_the_wrong_way_round_are_refused(
    family: str, shape: tuple[int, ...], is_refused: bool
) -> None:
    text = {"hidden_size": 2048, "moe_intermediate_size": 768}
    found = list(
        turned_problem(("model",), "m", {"model_type": family, "text_config": text}, shape)
    )
    assert ["[128, 2048, 768]" in it.message for it in found] == [True] * is_refused
    assert (
        list(turned_problem(("model",), "m", {"model_type": family, "text_config": 3}, shape)) == []
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_with_state_are_sampled_in_both_dtypes(dtype: str) -> None:
    told = {"has_gpus": False, "has_engine": True, "dtype": dtype}
    config = FITS | {"model_type": "falcon_h1"}
    assert list(family_problems("m", config, **told)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
@pytest.mark.parametrize("family", sorted(families.FLOAT32_ALONE))
def test_what_bfloat16_moves_too_far_is_sampled_in_float32_alone(family: str, dtype: str) -> None:
    said = families.dtype_problem(family, dtype)
    assert ("trainer.compute_dtype = 'float32'" in said) is (dtype != "float32")


@pytest.mark.parametrize("odd", [{}, {"model_type": 7}, {"model_type": "x", "text_config": []}])
def test_what_a_config_does_not_say_is_left_to_the_trainer(odd: dict[str, Any]) -> None:
    assert list(family_problems("m", odd, has_gpus=True, has_engine=True)) == []
    assert "not tried" in family_note(odd)


@pytest.mark.parametrize("odd", [None, -1, 0, "4", 2.5, [], {}, True, 10**30])
def test_no_value_of_a_size_ends_in_a_traceback(odd: object) -> None:
    for name in FITS:
        json.dumps(problems(**{name: odd}))


def test_a_family_stands_in_one_table() -> None:
    assert not families.TRAINED & families.TRAINED_ON_CPUS
    assert not families.MISSING.keys() & (families.TRAINED | families.TRAINED_ON_CPUS)
    known = families.TRAINED | families.TRAINED_ON_CPUS | families.WITH_IMAGES
    assert not families.MISSING.keys() & families.WITH_IMAGES
    named = families.UNSAMPLED.keys() | families.CARRIES_STATE | families.FLOAT32_ALONE
    assert named <= known
    assert not families.UNSAMPLED.keys() & families.FLOAT32_ALONE


def test_each_row_of_the_page_is_in_the_table_and_each_family_has_a_row() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text("utf-8")
    rows = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    rows.remove("model_type")
    assert (
        rows
        == families.TRAINED
        | families.TRAINED_ON_CPUS
        | families.WITH_IMAGES
        | families.MISSING.keys()
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"num_experts": None}, "has no experts to choose from; write 'off'"),
        ({"model_type": "llama", "num_experts": None}, "'m' (llama) has no experts"),
        ({"num_experts": None, "n_routed_experts": 8}, ""),
        ({"model_type": "deepseek_v2", "topk_method": "greedy"}, ""),
        ({"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"}, "may have none"),
    ],
)
def test_routing_is_replayed_where_there_are_experts(changes: dict[str, Any], words: str) -> None:
    settings = TrainerConfig(router_replay="engine")
    found = list(mixture_problems(("trainer",), settings, "m", FITS | changes))
    assert len(found) == bool(words)
    assert all(words in it.message for it in found)
    assert [it.path for it in found] == [("trainer", "router_replay")] * len(found)
    # Files that are not here yet say nothing.
    assert list(mixture_problems(("trainer",), settings, "m", {})) == []
    assert list(mixture_problems(("trainer",), TrainerConfig(), "m", FITS | changes)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"model_type": "nobodys_moe"}, ""),
        ({"num_experts": None}, "has none; name its linear layers alone"),
        ({"model_type": "llama", "num_experts": None}, "'m' (llama) has none"),
        ({"model_type": "llama"}, "take no adapters"),
    ],
)
def test_adapters_on_experts_need_experts_that_take_them(
    changes: dict[str, Any], words: str
) -> None:
    lora = ServedLoraConfig(target_modules=["experts", "q_proj"], serve="merged")
    for settings, path in ((TrainerConfig(lora=lora), ("trainer",)), (sft(lora), ())):
        found = list(mixture_problems(path, settings, "m", FITS | changes))
        assert len(found) == bool(words)
        assert all(words in it.message for it in found)
        assert [it.path for it in found] == [(*path, "lora", "target_modules")] * len(found)
        assert list(mixture_problems(path, settings, "m", {})) == []


def sft(lora: ServedLoraConfig) -> SftConfig:
    own = LoraConfig(**lora.model_dump(exclude={"serve"}))
    return SftConfig.model_validate({"model": {"name": "m"}, "data": {"path": "d"}, "lora": own})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "glm4_moe"}, ""),
        ({"model_type": "nobodys_moe"}, ""),
        ({}, "0.001: model 'm' (qwen3_moe) has no biases of routing; write 0"),
        ({"model_type": "glm4_moe", "num_experts": None}, "has no biases"),
        ({"model_type": "lfm2_moe", "use_expert_bias": False}, "has no biases"),
        ({"model_type": "lfm2_moe", "use_expert_bias": True}, ""),
    ],
)
def test_biases_of_routing_move_where_there_are_some(changes: dict[str, Any], words: str) -> None:
    settings = TrainerConfig(router_bias_rate=0.001)
    found = list(mixture_problems(("trainer",), settings, "m", FITS | changes))
    assert len(found) == bool(words)
    assert all(words in it.message for it in found)
    assert [it.path for it in found] == [("trainer", "router_bias_rate")] * len(found)
    assert list(mixture_problems(("trainer",), settings, "m", {})) == []


@pytest.mark.parametrize(
    ("changes", "settings", "is_advised"),
    [
        ({}, {"compute_dtype": "bfloat16"}, True),
        ({}, {"compute_dtype": "float32"}, False),
        ({}, {"compute_dtype": "bfloat16", "router_replay": "engine"}, False),
        ({"num_experts": None}, {"compute_dtype": "bfloat16"}, False),
        (
            {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"},
            {"compute_dtype": "bfloat16"},
            False,
        ),
    ],
)
def test_replay_is_advised_for_a_mixture_in_bfloat16(
    changes: dict[str, Any], settings: dict[str, str], is_advised: bool
) -> None:
    found = list(mixture_note(TrainerConfig.model_validate(settings), "m", FITS | changes))
    assert len(found) == is_advised
    assert all("trainer.router_replay = 'engine' avoids it" in it for it in found)
    assert list(mixture_note(TrainerConfig.model_validate(settings), "m", {})) == []
