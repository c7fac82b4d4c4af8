"""How tokens are sampled, and the vLLM server that samples them."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field

from gradus.config.owned import OWNED_ENGINE_ARGS
from gradus.config.schema.base import Precision, Seed, StrictConfig

_FURTHER_PARTS = ("pipeline_parallel_size", "data_parallel_size")
"""Keys of `extra_args` that multiply the GPUs of the engine."""


_RESHAPING: dict[str, tuple[object, ...]] = {
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "repetition_penalty": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "min_tokens": (0, None),
    "logit_bias": ({}, None),
    "allowed_token_ids": ([], None),
    "bad_words": ([], None),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
    "watermarking": (True, None),
}
"""Keys of `extra_body` that change which tokens are drawn, with values that do not."""


class SamplingConfig(StrictConfig):
    """Sampling settings of one source; None means the value of the enclosing section."""

    temperature: float | None = Field(None, ge=0)
    """Divides the logits before sampling; the trainer divides by the same number. 0 takes the most
    likely token, which an evaluation may and a source that trains may not."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling; 1 for sources that train, for the trainer computes the whole distribution.
    """
    max_completion_tokens: int | None = Field(None, ge=1)
    """Most tokens of one model turn."""
    extra_body: dict[str, object] = Field(default_factory=dict)
    """Further settings that the engine understands, passed through."""

    @property
    def reshaping(self) -> list[str]:
        """Keys after which tokens are not drawn from the whole distribution at the temperature."""
        found = {
            key: it for key, it in self.extra_body.items() if it not in _RESHAPING.get(key, (it,))
        }
        is_cut = self.top_p is not None and self.top_p < 1
        return [*(["top_p"] if is_cut else []), *(f"extra_body.{key}" for key in found)]


class InferenceConfig(StrictConfig):
    """The vLLM server that gradus starts."""

    replicas: int = Field(1, ge=1, le=64)
    """Servers of the policy, each with GPUs of its own or its share of the cores. A worker keeps
    the calls of an episode on one, and moves them when that one ends."""
    addresses: str | None = None
    """Of RL runs alone: a file with the address of one inference server on each line,
    `http://10.0.0.7:8000`, which others start and end while the run plays; it may change at any
    time. The run starts none itself then, and waits while there is none. Read again every
    second."""
    authority: str | None = None
    """Of RL runs alone: a file (PEM) with the certificates of who signs those of the servers in
    addresses, which all begin with https:// then; None trusts those that the system trusts."""
    dtype: Precision = "auto"
    """Precision of the served weights. "auto" is that of the trainer where one is written, else
    bfloat16 on GPUs and on CPUs that multiply it, float32 on others."""
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
    gpus: list[int] | None = None
    """GPUs of the engine, counted from 0 in the order of nvidia-smi or of the shell's
    CUDA_VISIBLE_DEVICES; of replicas, those of the first come first. None means the first ones, as
    many as are needed."""
    gpu_sharing: Literal["never", "memory", "turns"] = "never"
    """Whether the trainer may have GPUs of the engine: with `memory` both stay on them, and what
    both need must fit; with `turns` the engine sleeps while the trainer learns."""
    host: str = "127.0.0.1"
    """Address to listen on; anything else than loopback is refused without allow_public_bind."""
    port: int = Field(0, ge=0, le=65535)
    """Port to listen on; 0 means the system chooses one. Replicas count up from it."""
    allow_public_bind: bool = False
    """Allow a host that others can reach; every route still needs the run's token."""
    extra_args: dict[str, Any] = Field(default_factory=dict)
    """Further vLLM engine arguments by their Python name, passed through."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the inference process."""

    @property
    def processes(self) -> tuple[str, ...]:
        """Names of the servers that the run starts."""
        if self.addresses is not None:
            return ()
        if self.replicas == 1:
            return ("inference",)
        return tuple(f"inference_{number}" for number in range(self.replicas))

    def owned_args(self) -> dict[str, str]:
        """Those of `extra_args` that have another owner, and what to write instead."""
        owners = {name: OWNED_ENGINE_ARGS.get(name.replace("-", "_")) for name in self.extra_args}
        return {name: owner for name, owner in owners.items() if owner is not None}

    @property
    def num_gpus(self) -> int:
        """GPUs that vLLM's processes of one server take, one each."""
        parts = [self.extra_args.get(name, 1) for name in _FURTHER_PARTS]
        further = [part for part in parts if isinstance(part, int)]
        return math.prod([self.tensor_parallel_size, *further])

    @property
    def num_gpus_key(self) -> str:
        """The keys that `num_gpus` comes from."""
        has_more = any(name in self.extra_args for name in _FURTHER_PARTS)
        size = "inference.tensor_parallel_size"
        size = f"{size} x {' x '.join(_FURTHER_PARTS)}" if has_more else size
        return size if self.replicas == 1 else f"inference.replicas x {size}"


class ServeConfig(StrictConfig):
    """One model behind an OpenAI-compatible server, for ordinary clients."""

    model: str
    """A Hugging Face model directory, its name on the hub, a run, or one of its checkpoints."""
    name: str | None = Field(None, min_length=1)
    """The model's name in requests and in `/v1/models`. None means that of the folder or run."""
    tokenizer: str | None = None
    """Path or name of the tokenizer. None means that of the model."""
    trust_remote_code: bool = False
    """Run Python code that the model directory ships: of a folder on this disk, which no push to
    the hub changes. Off unless you trust its author."""
    max_length_tokens: int | None = Field(None, ge=8)
    """Longest prompt plus reply, in tokens. None means what the model and the memory allow."""
    tool_parser: str | None = "auto"
    """vLLM's parser of tool calls. "auto" goes by the model; None leaves them in the text."""
    reasoning_parser: str | None = "auto"
    """vLLM's parser of reasoning. "auto" goes by the model; None leaves it in the text."""
    seed: Seed = 0
    """Seed of the engine."""
    inference: InferenceConfig = InferenceConfig()
    """The server: host, port (0: the system chooses), memory, further engine arguments."""
