"""vLLM's worker on CPUs, which asks the kernel for AMX before it computes anything.

vLLM's attention uses AMX tiles on processors that have them and leaves the asking to oneDNN, whose
kernels only ask when a product is large enough. A process that meets attention first dies by
SIGILL. Must run in every process that computes: permission is passed on by fork, not by exec.
"""

from __future__ import annotations

import torch
from vllm.v1.worker.cpu_worker import CPUWorker


class AmxWorker(CPUWorker):
    """As vLLM's own; on processors without AMX the asking does nothing."""

    def init_device(self) -> None:
        torch.cpu._init_amx()
        super().init_device()  # type: ignore[no-untyped-call]
