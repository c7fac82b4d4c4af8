"""How the policy is served."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gradus.config.base import StrictConfig


class InferenceConfig(StrictConfig):
    """The vLLM server that gradus starts."""

    dtype: Literal["bfloat16", "float32", "auto"] = "bfloat16"
    """Precision of the served weights."""
    max_num_seqs: int = Field(256, ge=1)
    """Most sequences that the engine runs at once."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """Memory for the KV cache on CPU, in GiB. None means an eighth of the free memory, at most 2;
    on a GPU the cache takes what gpu_memory_utilization leaves."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of GPU memory for the engine."""
    enforce_eager: bool = False
    """Skip graph capture and compilation: starts faster, runs slower. Always so on CPU, where
    compiling takes most of a minute and gains a tenth."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs per replica."""
    host: str = "127.0.0.1"
    """Address to listen on; anything else than loopback is refused without allow_public_bind."""
    port: int = Field(0, ge=0, le=65535)
    """Port to listen on; 0 means the system chooses one."""
    allow_public_bind: bool = False
    """Allow a host that others can reach; every route still needs the run's token."""
    start_timeout_seconds: float = Field(600.0, gt=0)
    """Deadline until the server answers."""
    extra_args: dict[str, Any] = Field(default_factory=dict)
    """Further vLLM engine arguments by their Python name, passed through."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the inference process."""
