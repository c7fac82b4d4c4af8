"""What gradus adds to vLLM's worker: load a version, and tell which weights are served."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from gradus.errors import ExitCode
from gradus.inference.engine.reloading import (
    copy_convolutions_again,
    pack_heads_again,
    whole_reload,
)
from gradus.inference.weights_check import iterate_tensors
from gradus.processes.child import show_stacks
from gradus.weights.receiver import StreamReceiver
from gradus.weights.rendezvous import Backend
from gradus.weights.stream import is_stream

_CPU_EXPERTS = "CPUUnquantizedExperts"


class WeightWorker:
    """Mixed into vLLM's worker class by `worker_extension_cls`; called through `collective_rpc`.

    Results cross a process as msgpack, so they are made of dicts, lists, strings and numbers.
    """

    model_runner: Any
    rank: int
    device: torch.device
    receiver: StreamReceiver | None = None

    def gradus_load(self, directory: str, backend: Backend = "gloo") -> int:
        """Replace every parameter by the tensors of a version; returns their number.

        The directory was verified, byte by byte, before the engine was paused. A stream is received
        from the trainer over `backend`, each tensor checked when it arrives.
        """
        version = Path(directory)
        if is_stream(version):
            self.receiver = self.receiver or StreamReceiver(self.rank, self.device, backend=backend)
            counted = _Counted(self.receiver.receive(version))
        else:
            counted = _Counted(iterate_tensors(version))
        model = self.model_runner.get_model()
        with whole_reload(model):
            self.model_runner.reload_weights(weights_iterator=counted)
        pack_experts_again(model)
        pack_heads_again(model)
        copy_convolutions_again(model)
        return counted.number

    def gradus_zero_adapter(self, adapter_id: int) -> None:
        """Put an adapter that changes nothing into the slot, as version 0 is the base model."""
        manager = self.model_runner.lora_manager
        manager.remove_adapter(adapter_id)
        zero = manager._adapter_manager.create_dummy_lora(adapter_id, 1, manager.embedding_modules)
        manager._adapter_manager.add_adapter(zero)
        manager._adapter_manager.activate_adapter(adapter_id)

    def gradus_adapted_layers(self, adapter_id: int) -> int:
        """Number of layers that the adapter in the slot changes; 0 when the slot is empty."""
        adapter = self.model_runner.lora_manager._adapter_manager.get_adapter(adapter_id)
        return 0 if adapter is None else len(adapter.loras)

    def gradus_served_tensors(self) -> dict[str, dict[str, Any]]:
        """Shape, dtype and SHA-256 of every tensor that this rank computes with."""
        model = self.model_runner.get_model()
        return {name: _describe(tensor) for name, tensor in served_tensors(model)}

    def gradus_die_with_parent(self) -> int:
        """End this process when the process that started it ends, however that happens; and show
        its stacks when it hangs."""
        show_stacks()
        parent = multiprocessing.parent_process()
        if parent is not None:
            sentinel = parent.sentinel
            threading.Thread(
                target=_exit_after, args=(sentinel,), name="gradus-parent-watch", daemon=True
            ).start()
        return os.getpid()


def pack_experts_again(model: torch.nn.Module) -> int:
    """Bring reloaded experts into the format of vLLM's CPU kernel; how many layers that were.

    vLLM 0.31 packs experts for the CPU when it loads a model and not when it reloads one
    (`UnquantizedFusedMoEMethod._setup_kernel` leaves `process_weights_after_loading` out of
    weight updates), so that its kernel would read plain weights as packed ones. Must go when vLLM
    packs them itself: twice would be wrong again, and the end-to-end test of a mixture of experts
    would show it.
    """
    num_layers = 0
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if experts is not None and any(
            kind.__name__ == _CPU_EXPERTS for kind in type(experts).__mro__
        ):
            experts.process_weights_after_loading(layer)
            num_layers += 1
    return num_layers


class _Counted:
    """Counts what passes through an iterator."""

    def __init__(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors
        self.number = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in self._tensors:
            self.number += 1
            yield pair


@torch.no_grad()
def served_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that the model computes with, under vLLM's (fused) names.

    On CPU vLLM packs the weight of a linear layer into its kernel's own format and empties the
    parameter; multiplying the identity gives the weight back exactly (but for the sign of a zero).
    Where a parameter stays beside the packed copy (`lm_head`), the copy is told as
    `<module>.packed_weight`. The slots of adapters are `<module>.lora_a_stacked.<n>` and `lora_b`.
    """
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.numel() > 0:
                yield f"{module_name}.{name}", parameter
        for name in ("lora_a_stacked", "lora_b_stacked"):
            for number, slot in enumerate(getattr(module, name, ())):
                yield f"{module_name}.{name}.{number}", slot
        if hasattr(module, "cpu_linear"):
            is_emptied = module.weight.numel() == 0
            suffix = "weight" if is_emptied else "packed_weight"
            yield f"{module_name}.{suffix}", _unpack(module)


def _unpack(module: Any) -> torch.Tensor:
    # [K, K] @ [K, N] -> [K, N]; each output is one product plus zeros, so nothing is rounded.
    width = getattr(module, "input_size_per_partition", None) or module.embedding_dim
    identity = torch.eye(width, dtype=module.weight.dtype)
    product: torch.Tensor = module.cpu_linear(identity, module.weight, None)
    return product.t().contiguous()


def _describe(tensor: torch.Tensor) -> dict[str, Any]:
    raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "sha256": hashlib.sha256(raw).hexdigest(),
    }


def _exit_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(ExitCode.TRY_AGAIN)
