"""Hugging Face models and tokenizers, by path or name, ready to train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.initialization import meta_device_safe_creation_ops
from transformers.modeling_utils import _get_resolved_checkpoint_files
from transformers.utils.logging import disable_progress_bar

from gradus import tokenizing
from gradus.config import ModelConfig
from gradus.errors import ConfigError, CorruptStateError
from gradus.log import get_logger
from gradus.plan.hardware import has_tower
from gradus.run.model_files import quantised_problem
from gradus.trainer.images.tower import packed_attention_of
from gradus.trainer.model.cpu.states import separate_states, state_mixers
from gradus.trainer.model.experts.llama4 import is_llama4, read_in_chunks
from gradus.trainer.model.experts.products import EXPERTS_NAME, expert_modules
from gradus.trainer.model.gpu.flash import choose_flash_attention
from gradus.trainer.model.kernels import Platform
from gradus.trainer.model.layers import decoder_layers
from gradus.trainer.model.stored import StoredWeights

logger = get_logger(__name__)

_LEARNED_POSITIONS = frozenset({"wpe", "embed_positions", "position_embeddings"})
"""Names of embeddings with a row for each position."""
_SEPARATE_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers for which `packed_attention` does all that mixes tokens."""


@dataclass(frozen=True)
class ModelOutline:
    """A model whose parameters take no memory yet, and where their values are stored."""

    model: PreTrainedModel
    """Parameters on the meta device, buffers that no file holds computed; or all of it whole."""
    stored: StoredWeights | None
    """None when the model is whole."""

    @torch.no_grad()
    def fill(
        self, owner: torch.nn.Module, device: torch.device, *, frozen_only: bool = False
    ) -> None:
        """Give the parameters of `owner`, which holds the model, memory on `device`, and this
        rank's part of the stored values.

        With `frozen_only` what is trained becomes NaN until a checkpoint is read into it.
        """
        if self.stored is None:
            return
        _leave_meta(owner, device)
        self.stored.fill(self.model, frozen_only=frozen_only)


def outline_model(config: ModelConfig, device: torch.device) -> ModelOutline:
    """The model that `config` names, for packed attention on `device`, refused with ConfigError
    when packing would change it or there is none.

    Only names and shapes are read. A model that is not stored as plain safetensors files is loaded
    whole, in float32 in CPU memory.
    """
    # Logs are read line by line; a bar that rewrites its line does not belong there.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        outline = _outlined(config)
    except SafetensorError as error:
        raise CorruptStateError(
            f"model {config.name!r}: its weights are damaged ({error}); fetch it again"
        ) from error
    except (OSError, ValueError, StrictDataclassError) as error:
        said = " ".join(str(error).split("\n\n")[0].split())
        raise ConfigError(f"model {config.name!r} cannot be loaded: {said}") from error
    model = outline.model
    if not getattr(model, "_supports_attention_backend", False) and not state_mixers(model):
        raise ConfigError(
            f"model {config.name!r} ({type(model).__name__}) does not take its attention from "
            "transformers' registry, which packing needs; use another model"
        )
    refuse_leaking_layers(model)
    refuse_changing_positions(model, config.max_length_tokens)
    refuse_missing_positions(model, config.max_length_tokens)
    separate_states(decoder_layers(model))
    if expert_modules(model):
        model.set_experts_implementation(EXPERTS_NAME)
    choose_flash_attention(Platform.of(device))
    # Without dropout: the trained distribution must be the sampled one.
    model.train(False)
    return outline


def load_model(config: ModelConfig, device: torch.device) -> PreTrainedModel:
    """The whole model in float32 in CPU memory, with packed attention for `device`."""
    outline = outline_model(config, device)
    outline.fill(outline.model, torch.device("cpu"))
    return outline.model


def refuse_leaking_layers(model: PreTrainedModel) -> None:
    """Only attention keeps the samples of a packed row apart, and mixers that read each alone."""
    if state_mixers(model):
        return
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    known = _SEPARATE_LAYERS | ({"chunked_attention"} if is_llama4(model) else set())
    leaking = sorted(set(kinds) - known)
    if leaking:
        raise ConfigError(
            f"model {model.config.name_or_path!r} has layers of the kind {leaking[0]!r}, which "
            "would carry state from one packed sample into the next; use another model"
        )


def refuse_changing_positions(model: PreTrainedModel, max_length_tokens: int) -> None:
    """Some position encodings change beyond a length; the longest sample of a packed row would
    change them for all."""
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    # Flat, or one for each kind of layer.
    for rope in [parameters] if "rope_type" in parameters else parameters.values():
        kind = rope.get("rope_type", "default")
        if "dynamic" not in kind and kind != "longrope":
            continue
        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if max_length_tokens > limit:
            raise ConfigError(
                f"model {model.config.name_or_path!r} has {kind!r} positions, which change beyond "
                f"{limit} tokens and cannot be packed there; lower model.max_length_tokens = "
                f"{max_length_tokens} to {limit} or less"
            )


def refuse_missing_positions(model: PreTrainedModel, max_length_tokens: int) -> None:
    """Learned positions end somewhere; a longer sample would fail in the middle of a run."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if limit is not None and max_length_tokens > limit and names & _LEARNED_POSITIONS:
        raise ConfigError(
            f"model {model.config.name_or_path!r} has learned {limit} positions; lower "
            f"model.max_length_tokens = {max_length_tokens} to {limit} or less"
        )


def _outlined(config: ModelConfig) -> ModelOutline:
    name, trusted = config.name, config.trust_remote_code
    settings: Any = AutoConfig.from_pretrained(name, trust_remote_code=trusted)
    if found := quantised_problem({"quantization_config": _quantised(settings)}):
        raise ConfigError(f"model {name!r} ({settings.model_type}): {found}")
    files, _ = _get_resolved_checkpoint_files(
        name,
        variant=None,
        gguf_file=None,
        use_safetensors=None,
        user_agent=None,
        is_remote_code=False,
        transformers_explicit_filename=getattr(settings, "transformers_weights", None),
    )
    reason = _reason_for_whole(name, files or ())
    if reason is not None:
        return _whole(config, settings, reason)
    with torch.device("meta"), meta_device_safe_creation_ops():
        model = _kind(settings).from_config(
            settings,
            dtype=torch.float32,
            attn_implementation=packed_attention_of(settings),
            trust_remote_code=trusted,
        )
    model.config.name_or_path = name
    read_in_chunks(model)
    _compute_buffers(model)
    stored = StoredWeights.open(model, files or ())
    if stored.holds_untied(model):
        reason = "its files hold two values for tensors that its config.json ties"
        return _whole(config, settings, reason)
    if model.can_generate():
        model.generation_config = _generation_config(name)
    return ModelOutline(model, stored)


def _quantised(settings: Any) -> Any:
    """What the config says of quantisation, of the model or of its part for text."""
    parts = (settings, settings.get_text_config())
    return next((it for part in parts if (it := getattr(part, "quantization_config", None))), None)


def _kind(settings: Any) -> Any:
    """transformers' class that finds the class of a model, with its tower where it reads images."""
    is_both = has_tower(settings.to_dict())
    return AutoModelForImageTextToText if is_both else AutoModelForCausalLM


def _reason_for_whole(name: str, files: Sequence[str]) -> str | None:
    """Why a model cannot be read piece by piece."""
    if not files or not all(str(path).endswith(".safetensors") for path in files):
        return "its weights are not safetensors files"
    if (Path(name) / "adapter_config.json").is_file():
        return "an adapter lies beside it"
    return None


def _generation_config(name: str) -> GenerationConfig:
    """As `from_pretrained` finds it."""
    try:
        return GenerationConfig.from_pretrained(name, _from_auto=True)
    except OSError:
        return GenerationConfig.from_pretrained(
            name, config_file_name="config.json", _from_auto=True, _from_model_config=True
        )


@torch.no_grad()
def _compute_buffers(model: PreTrainedModel) -> None:
    """Fill the buffers that are never saved, on the CPU, by the model's own code."""
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = torch.empty_like(buffer, device="cpu")
    _compute_below(model, model)


def _compute_below(owner: PreTrainedModel, module: torch.nn.Module) -> None:
    """A model inside a model computes its own, and some those of their layers."""
    for child in module.children():
        _compute_below(child if isinstance(child, PreTrainedModel) else owner, child)
    if module._non_persistent_buffers_set or isinstance(module, PreTrainedModel):
        owner._init_weights(module)  # type: ignore[no-untyped-call]


def _leave_meta(owner: torch.nn.Module, device: torch.device) -> None:
    """Memory for every parameter on the meta device, filled with NaN; tied ones stay tied.

    FSDP finds the new parameters at its first forward.
    """
    fresh: dict[int, torch.nn.Parameter] = {}
    for module in owner.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in fresh:
                values = torch.full_like(parameter, float("nan"), device=device)
                fresh[id(parameter)] = torch.nn.Parameter(values, parameter.requires_grad)
            module._parameters[name] = fresh[id(parameter)]


def _whole(config: ModelConfig, settings: Any, reason: str) -> ModelOutline:
    """The model with every tensor from disk; transformers would only warn about a missing one."""
    logger.warning(
        "model %r is loaded whole by every process before it is shared out, because %s; this "
        "needs 4 bytes of main memory for each parameter and process",
        config.name,
        reason,
    )
    loaded: Any = _kind(settings).from_pretrained(
        config.name,
        dtype=torch.float32,
        attn_implementation=packed_attention_of(settings),
        trust_remote_code=config.trust_remote_code,
        output_loading_info=True,
    )
    model: PreTrainedModel = loaded[0]
    read_in_chunks(model)
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise CorruptStateError(
            f"model {config.name!r} lacks {len(missing)} tensors, the first is {missing[0]!r}, "
            "which would start at random; fetch it again"
        )
    return ModelOutline(model, None)


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer of the policy; ConfigError when there is none."""
    name = config.tokenizer or config.name
    try:
        return tokenizing.load_tokenizer(name, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer {name!r} cannot be loaded: {error}") from error
