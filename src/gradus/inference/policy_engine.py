"""vLLM's engine as gradus runs it: salted by version, counted, changed in one place."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
from fastapi import HTTPException
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from gradus.inference.engine.scheduler import TOKENS_ONLY_PREFIX
from gradus.inference.weights_check import ADAPTER_CONFIG
from gradus.log import note_step
from gradus.weights.rendezvous import Backend
from gradus.wire.inference import EngineStatus, behind


class EngineCounters(StatLoggerBase):
    """The latest load of the engine and counters since its start; written by vLLM each step."""

    def __init__(self, *_: Any) -> None:
        self.num_steps = 0
        """Grows while the engine computes, also for what is not counted below."""
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.asked_again = 0
        self.kv_capacity_tokens = 0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        *_: Any,
        **__: Any,
    ) -> None:
        """Called by vLLM after each engine step."""
        self.num_steps += 1
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self.waiting = (
                scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            )
            self.kv_usage = scheduler_stats.kv_cache_usage
            prefix = scheduler_stats.prefix_cache_stats
            if prefix is not None:
                self.prefix_queries += prefix.queries
                self.prefix_hits += prefix.hits
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
            self.prompt_tokens += iteration_stats.num_prompt_tokens
            self.generated_tokens += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def status(self, *, version: int, term: int, is_paused: bool) -> EngineStatus:
        counted = {k: it for k, it in vars(self).items() if k in EngineStatus.__struct_fields__}
        return EngineStatus(version=version, term=term, is_paused=is_paused, **counted)


class PolicyEngine(AsyncLLM):
    """AsyncLLM that never mixes prefix caches of two versions.

    Blocks computed by older weights stay in the prefix cache after a weight change. Clients salt
    their requests by version; a request without a salt gets the one of the version served now.
    """

    served_version = 0
    adapter: LoRARequest | None = None
    """The adapter of every request; None where whole weights are served."""

    @property
    def own_salt(self) -> str:
        return f"served-v{self.served_version}"

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As AsyncLLM.generate, with a cache salt and the served adapter on every request; 503 for
        the salt of a version that is not served yet."""
        salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
        if refusal := behind(salt, self.served_version):
            raise HTTPException(503, refusal)
        if isinstance(prompt, dict) and not prompt.get("cache_salt"):
            prompt = {**prompt, "cache_salt": self.own_salt}
        if request_id.startswith(TOKENS_ONLY_PREFIX) and not sampling_params.stop:
            sampling_params.detokenize = False
        if self.adapter is not None:
            options["lora_request"] = self.adapter
        async for output in super().generate(prompt, sampling_params, request_id, **options):
            yield output


def kv_capacity_tokens(cache_config: Any) -> int:
    """Tokens that the KV cache of a started engine holds, all data-parallel ranks together."""
    return int((cache_config.num_gpu_blocks or 0) * cache_config.block_size)


class VllmControl:
    """`EngineControl` over a running PolicyEngine.

    Pausing keeps running requests with their KV cache (mode "keep", nothing cleared): they continue
    after the change from where they were. Clearing would recompute every running prefix under the
    new weights at each change; the sampling logprobs are what the engine sampled with either way.
    """

    def __init__(self, engine: PolicyEngine, *, backend: Backend = "gloo") -> None:
        """`backend` carries weights that are broadcast."""
        self._engine = engine
        self._backend = backend

    async def pause(self) -> None:
        await self._engine.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        await self._engine.resume_generation()

    async def sleep(self) -> None:
        await self._engine.sleep(level=1, mode="keep")

    async def wake(self) -> None:
        """Bring all of it back; frozen requests are computed again from their tokens."""
        await self._engine.wake_up()

    async def load(self, directory: Path) -> None:
        """Load on every worker; the workers must agree on the number of tensors."""
        counts = await self._engine.collective_rpc(
            "gradus_load", args=(str(directory), self._backend)
        )
        if len(set(counts)) != 1 or counts[0] == 0:
            raise RuntimeError(f"workers loaded {counts} tensors from {directory}")
        # Workers have thrown away what their tower made of images; the scheduler counts on it.
        await self._engine.reset_encoder_cache()

    async def set_version(self, version: int) -> None:
        """Stored in the engine's process, with the weights."""
        await self._engine.update_weight_version(str(version))
        self._engine.served_version = version
        note_step(version)

    async def get_version(self) -> int:
        return int(await self._engine.get_weight_version())


ADAPTER_ID = 1
"""Of the only adapter slot; each version replaces what is in it, under a new name."""


class AdapterControl(VllmControl):
    """`EngineControl` whose versions are adapters on the base model, which never changes.

    Each version has a new name and the same slot: vLLM's prefix cache is keyed by the name, and
    running requests continue with the new adapter, as they do with whole weights.
    """

    async def load(self, directory: Path) -> None:
        """Put the adapter in `directory` into the slot; a directory without one means zero."""
        has_adapter = (directory / ADAPTER_CONFIG).is_file()
        request = LoRARequest(
            lora_name=f"policy-{directory.name}", lora_int_id=ADAPTER_ID, lora_path=str(directory)
        )
        if has_adapter:
            # A copy: the flag would make each running request load the adapter again.
            await self._engine.add_lora(msgspec.structs.replace(request, load_inplace=True))
        else:
            await self._engine.collective_rpc("gradus_zero_adapter", args=(ADAPTER_ID,))
        counts = await self._engine.collective_rpc("gradus_adapted_layers", args=(ADAPTER_ID,))
        if len(set(counts)) != 1 or counts[0] == 0:
            raise RuntimeError(f"workers adapted {counts} layers from {directory}")
        self._engine.adapter = request
