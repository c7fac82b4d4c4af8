"""Whether what is placed on a GPU fits on it: the trainer alone, or the trainer beside the engine.

Computed like the rest of this package, and never compared with a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradus.config.keys import KeyPath
from gradus.config.problems import Problem
from gradus.config.schema.inference import InferenceConfig
from gradus.plan.gpus import GIB, FoundGpus
from gradus.plan.memory.prediction import Footprint, listed
from gradus.plan.placement import Placement

ASLEEP_BYTES = 2 * GIB
"""What a sleeping engine keeps: CUDA's context, its graphs and communicators; a guess."""
_SMALLER = (
    "make the trainer smaller (trainer.micro_batch_tokens, activation_checkpointing and "
    "offload_optimizer of trainer.parallel, trainer.lora), or try with parallel.memory_check = "
    "'warn'"
)


def memory_problems(
    footprint: Footprint,
    inference: InferenceConfig,
    placement: Placement,
    gpus: FoundGpus,
    path: KeyPath,
) -> Iterator[Problem]:
    """GPUs of the trainer that are too small for what they are given, one problem of a kind.

    For a trainer alone on its GPUs only certain shortages count. A GPU whose memory is unknown is
    left to the trainer, which looks again.
    """
    shared = placement.shared()
    for number in placement.gpus.get("trainer", ()):
        gpu = gpus.gpus[number]
        memory, name = gpu.memory_bytes, f"GPU {number} ({gpu.description})"
        if memory is None:
            continue
        if number not in shared and footprint.certain_bytes > memory:
            yield Problem(
                path,
                f"{name} is too small: {listed(footprint.states)} GiB are needed at least; use "
                "more processes, or offload_optimizer, lora or a smaller model",
            )
            return
        if number in shared:
            problem = _sharing_problem(footprint, inference, memory, name)
            if problem is not None:
                yield problem
                return


def _sharing_problem(
    footprint: Footprint, inference: InferenceConfig, memory: int, name: str
) -> Problem | None:
    """Why engine and trainer do not fit on one GPU together."""
    share, sharing = inference.gpu_memory_utilization, inference.gpu_sharing
    engine, learning = int(share * memory), footprint.device_bytes
    if sharing == "turns":
        if learning + ASLEEP_BYTES > memory:
            return Problem(
                ("inference", "gpu_sharing"),
                f"'turns': {name} cannot hold a step: the trainer takes {learning / GIB:.1f} GiB "
                f"at most and the sleeping engine {ASLEEP_BYTES / GIB:.1f}; {_SMALLER}",
            )
        learning = resting_bytes(footprint)
    if engine + learning <= memory:
        return None
    left = max(0.0, 1 - learning / memory)
    advice = f"lower inference.gpu_memory_utilization to {int(100 * left) / 100:g}, or {_SMALLER}"
    if left < 0.1:
        advice = f"the trainer leaves the engine no room; {_SMALLER}"
    when = "between steps" if sharing == "turns" else "at most"
    return Problem(
        ("inference", "gpu_sharing"),
        f"{sharing!r}: {name} cannot hold both: the engine takes {engine / GIB:.1f} GiB "
        f"(gpu_memory_utilization = {share:g}) and the trainer {learning / GIB:.1f} GiB {when}; "
        f"{advice}",
    )


def resting_bytes(footprint: Footprint) -> int:
    """What a trainer keeps on its GPU between steps: gradients and all that a step works with are
    given back, masters and moments stay unless they lie in main memory."""
    kept = {**footprint.states, **footprint.working}
    return sum(kept.get(name, 0) for name in ("weights", "reference", "optimizer", "libraries"))
