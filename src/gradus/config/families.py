"""Which families of models are trained, by config.json alone.

The tables are those of docs/models.md: what is trained kept every check of the tests behind it. A
family in no table is left to the trainer, which compares it with its own forward before the first
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradus.config.keys import KeyPath
from gradus.config.problems import Problem
from gradus.config.schema.sft import SftConfig
from gradus.config.schema.trainer import ServedLoraConfig, TrainerConfig
from gradus.run.model_files import most_image_tokens, quantised_problem, text_part, unused_tower

_PATH: KeyPath = ("model", "name")
TRAINED = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "olmo2", "olmo3", "phi"),
        *("phi3", "cohere", "cohere2", "granite", "gpt_neox", "gpt2", "smollm3", "starcoder2"),
        *("glm4", "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "minimax_m2", "granitemoe"),
        *("gemma2", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"),
        *("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "mamba2", "nemotron_h"),
        *("falcon_h1", "granitemoehybrid", "bamba", "lfm2", "lfm2_moe"),
        *("gemma4_text", "llama4_text"),
    }
)
"""By `model_type`."""
WITH_IMAGES = frozenset(
    {"qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma4"}
)
"""Those that are trained with images, and with their tower for them."""
TRAINED_ON_CPUS = frozenset({"qwen3_5_moe_text", "qwen3_5_moe"})
"""There alone: on a GPU, uncompiled, the gradient of the first in bfloat16 was 1.31 times as far
from float32 as the model's own, and 1.3 is allowed (benchmarks/results/gpu_families.json). The
second is the same with a tower."""
UNSAMPLED: Mapping[str, str] = {
    "kimi_linear": "needs CUTLASS, which is for GPUs",
    "olmo_hybrid": "reads other names of weights than transformers writes",
    "bamba": "has no such model",
}
"""Those of them that only `gradus sft` trains: what vLLM lacks on CPUs, or computes differently."""
UNSAMPLED_EXPERTS: Mapping[str, str] = {"nemotron_h": "has experts without a gate on GPUs alone"}
"""The same of those whose other variants `gradus rl` trains."""
_DELTA = ("linear_num_value_heads", "linear_num_key_heads")
_MAMBA = ("mamba_n_heads", "mamba_n_groups")
CARRIES_STATE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "olmo_hybrid"), _DELTA),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _DELTA),
    "kimi_linear": ("linear_num_heads",),
    "mamba2": ("num_heads", "n_groups"),
    "nemotron_h": ("mamba_num_heads", "n_groups"),
    **dict.fromkeys(("falcon_h1", "granitemoehybrid", "bamba"), _MAMBA),
    **dict.fromkeys(("lfm2", "lfm2_moe"), ("hidden_size",)),
}
"""Those with layers that carry state from token to token; how many heads those have, or channels,
and which of their parts heads share, as config.json calls them."""
FLOAT32_ALONE = frozenset(
    {
        *("gpt_oss", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe_text"),
        *("mamba2", "lfm2", "lfm2_moe", "gemma4_text", "gemma4", "qwen3_5_moe"),
    }
)
"""Those that vLLM on CPUs computes as the trainer does in float32, and not in bfloat16."""
TURNED = "qwen3_vl_moe"
"""The family whose published models hold experts as [E, in, out]; transformers keeps what it
computes with, [E, out, in], when it saves one."""
_NORMED = frozenset({TURNED, "qwen3_5_moe", "qwen3_5_moe_text"})
"""Those that transformers lets weigh experts by shares of the chosen ones, whatever config.json
says, and vLLM as config.json says."""
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_ENGINE_SIZES: Mapping[str, Mapping[str, int]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _LATENT),
    # vLLM norms each group of heads by itself, transformers all of them.
    "mamba2": {"n_groups": 1},
    "granitemoehybrid": {"mamba_n_groups": 1},
    "llama4_text": {"num_experts_per_tok": 1},
}
"""The only sizes of a family for which vLLM on CPUs has kernels, or computes the same."""
_BLOCK = 32
"""Tokens of a block of vLLM's cache on CPUs."""
_IMAGES = "its part for images, which is not trained; train a model that reads text alone"
_MOST_LAYERS = 1_000
"""Of a config.json that does not list them; more is damaged."""
_BOTH = f"{_IMAGES}, such as this one's text part saved by itself"
MISSING: Mapping[str, str] = {
    **dict.fromkeys(("qwen2_vl", "llava"), _IMAGES),
    **dict.fromkeys(("mistral3", "kimi_k25", "llama4"), _BOTH),
    "kimi_k2": (
        "a config.json that transformers reads: its layers are those of DeepSeek V3; write "
        '"model_type": "deepseek_v3" into a copy, without auto_map'
    ),
    **dict.fromkeys(
        ("deepseek_v32", "deepseek_v4", "glm_moe_dsa"),
        "attention to chosen tokens: the engine's choice would have to be trained as well",
    ),
    **dict.fromkeys(
        ("mamba", "falcon_mamba", "jamba", "zamba", "zamba2", "recurrent_gemma", "rwkv", "xlstm"),
        "a recurrence that would carry state from one packed sample into the next",
    ),
}
"""`model_type` → what gradus lacks for it."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
ADAPTED_EXPERTS = frozenset(
    {
        *("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v2"),
        *("deepseek_v3", "gpt_oss", "minimax_m2", "granitemoe", "granitemoehybrid", "qwen3_next"),
        *("qwen3_5_moe_text", "kimi_linear", "nemotron_h", "lfm2_moe"),
        *("gemma4_text", "gemma4", "qwen3_vl_moe", "qwen3_5_moe", "llama4_text"),
    }
)
"""Those whose experts take adapters, exactly as merged weights compute."""
BIASED_ROUTERS = frozenset(
    {"glm4_moe", "glm4_moe_lite", "deepseek_v3", "minimax_m2", "nemotron_h", "lfm2_moe"}
)
"""Those that add a bias to the scores by which experts are chosen."""


def family_of(config: Mapping[str, Any]) -> str:
    """The `model_type` of a config.json; empty where it names none."""
    name = config.get("model_type")
    return name if isinstance(name, str) else ""


def family_note(config: Mapping[str, Any]) -> str:
    """What is known of a model's family, in a few words."""
    name = family_of(config)
    if name in TRAINED | TRAINED_ON_CPUS | WITH_IMAGES:
        asked = {"rl": name in UNSAMPLED, "GPUs": name in TRAINED_ON_CPUS}
        refusing = " or ".join(it for it, is_refusing in asked.items() if is_refusing)
        on_text = ", on text alone" if unused_tower(config) else ""
        return f"family {name}: trained{on_text}{refusing and f', not with {refusing}'}"
    if name in MISSING:
        return f"family {name}: not trained, for want of {MISSING[name]}"
    return f"family {name or '?'}: not tried; a trainer first compares it with its own forward"


def family_problems(
    name: str, config: Mapping[str, Any], *, has_gpus: bool, has_engine: bool, dtype: str = "auto"
) -> Iterator[Problem]:
    """Why the model `name` with this config.json cannot be trained; nothing where it does not say.

    With `has_engine`, on tokens that the run's own engine samples, in the `dtype` written for it.

    >>> found = family_problems("m", {"model_type": "qwen2_vl"}, has_gpus=False, has_engine=True)
    >>> next(found).message.partition(",")[0]
    "model 'm' (qwen2_vl) cannot be trained"
    """
    family, who = family_of(config), f"model {name!r} ({family_of(config) or 'of no family'})"
    if family in MISSING:
        text = f"{who} cannot be trained, for want of {MISSING[family]}; see docs/models.md"
        yield Problem(_PATH, text)
        return
    if family in TRAINED_ON_CPUS and has_gpus:
        yield Problem(
            _PATH,
            f"{who} is exact on CPUs only, and this shell sees GPUs; hide them "
            "(CUDA_VISIBLE_DEVICES=''), or use another model; see docs/models.md",
        )
    if has_engine:
        reasons = [*_unsampled(family, config)]
        unknown = ", and on GPUs the two were not compared" if has_gpus else ""
        for reason in reasons:
            advice = "train it with `gradus sft`, or use another model; see docs/models.md"
            yield Problem(_PATH, f"{who}: on CPUs vLLM {reason}{unknown}; {advice}")
        if not has_gpus and not reasons and (problem := dtype_problem(family, dtype)):
            yield Problem(("inference", "dtype"), problem)
    own = text_part(config)
    if problem := quantised_problem(config) or quantised_problem(own):
        yield Problem(_PATH, f"{who}: {problem}")
    if own.get("use_bidirectional_attention") == "all":
        yield Problem(
            _PATH,
            f"{who}: its tokens attend to those after them (use_bidirectional_attention = 'all'), "
            "and what is sampled token by token cannot; use another model",
        )
    for misfit in [*_misfits(own), *(_misfits_of_turning(own) if family == TURNED else ())]:
        yield Problem(_PATH, f"{who}: its config.json says {misfit}; fetch or save it again")


def turned_problem(
    path: KeyPath, name: str, config: Mapping[str, Any], shape: Sequence[int]
) -> Iterator[Problem]:
    """Experts that vLLM would read the wrong way round, whose `down_proj` are stored in this shape;
    transformers reads both."""
    own = text_part(config)
    sides = [own.get("hidden_size"), own.get("moe_intermediate_size")]
    if family_of(config) == TURNED and [*shape[1:]] == sides:
        yield Problem(
            path,
            f"model {name!r} ({TURNED}): its experts lie as transformers saves them (down_proj is "
            f"{[*shape]}), and vLLM reads them as the published models hold them, the last two "
            "sides the other way round; turn them, or train it by `gradus sft`, which saves it so",
        )


def has_experts(config: Mapping[str, Any]) -> bool:
    text = text_part(config)
    return text.get("enable_moe_block") is not False and any(text.get(it) for it in _EXPERTS)


def other_layers(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What some layers have in the place of the sizes that a config of text says for all; of
    Gemma 4 those that attend to everything.

    >>> other_layers({"model_type": "gemma4_text", "num_hidden_layers": 6})
    [{'head_dim': 512}]
    """
    written = config.get("per_layer_config")
    if isinstance(written, dict):
        return [it for it in written.values() if isinstance(it, dict)]
    if "global_head_dim" not in config and config.get("model_type") != "gemma4_text":
        return []
    kinds, number = config.get("layer_types"), config.get("num_hidden_layers")
    if not isinstance(kinds, list):
        # What transformers makes where a config.json says none.
        number = min(number, _MOST_LAYERS) if isinstance(number, int) else 0
        kinds = ["full_attention"] * (number // 6 + (number % 6 > 0))
    size = config.get("global_head_dim", 512)
    sizes = {"head_dim": size} if isinstance(size, int) else {}
    key_heads = config.get("num_global_key_value_heads")
    if isinstance(key_heads, int) and config.get("attention_k_eq_v"):
        sizes["num_key_value_heads"] = key_heads
    return [sizes] * kinds.count("full_attention")


def image_problems(
    path: KeyPath, settings: TrainerConfig | SftConfig, name: str, config: Mapping[str, Any]
) -> Iterator[Problem]:
    """Settings of images for a model with this config.json, which reads text alone; and files of
    which vLLM would count other tokens of an image than the processor makes."""
    is_read = isinstance(config.get("vision_config"), dict)
    if config and (not is_read or unused_tower(config)):
        for key in ("train_vision", "micro_batch_patches"):
            if getattr(settings, key):
                text = (
                    f"model {name!r} ({family_of(config) or 'of no family'}) trains on text alone"
                )
                yield Problem((*path, key), f"{text}; remove the key")
        return
    counted = (config.get("vision_config") or {}).get("default_output_length")
    made = most_image_tokens(name) if counted and isinstance(settings, TrainerConfig) else None
    if made not in (None, counted):
        yield Problem(
            _PATH,
            f"model {name!r}: its processor makes up to {made} tokens of an image (max_soft_tokens)"
            f", and vLLM counts {counted} (vision_config.default_output_length of config.json); "
            "write the same into both",
        )


def mixture_problems(
    path: KeyPath, settings: TrainerConfig | SftConfig, name: str, config: Mapping[str, Any]
) -> Iterator[Problem]:
    """What of these settings a model with this config.json has no experts for, or not such ones,
    or its engine cannot serve."""
    family = family_of(config)
    who = f"model {name!r} ({family or 'of no family'})"
    lacks_experts = bool(config) and not has_experts(config)
    known = TRAINED | TRAINED_ON_CPUS | WITH_IMAGES
    if settings.lora is not None and settings.lora.adapts_experts:
        key = (*path, "lora", "target_modules")
        if lacks_experts:
            yield Problem(key, f"'experts': {who} has none; name its linear layers alone")
        elif family in known - ADAPTED_EXPERTS:
            yield Problem(key, f"'experts': those of {who} take no adapters; leave it out")
    yield from _served_problems(path, settings, who, config)
    if rate := getattr(settings, "router_bias_rate", 0.0):
        has_bias = config.get("use_expert_bias", True) and family not in known - BIASED_ROUTERS
        if lacks_experts or not has_bias:
            yield Problem(
                (*path, "router_bias_rate"),
                f"{rate:g}: {who} has no biases of routing; write 0",
            )
    if (size := settings.parallel.expert_parallel_size) > 1:
        yield from _split_problems((*path, "parallel", "expert_parallel_size"), size, who, config)
    if getattr(settings, "router_replay", "off") == "off":
        return
    key = (*path, "router_replay")
    if lacks_experts:
        yield Problem(key, f"'engine': {who} has no experts to choose from; write 'off'")
    elif config.get("topk_method") == "group_limited_greedy" and family == "deepseek_v2":
        yield Problem(
            key,
            f"'engine': {who} gives scores to the experts of its chosen groups alone, so those of "
            "the engine may have none; write 'off'",
        )


def _served_problems(
    path: KeyPath, settings: TrainerConfig | SftConfig, who: str, config: Mapping[str, Any]
) -> Iterator[Problem]:
    """vLLM adds an adapter of keys to keys alone, where values are the same product; and it turns
    pairs of channels into halves in weights, not in their adapters."""
    lora, text = settings.lora, text_part(config)
    if not isinstance(lora, ServedLoraConfig):
        return
    names = ["k_proj"] if lora.target_modules is None else lora.target_modules
    if text.get("attention_k_eq_v") and lora.serve == "adapter" and "k_proj" in names:
        yield Problem(
            (*path, "lora", "serve"),
            f"'adapter': keys of {who} are values too, and vLLM adapts keys alone; write 'merged', "
            "or target_modules without k_proj",
        )
    if family_of(config) == "llama4_text" and lora.serve == "adapter":
        taken = ["q_proj", "k_proj"] if lora.target_modules is None else lora.target_modules
        if turned := sorted({"q_proj", "k_proj"} & {*taken}):
            yield Problem(
                (*path, "lora", "serve"),
                f"'adapter': vLLM puts the rows of {' and '.join(turned)} of {who} into another "
                "order, and those of their adapters not; write 'merged', or target_modules "
                "without them",
            )


def adapter_problems(
    path: KeyPath, settings: TrainerConfig, name: str, config: Mapping[str, Any]
) -> Iterator[Problem]:
    """Adapters that vLLM on CPUs cannot serve: beside experts, whichever layers they are on."""
    if (lora := settings.lora) is None or lora.serve != "adapter" or not has_experts(config):
        return
    yield Problem(
        (*path, "lora", "serve"),
        f"'adapter': vLLM computes the experts of model {name!r} ({family_of(config)}) by Triton "
        "once it serves an adapter, and its build for CPUs has none; write 'merged'",
    )


def mixture_note(settings: TrainerConfig, name: str, config: Mapping[str, Any]) -> Iterator[str]:
    """What is allowed for a mixture of experts and rarely meant."""
    replaying = settings.model_copy(update={"router_replay": "engine", "lora": None})
    if settings.compute_dtype != "bfloat16" or settings.router_replay != "off":
        return
    if has_experts(config) and not [*mixture_problems((), replaying, name, config)]:
        yield (
            f"model {name!r} chooses experts, and in bfloat16 trainer and engine choose other ones "
            "for some tokens, whose ratios are noise (mismatch_kl of GLM-4.5 4.3e-5, and 6.5e-6 "
            "with those of the engine); trainer.router_replay = 'engine' avoids it"
        )


def _split_problems(
    key: KeyPath, size: int, who: str, config: Mapping[str, Any]
) -> Iterator[Problem]:
    if not has_experts(config):
        if config:
            yield Problem(key, f"{size}: {who} has no experts to share; write 1")
        return
    own = text_part(config)
    experts = next(own[it] for it in _EXPERTS if own.get(it))
    if isinstance(experts, int) and experts % size:
        text = f"{size} does not divide the {experts} experts of {who}; choose another size"
        yield Problem(key, text)


def dtype_problem(family: str, dtype: str) -> str:
    """Why tokens that vLLM samples on CPUs in a dtype cannot be trained; empty where they can.

    >>> dtype_problem("qwen3", "float32")
    ''
    """
    if family in FLOAT32_ALONE and dtype != "float32":
        return (
            f"{dtype!r}, and in bfloat16 the logprobs of {family} in vLLM are far from the "
            "trainer's; write 'float32', and trainer.compute_dtype = 'float32'"
        )
    return ""


def unserved_problems(name: str, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Why vLLM on CPUs does not serve the model `name` as it is, also where nothing trains it."""
    family = family_of(config)
    for reason in _unsampled(family, config):
        text = f"model {name!r} ({family}): on CPUs vLLM {reason}; use another model, or GPUs"
        yield Problem(_PATH, f"{text}; see docs/models.md")


def _unsampled(family: str, config: Mapping[str, Any]) -> Iterator[str]:
    if family in UNSAMPLED:
        yield UNSAMPLED[family]
    kinds, pattern = (
        str(config.get(it)) for it in ("layers_block_type", "hybrid_override_pattern")
    )
    if family in UNSAMPLED_EXPERTS and ("moe" in kinds or "E" in pattern):
        yield UNSAMPLED_EXPERTS[family]
    own = text_part(config)
    if family == "deepseek_v3" and config.get("scoring_func") != "sigmoid":
        yield 'scores experts by softmax, unless config.json says "scoring_func": "sigmoid"'
    if family in _NORMED and not own.get("norm_topk_prob", family != TURNED):
        yield 'weighs experts otherwise, unless its text config says "norm_topk_prob": true'
    if family in ("qwen3_5", "qwen3_5_moe") and "mrope_section" not in str(own):
        yield 'places images as text, unless text_config.rope_parameters has "mrope_section"'
    if family == "gemma4" and unused_tower(config) is None:
        yield from _unsampled_images(config)
    is_greedy = config.get("topk_method", "greedy") == "greedy"
    if family == "deepseek_v2" and is_greedy and config.get("n_group") not in (None, 1):
        yield 'chooses experts within groups, which topk_method = "greedy" does not'
    if family == "llama4_text":
        if isinstance(size := config.get("attention_chunk_size", 0), int) and size % _BLOCK:
            yield f"keeps chunks in blocks of {_BLOCK} tokens, and attention_chunk_size = {size}"
        if config.get("attention_bias"):
            yield "has no biases in attention, and config.json says attention_bias = true"
    for name, size in _ENGINE_SIZES.get(family, {}).items():
        if config.get(name, size) != size:
            yield f"takes {name} = {size} alone, and this has {config[name]}"


def _unsampled_images(config: Mapping[str, Any]) -> Iterator[str]:
    """Where vLLM's Gemma 4 reads images otherwise than that of transformers."""
    text = text_part(config)
    if text.get("hidden_size_per_layer_input", 256) and (padding := text.get("pad_token_id", 0)):
        yield f"gives layers token 0 where an image lies, and the model pad_token_id = {padding}"
    if not isinstance(config["vision_config"].get("default_output_length"), int):
        yield "counts tokens of images by vision_config.default_output_length, which is not written"


def _misfits(config: Mapping[str, Any]) -> Iterator[str]:
    def number(*names: str) -> int | None:
        found = (config.get(name) for name in names)
        return next((it for it in found if isinstance(it, int) and not isinstance(it, bool)), None)

    layers, kinds = number("num_hidden_layers"), config.get("layer_types")
    if layers is not None and isinstance(kinds, list) and len(kinds) != layers:
        yield f"num_hidden_layers = {layers} and {len(kinds)} layer_types"
    heads, key_heads = number("num_attention_heads"), number("num_key_value_heads")
    others = {it.get("num_key_value_heads") for it in other_layers(config)}
    for each in {key_heads} | {it for it in others if isinstance(it, int)}:
        if heads and each and heads % each:
            yield f"{heads} attention heads, which {each} key heads cannot share evenly"
    hidden = number("hidden_size")
    has_head_size = any(config.get(it) for it in ("head_dim", "qk_rope_head_dim"))
    if heads and hidden and not has_head_size and hidden % heads:
        yield f"hidden_size = {hidden}, which {heads} attention heads do not divide"
    experts = number(*_EXPERTS)
    for name in ("num_experts_per_tok", "top_k_experts"):
        if experts and (chosen := number(name) or 0) > experts:
            yield f"{name} = {chosen} of {experts} experts"
    groups, chosen_groups = number("n_group"), number("topk_group")
    if experts and groups and experts % groups:
        yield f"{experts} experts in {groups} groups, which do not divide them"
    if groups and chosen_groups and chosen_groups > groups:
        yield f"topk_group = {chosen_groups} of {groups} groups"
    values, keys = number("linear_num_value_heads"), number("linear_num_key_heads")
    if values and keys and values % keys:
        yield f"linear_num_value_heads = {values}, which {keys} linear_num_key_heads do not divide"
    yield from _misfits_of_sharing(config, layers, kinds)
    if family_of(config) == "llama4_text":
        yield from _misfits_of_chunks(config, layers, kinds)


def _misfits_of_turning(config: Mapping[str, Any]) -> Iterator[str]:
    """Of models whose experts are stored the other way round, which only their shape says."""
    hidden, size = (config.get(it) for it in ("hidden_size", "moe_intermediate_size"))
    if isinstance(size, int) and hidden in (size, 2 * size):
        yield (
            f"hidden_size = {hidden} and moe_intermediate_size = {size}, square experts, of which "
            "transformers cannot tell how they are stored"
        )


def _misfits_of_sharing(
    config: Mapping[str, Any], layers: int | None, kinds: object
) -> Iterator[str]:
    """Of models whose last layers take the keys and values of earlier ones, as in Gemma 4."""
    shared = config.get("num_kv_shared_layers") or 0
    if not isinstance(shared, int) or layers is None or not isinstance(kinds, list):
        return
    own, taking = kinds[: max(layers - shared, 0)], kinds[max(layers - shared, 0) :]
    if lacking := [kind for kind in taking if kind not in own]:
        yield (
            f"num_kv_shared_layers = {shared} of {layers}, and no layer before them is of the kind "
            f"{lacking[0]!r}"
        )
    words, known = config.get("vocab_size"), config.get("vocab_size_per_layer_input")
    if not isinstance(words, int) or not isinstance(known, int):
        return
    if config.get("hidden_size_per_layer_input") and words > known:
        yield f"vocab_size = {words} and vocab_size_per_layer_input = {known}"


def _misfits_of_chunks(
    config: Mapping[str, Any], layers: int | None, kinds: object
) -> Iterator[str]:
    """Of Llama 4, whose files may say by layer what engines take from a rule."""
    size = config.get("attention_chunk_size", 8192)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        yield f"attention_chunk_size = {size!r}, and layers that rotate attend in chunks"
    rotating, mixtures = config.get("no_rope_layers"), config.get("moe_layers")
    if isinstance(rotating, list) and rotating and layers is not None and len(rotating) != layers:
        yield f"num_hidden_layers = {layers} and {len(rotating)} no_rope_layers"
    elif isinstance(rotating, list) and isinstance(kinds, list):
        by_rule = ["chunked_attention" if it else "full_attention" for it in rotating]
        if rotating and kinds != by_rule:
            yield "layer_types other than those of no_rope_layers, chunks where layers rotate"
    step = config.get("interleave_moe_layer_step", 1)
    if not isinstance(mixtures, list) or layers is None or not isinstance(step, int) or step < 1:
        return
    if mixtures != [*range(step - 1, layers, step)[: len(mixtures) + 1]]:
        yield f"moe_layers = {mixtures} beside interleave_moe_layer_step = {step}"
