"""From the config to vLLM's engine arguments and to the environment of its processes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradus.config import InferenceProcessConfig
from gradus.errors import ConfigError
from gradus.inference.parsers import Parsers
from gradus.plan.gpus import GIB
from gradus.plan.hardware import (
    carries_state,
    engine_dtype_problem,
    given_dtype,
    has_cpu_engine,
)
from gradus.run.model_files import model_config, reads_images, unused_tower
from gradus.wire.inference import SERVED_MODEL_NAME

WORKER_EXTENSION = "gradus.inference.weight_worker.WeightWorker"
CPU_WORKER = "gradus.inference.engine.worker.AmxWorker"
RECORDS_EXPERTS = "gradus_records_experts"
"""Key of vLLM's `additional_config`: whether a CPU engine tells the experts that routers choose."""
MAX_CPU_KV_CACHE_GIB = 2.0
CPU_KV_CACHE_SHARE = 1 / 8
CPU_BLOCK_TOKENS = 32
MAX_IMAGES = 64
"""Of one prompt."""

LOGGING_CONFIG = Path(__file__).parent / "engine" / "logging.json"
"""What makes each process of vLLM log as ours do; vLLM reads it while it is imported."""

VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM can reserve room; a smaller adapter is padded with zeros."""


def engine_settings(
    config: InferenceProcessConfig, *, available_bytes: int, has_trainer: bool = True
) -> dict[str, Any]:
    """vLLM's arguments by their Python names; `available_bytes` is the free memory of a CPU
    engine, or 0 where the engine runs on a GPU.

    ConfigError for a dtype in which a CPU engine is too far from its trainer.
    """
    own = config.inference
    settings: dict[str, Any] = {
        "model": config.model.name,
        "tokenizer": config.model.tokenizer,
        "served_model_name": [SERVED_MODEL_NAME],
        "trust_remote_code": config.model.trust_remote_code,
        "max_model_len": config.model.max_length_tokens,
        "dtype": given_dtype("inference.dtype", own.dtype),
        "max_num_seqs": own.max_num_seqs,
        "tensor_parallel_size": own.tensor_parallel_size,
        "enforce_eager": own.enforce_eager,
        "seed": config.seed,
        # Sampled logprobs must be those of the distribution that was sampled: after temperature.
        "logprobs_mode": "processed_logprobs",
        # No hidden top_k or temperature from the model's generation_config.json.
        "generation_config": "vllm",
        "enable_scale_out": True,
        "worker_extension_cls": WORKER_EXTENSION,
        "enable_log_requests": False,
        "disable_log_stats": True,
        "disable_fastapi_docs": True,
        "disable_uvicorn_access_log": True,
    }
    if own.gpu_sharing == "turns":
        if available_bytes > 0:
            raise ConfigError(
                "inference.gpu_sharing = 'turns': vLLM's build for CPUs cannot sleep; remove it"
            )
        settings["enable_sleep_mode"] = True
    if available_bytes > 0:
        settings |= _cpu_settings(own.kv_cache_gib, available_bytes // own.replicas)
        settings |= _state_settings(config.model.name)
        if has_trainer and (problem := engine_dtype_problem(config.model.name, own.dtype)):
            raise ConfigError(f"inference.dtype = {problem}")
    else:
        settings["gpu_memory_utilization"] = own.gpu_memory_utilization
    if reads_images(config.model.name):
        settings |= _image_settings()
    if config.tells_experts:
        # vLLM's own way needs its second model runner, which CPUs do not have.
        on_cpu = {"additional_config": {RECORDS_EXPERTS: True}}
        settings |= on_cpu if available_bytes > 0 else {"enable_return_routed_experts": True}
    if config.lora_rank is not None:
        settings |= _adapter_settings(config.lora_rank)
    if taken := sorted(own.owned_args()):
        raise ConfigError(
            f"inference.extra_args: {', '.join(taken)} is set by gradus; remove it there"
        )
    found = model_config(config.model.name)
    return settings | own.extra_args | _config_settings(found, own.extra_args)


@dataclass(frozen=True)
class ServedModel:
    """A model directory, or a model of the hub, as ordinary clients see it."""

    config: InferenceProcessConfig
    name: str
    """In requests and in `/v1/models`."""
    parsers: Parsers
    has_own_length: bool
    """Whether the context is what the model and the memory allow, not what the config says."""
    token: str | None
    """None lets everybody in."""


def serving_settings(model: ServedModel, *, available_bytes: int) -> dict[str, Any]:
    """vLLM's arguments for ordinary clients: the model's own sampling defaults, tools, metrics."""
    settings = engine_settings(model.config, available_bytes=available_bytes, has_trainer=False)
    del settings["logprobs_mode"]
    if model.has_own_length:
        settings["max_model_len"] = -1
    parsers = model.parsers
    return settings | {
        "served_model_name": [model.name],
        "generation_config": "auto",
        "enable_scale_out": False,
        "disable_log_stats": False,
        "enable_auto_tool_choice": parsers.tool is not None,
        "tool_call_parser": parsers.tool,
        "reasoning_parser": parsers.reasoning or "",
        "reasoning_parser_plugin": str(Path(__file__).with_name("compat.py")),
    }


def _adapter_settings(rank: int) -> dict[str, Any]:
    """One slot: a new version replaces the adapter in place, also under running requests."""
    allowed = next(size for size in VLLM_LORA_RANKS if size >= rank)
    return {"enable_lora": True, "max_lora_rank": allowed, "max_loras": 1, "max_cpu_loras": 1}


def _cpu_settings(kv_cache_gib: float | None, available_bytes: int) -> dict[str, Any]:
    """On CPU the memory is shared with the other processes, so the cache gets a modest share.

    Always eager: on two cores compiling the tiny model took most of a minute, needs a C++ compiler
    on the machine, and saved a tenth of the time per token. Prompts are read whole: vLLM 0.31 takes
    back the random number of a prompt that it read in part (`_bookkeeping_sync`), torch's CPU
    generators cannot do that, and the engine ends with the first seeded request that is split.
    Blocks are the smallest that vLLM's fast attention on CPU takes (its default there is 128): only
    whole blocks are shared, and the episodes of a group share their prompt.
    """
    modest_gib = min(MAX_CPU_KV_CACHE_GIB, available_bytes * CPU_KV_CACHE_SHARE / GIB)
    chosen = modest_gib if kv_cache_gib is None else kv_cache_gib
    return {
        "kv_cache_memory_bytes": int(chosen * GIB),
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "block_size": CPU_BLOCK_TOKENS,
        "worker_cls": CPU_WORKER,
    }


def _config_settings(config: Mapping[str, Any], extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out a tower that is not used, and let queries of Llama 4 grow as its config.json says,
    which vLLM asks the length of contexts; beside what the user says."""
    asked: dict[str, dict[str, Any]] = {}
    family = str(config.get("model_type"))
    if architecture := unused_tower(config):
        asked["hf_overrides"] = {"architectures": [architecture]}
    if family == "llama4_text":
        is_tuned = bool(config.get("attn_temperature_tuning", True))
        asked["override_generation_config"] = {"attn_temperature_tuning": is_tuned}
    given = {name: extra_args.get(name, {}) for name in asked}
    return {name: asked[name] | it for name, it in given.items() if isinstance(it, dict)}


def _image_settings() -> dict[str, Any]:
    """Images come inside the request alone: no address that a task's text chose is asked, and no
    file read. Without a list vLLM would fetch from anywhere; `.invalid` names no host (RFC 2606).
    """
    return {
        "allowed_media_domains": ["images.invalid"],
        "allowed_local_media_path": "",
        "limit_mm_per_prompt": {"image": MAX_IMAGES, "video": 0, "audio": 0},
        "media_io_kwargs": {"image": {"image_mode": "RGB"}},
    }


def _state_settings(model: str) -> dict[str, Any]:
    """Of layers that carry state from token to token.

    vLLM keeps states of prefixes only where prompts are read in parts, so the episodes of a group
    each read their prompt.
    """
    return {"enable_prefix_caching": False} if carries_state(model) else {}


CLEARED_VARIABLES = ("VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE")
"""Variables of the caller's shell that must not reach vLLM: gradus has its own tokens and key."""


def is_cpu_build() -> bool:
    """Whether the installed vLLM computes on CPU; ConfigError without one."""
    if (is_cpu := has_cpu_engine()) is None:
        raise ConfigError("vLLM is not installed; install gradus-rl[cpu] or gradus-rl[gpu]")
    return is_cpu


def process_environment(
    config: InferenceProcessConfig, given: Mapping[str, str], *, is_cpu: bool, num_cores: int
) -> dict[str, str]:
    """Environment variables to set before vLLM is imported, here and for its child processes.

    `given` is the environment so far; of the tuning variables, its values win.
    """
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CONFIGURE_LOGGING": "1",
        "VLLM_LOGGING_CONFIG_PATH": str(LOGGING_CONFIG),
        "VLLM_PLUGINS": "",
        "VLLM_SERVER_DEV_MODE": "0",
        "TOKENIZERS_PARALLELISM": "false",
        # torch.distributed and vLLM open sockets without authentication; one node needs no other
        # interface for them than the loopback.
        "GLOO_SOCKET_IFNAME": given.get("GLOO_SOCKET_IFNAME", "lo"),
        "NCCL_SOCKET_IFNAME": given.get("NCCL_SOCKET_IFNAME", "=lo"),
        "VLLM_HOST_IP": given.get("VLLM_HOST_IP", "127.0.0.1"),
    }
    if is_cpu:
        # One core stays free for the server itself, and idle threads sleep instead of spinning:
        # on a small machine the trainer needs the cycles. Compiling vLLM's few small sampler
        # functions would cost the first request ten seconds and needs a C++ compiler.
        tuning = {
            "OMP_NUM_THREADS": str(max(1, num_cores - 1)),
            "OMP_WAIT_POLICY": "PASSIVE",
            "TORCHDYNAMO_DISABLE": "1",
        }
        environment |= {name: given.get(name, value) for name, value in tuning.items()}
    if Path(config.model.name).is_dir():
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return environment | dict(config.inference.env_vars)
