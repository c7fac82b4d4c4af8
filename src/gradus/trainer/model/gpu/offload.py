"""What a recomputed layer keeps, its input, waits in CPU memory for its way back.

With `activation_checkpointing = "full"` a layer keeps its hidden states and nothing else, so there
is one copy out and one copy in for each layer. The copy out runs beside the next layer's forward;
the copy in comes before the layer is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_LEAST_ELEMENTS = 1 << 16
"""Smaller tensors are not worth a transfer."""


class _Waiting(NamedTuple):
    """A tensor in CPU memory, and where it belongs."""

    stored: Tensor
    device: torch.device
    copied: torch.cuda.Event | None
    """Happens when the copy out is done; None where copies are done when they return."""


class InputStore:
    """Moves tensors out of a device's memory and back."""

    def __init__(self, least_elements: int = _LEAST_ELEMENTS) -> None:
        self._least_elements = least_elements
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def put(self, tensor: Tensor) -> Tensor | _Waiting:
        """What autograd keeps of the tensor until backward: its copy, or a small tensor itself."""
        if tensor.numel() < self._least_elements:
            return tensor
        if not tensor.is_cuda:
            return _Waiting(tensor.detach().clone(), tensor.device, None)
        stored = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream = self._stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            stored.copy_(tensor, non_blocking=True)
            copied = stream.record_event()
        # The allocator must not give the memory to another tensor before the copy has read it.
        tensor.record_stream(stream)
        return _Waiting(stored, tensor.device, copied)

    def take(self, kept: Tensor | _Waiting) -> Tensor:
        """The tensor, on its device."""
        if isinstance(kept, Tensor):
            return kept
        if kept.copied is None:
            return kept.stored
        torch.cuda.current_stream(kept.device).wait_event(kept.copied)
        return kept.stored.to(kept.device, non_blocking=True)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def offload_inputs(layers: Sequence[torch.nn.Module], store: InputStore) -> None:
    """Let fully recomputed layers keep their inputs in `store`; goes after `recompute_layers`."""
    for layer in layers:
        layer.forward = partial(_run, layer.forward, store)


def _run(forward: Callable[..., Any], store: InputStore, *arguments: Any, **options: Any) -> Any:
    with saved_tensors_hooks(store.put, store.take):
        return forward(*arguments, **options)
