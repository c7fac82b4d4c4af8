"""What a trainer on a CPU allocates, by torch's own record of its allocator."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.tensors import TrainTensors

_MEMORY = "[memory]"
_FORWARD = "gradus.forward"
_LAYER = "gradus.layer"
_BACK = "gradus.back"


@dataclass(frozen=True)
class Held:
    """Bytes beside what was there before."""

    kept: int
    """At the end of a forward."""
    peak: int
    """At most, over forward and backward."""


def held(policy: PolicyModel, tensors: TrainTensors) -> Held:
    """Of one micro batch, when gradients exist already."""
    with _recorded() as found:
        with record_function(_FORWARD):
            scores = policy(tensors)
        (scores.logprobs.sum() + scores.entropies.sum()).backward()
    events = found.profiler.kineto_results.events()
    (forward,) = (it for it in events if it.name() == _FORWARD)
    now = kept = peak = 0
    for time, size in _changes(events):
        now += size
        peak = max(peak, now)
        kept = now if time <= _end(forward) else kept
    return Held(kept, peak)


def held_by_layer(
    policy: PolicyModel, layers: Sequence[torch.nn.Module], tensors: TrainTensors
) -> list[Held]:
    """Of each layer, beside what those before it keep, and without the gradients of its weights,
    of which each is as large as the weight."""
    for weight in policy.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    with ExitStack() as stack:
        for layer in layers:
            _record(layer, stack)
        with _recorded() as found:
            policy(tensors).logprobs.sum().backward()
    events = found.profiler.kineto_results.events()
    changes = _changes(events)
    starts, backs = (
        sorted((it for it in events if it.name() == name), key=lambda it: it.start_ns())
        for name in (_LAYER, _BACK)
    )
    ends = [*(it.start_ns() for it in backs[1:]), changes[-1][0]]
    answer = []
    for layer, forward, back, end in zip(layers, starts, backs[::-1], ends[::-1], strict=True):
        sizes = {it.nbytes for it in layer.parameters()}
        before = sum(n for time, n in changes if time < forward.start_ns())
        kept = sum(n for time, n in changes if forward.start_ns() <= time <= _end(forward))
        now = sum(n for time, n in changes if time < back.start_ns()) - before
        peak = now
        for time, size in changes:
            if back.start_ns() <= time < end and abs(size) not in sizes:
                now += size
                peak = max(peak, now)
        answer.append(Held(kept, peak))
    return answer


@contextmanager
def _recorded() -> Iterator[profile]:
    """Without what Python happens to free of things before."""
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            yield found
    finally:
        gc.enable()


def _record(layer: torch.nn.Module, stack: ExitStack) -> None:
    open_ranges: list[Any] = []

    def begin(*_: Any) -> None:
        open_ranges.append(record_function(_LAYER))
        open_ranges[-1].__enter__()

    def end(_: Any, __: Any, output: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)
        (output[0] if isinstance(output, tuple) else output).register_hook(back)

    def back(_: torch.Tensor) -> None:
        with record_function(_BACK):
            pass

    stack.callback(layer.register_forward_pre_hook(begin).remove)
    stack.callback(layer.register_forward_hook(end).remove)


def _changes(events: Any) -> list[tuple[int, int]]:
    found = [(it.start_ns(), it.nbytes()) for it in events if it.name() == _MEMORY]
    return sorted(found, key=lambda it: it[0])


def _end(event: Any) -> int:
    return int(event.start_ns() + event.duration_ns())
