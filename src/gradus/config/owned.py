"""Keys and environment variables that gradus itself sets, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

OWNED_SAMPLING = {
    "temperature": "write sampling.temperature; the trainer divides by the same number",
    "top_p": "write sampling.top_p",
    "max_tokens": "write sampling.max_completion_tokens",
    "max_completion_tokens": "write sampling.max_completion_tokens",
    "cache_salt": "gradus salts prefix caches with the policy version",
    "logprobs": "gradus always asks for the logprobs of sampled tokens",
    "n": "write group_size",
    "stream": "gradus reads whole replies",
    "seed": "write seed at the top; each episode has one made of it",
}
"""Keys of `sampling.extra_body` that have another owner."""

OWNED_SETTINGS = {
    "id": "write id",
    "taskset": "write taskset",
    "timeout": "write timeout and agent.timeout",
    "retries": "write errors.retries",
    "harness": "write agent.harness",
    "runtime": "write agent.runtime",
    "sampling": "write sampling",
}
"""Keys of an environment's `settings` that have another owner."""

OWNED_ENGINE_ARGS = {
    "model": "write model.name",
    "tokenizer": "write model.tokenizer",
    "trust_remote_code": "write model.trust_remote_code",
    **dict.fromkeys(
        ("revision", "tokenizer_revision", "code_revision"),
        "trainer, engine and renderer read one folder; write model.name as that of the revision",
    ),
    "chat_template": "trainer, engine and renderer use that of model.tokenizer; write it there",
    "skip_tokenizer_init": "gradus needs the engine's tokenizer",
    "max_model_len": "write model.max_length_tokens",
    "served_model_name": "gradus gives the served policy its name",
    "dtype": "write inference.dtype",
    "max_num_seqs": "write inference.max_num_seqs",
    "gpu_memory_utilization": "write inference.gpu_memory_utilization",
    "enforce_eager": "write inference.enforce_eager",
    "enable_chunked_prefill": "a CPU engine cannot split seeded prompts; a GPU engine splits them",
    "block_size": "a CPU engine shares the prompts of a group by it; a GPU engine has its own",
    "tensor_parallel_size": "write inference.tensor_parallel_size",
    "host": "write inference.host",
    "port": "write inference.port",
    "kv_cache_memory_bytes": "write inference.kv_cache_gib",
    "api_key": "gradus guards every route with the run's own tokens",
    "enable_sleep_mode": "write inference.gpu_sharing",
    **dict.fromkeys(
        ("allowed_media_domains", "allowed_local_media_path", "limit_mm_per_prompt"),
        "images come inside the request; nothing that a task names is fetched or read",
    ),
    **dict.fromkeys(
        ("media_io_kwargs", "mm_processor_kwargs"),
        "engine and trainer make pixels by the processor of the model's folder; write it there",
    ),
    "uds": "gradus serves on inference.host and inference.port",
    "enable_scale_out": "gradus needs the routes that it adds",
    "generation_config": "gradus states every sampling value itself",
    "logprobs_mode": "the trainer needs the logprobs of the sampled distribution",
    "worker_cls": "on CPUs it asks the system for AMX",
    "worker_extension_cls": "gradus loads weights with it",
    "seed": "write seed",
    "enable_lora": "write trainer.lora",
    "max_lora_rank": "write trainer.lora.rank",
    "max_loras": "gradus serves one adapter, the newest",
    "max_cpu_loras": "gradus serves one adapter, the newest",
    "enable_return_routed_experts": "write trainer.router_replay",
    "additional_config": "gradus tells its own scheduler and worker there what to record",
    "lora_modules": "gradus serves the adapter that it trains",
}
"""Keys of `inference.extra_args` that have another owner."""

_PLACED = "the keys trainer.gpus and inference.gpus (gpus in a supervised run) choose the GPUs"
RESERVED_EVERYWHERE: Mapping[str, str] = {
    "GRADUS_DEATH_PIPE": "it tells a process that its launcher is gone",
    "GRADUS_LISTENER": "it hands a port to the inference server; use inference.host and port",
    "GRADUS_LOG": "it tells a process how to log; use the keys of [log]",
    "GRADUS_INFERENCE_TOKEN": "each process reads the run's token from the run directory",
}
RESERVED: Mapping[str, Mapping[str, str]] = {
    "trainer": {
        "CUDA_VISIBLE_DEVICES": _PLACED,
        **dict.fromkeys(
            ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
            "torchrun tells each rank its place with it; use num_processes",
        ),
    },
    "inference": {
        "CUDA_VISIBLE_DEVICES": _PLACED,
        "DO_NOT_TRACK": "no process of a run reports its use",
        "TOKENIZERS_PARALLELISM": "tokenizers that fork would wait for each other for ever",
        "VLLM_API_KEY": "every route is guarded by the run's own tokens",
        "VLLM_CONFIGURE_LOGGING": "logs of all processes have one form",
        "VLLM_LOGGING_CONFIG_PATH": "logs of all processes have one form",
        "VLLM_CPU_KVCACHE_SPACE": "use inference.kv_cache_gib",
        "VLLM_NO_USAGE_STATS": "no process of a run reports its use",
        "VLLM_PLUGINS": "gradus chooses the plug-ins that it can serve with",
        "VLLM_SERVER_DEV_MODE": "the routes that it opens stay behind the run's own guard",
    },
    "environment": {},
    "orchestrator": {},
}
"""Role → variable → the reason, which completes "gradus sets it itself: ..."."""


def variables_named_in(verifiers_config: Mapping[str, Any]) -> set[str]:
    """Variables that a verifiers config itself names: keys of other endpoints, forwarded ones."""
    return set(_named_in(verifiers_config))


def _named_in(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for entry in value:
            yield from _named_in(entry)
    if not isinstance(value, Mapping):
        return
    for key, entry in value.items():
        if key == "api_key_var" and isinstance(entry, str):
            yield entry
        elif key == "forward_env" and isinstance(entry, list):
            yield from (name for name in entry if isinstance(name, str))
        elif key == "headers_from_env" and isinstance(entry, Mapping):
            yield from (name for name in entry.values() if isinstance(name, str))
        else:
            yield from _named_in(entry)
