"""What a trainer on a CPU allocates, by torch's own record of its allocator."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.tensors import TrainTensors

_MEMORY = "[memory]"
_FORWARD = "gradus.forward"


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


@contextmanager
def _recorded() -> Iterator[profile]:
    """Without what Python happens to free of things before."""
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            yield found
    finally:
        gc.enable()


def _changes(events: Any) -> list[tuple[int, int]]:
    found = [(it.start_ns(), it.nbytes()) for it in events if it.name() == _MEMORY]
    return sorted(found, key=lambda it: it[0])


def _end(event: Any) -> int:
    return int(event.start_ns() + event.duration_ns())
