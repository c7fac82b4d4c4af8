"""vLLM's worker on CPUs, which asks the kernel for AMX before it computes anything, and tells which
experts its routers chose.

vLLM's attention uses AMX tiles on processors that have them and leaves the asking to oneDNN, whose
kernels only ask when a product is large enough. A process that meets attention first dies by
SIGILL. Must run in every process that computes: permission is passed on by fork, not by exec.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from gradus.inference.engine.experts import StepExperts, records_experts, slots_group
from gradus.inference.engine.kernels import replace_kernels


class AmxWorker(CPUWorker):
    """As vLLM's own; on processors without AMX the asking does nothing.

    Of a run that replays routing, each step's output says what `StepExperts` does. Can go when
    vLLM's `enable_return_routed_experts` works on CPUs.
    """

    _capturer: RoutedExpertsCapturer | None = None
    _step: StepExperts | None = None

    def init_device(self) -> None:
        torch.cpu._init_amx()
        super().init_device()  # type: ignore[no-untyped-call]

    def load_model(self, *args: Any, **options: Any) -> None:
        replace_kernels()
        super().load_model(*args, **options)
        if records_experts(self.vllm_config):
            most_tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
            self._capturer = RoutedExpertsCapturer(most_tokens, self.vllm_config)
            bind_routed_experts_capturer(self.model_runner.get_model(), self._capturer)

    def execute_model(self, scheduler_output: Any) -> Any:
        output = super().execute_model(scheduler_output)
        count = scheduler_output.total_num_scheduled_tokens
        if self._capturer is not None and count:
            runner = self.model_runner
            table = runner.input_batch.block_table[slots_group(runner.kv_cache_config)]
            experts = self._capturer.device_buffer[:count].numpy().astype(np.int16)
            self._step = StepExperts(table.slot_mapping.gpu[:count].numpy().copy(), experts)
        return output

    def sample_tokens(self, *args: Any) -> Any:
        output = super().sample_tokens(*args)
        if self._step is not None and isinstance(output, ModelRunnerOutput):
            self._step.put_into(output)
            self._step = None
        return output
