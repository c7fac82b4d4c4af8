"""What a trainer's rank holds at least, in bytes by part, computed before anything is loaded.

The numbers of parameters in the headers of a model's files decide the weights, their gradients,
the optimizer's state and a version being published. Those are exact. Activations are not computed:
the first step at full size shows what they take (`gradus check`).
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gradus.config.keys import KeyPath
from gradus.config.problems import Problem
from gradus.config.schema.inference import InferenceConfig
from gradus.config.schema.learning import SgdConfig
from gradus.config.schema.sft import SftConfig
from gradus.config.schema.trainer import TrainerConfig
from gradus.plan.gpus import GIB, FoundGpus
from gradus.plan.placement import Placement
from gradus.run.model_files import json_table

_MASTER = 4
"""Bytes of a float32 number: masters, gradients, moments."""
_PROCESS_ON_HOST = 5 * GIB // 8
"""A process that has imported torch and transformers: 0.6 GiB here."""
_REMEDIES = (
    "more num_processes, lora, parallel.offload_optimizer, parallel.gradient_sync = 'each', or a "
    "smaller model"
)
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.\d+\.")
"""Where the number of a decoder layer stands in a tensor's name."""
_TOWER = re.compile(r"(?:^|\.)(?:visual|vision_tower|audio_tower|embed_vision|embed_audio)\.")
"""What makes embeddings of images or of sound."""
_SOUND = re.compile(r"(?:^|\.)(?:audio_tower|embed_audio)\.")
_LARGEST_HEADER_BYTES = 100 * 2**20
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Linear layers that get no adapter unless they are named."""
_STACKS = frozenset({"input_linear", "output_linear"})
"""What the files of some call their stacked experts."""
_NONSENSE = (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError)
"""What damaged files raise."""

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a causal language model that its memory follows from."""

    num_parameters: int
    """All, a tied head counted once."""
    num_tower_parameters: int
    """Of what makes embeddings of images or of sounds; no decoder layer has any of them."""
    num_sound_parameters: int
    """Of those, what is for sounds and never trained."""
    num_expert_parameters: int
    """Of the experts of all layers; shared ones are none."""
    adapted: Mapping[str, int]
    """Of the linear layers in decoder layers, by the last part of their names, and of `experts`:
    the sum of inputs and outputs, which times the rank is the size of their adapters."""

    def num_adapter_parameters(self, rank: int, targets: Sequence[str] | None) -> int:
        """Of adapters beside the layers named, or beside all of attention and MLP."""
        names = self.adapted.keys() - _ROUTERS - {"experts"} if targets is None else targets
        return rank * sum(self.adapted.get(name, 0) for name in names)


def read_model_shape(folder: Path) -> ModelShape | None:
    """The shape of the model in a folder; None when its safetensors files are not all here, or say
    nonsense."""
    try:
        tensors = dict(_tensors(folder))
        is_tied = bool(json_table(folder / "config.json").get("tie_word_embeddings"))
        return shape_of(tensors, is_tied=is_tied) if tensors else None
    except _NONSENSE:
        return None


def shape_of(tensors: Shapes, *, is_tied: bool) -> ModelShape:
    sizes = {name: math.prod(shape) for name, shape in tensors.items()}
    if is_tied:
        sizes.pop("lm_head.weight", None)
    experts, adapted = 0, defaultdict[str, int](int)
    for name, shape in tensors.items():
        if _TOWER.search(name) or not _LAYER.search(name):
            continue
        owner, leaf = ("", "", *name.removesuffix(".weight").split("."))[-2:]
        if ".experts." in name or leaf in _STACKS:
            experts += sizes[name]
        if size := _expert_factors(name, shape, tensors):
            adapted["experts"] += size
        elif len(shape) == 2 and name.endswith(".weight") and ".experts." not in name:
            adapted[owner if owner in _ROUTERS else leaf] += sum(shape)
    return ModelShape(
        num_parameters=sum(sizes.values()),
        num_tower_parameters=sum(size for name, size in sizes.items() if _TOWER.search(name)),
        num_sound_parameters=sum(size for name, size in sizes.items() if _SOUND.search(name)),
        num_expert_parameters=experts,
        adapted=dict(adapted),
    )


def _expert_factors(name: str, shape: Sequence[int], tensors: Shapes) -> int:
    """Inputs and outputs of the experts in a tensor, which holds those of one or a stack of all."""
    head, _, leaf = name.removesuffix(".weight").rpartition(".")
    if len(shape) == 3 and (".experts." in name or leaf in _STACKS):
        return shape[0] * (shape[1] + shape[2])
    if len(shape) != 2 or ".experts." not in name or leaf.endswith("bias"):
        return 0
    # What comes before the activation is one stack, read by one factor.
    gate = {"up_proj": "gate_proj", "w3": "w1"}.get(leaf)
    is_second = f"{head}.{gate}.weight" in tensors
    return shape[0] if is_second else sum(shape)


def stored_experts(folder: Path) -> Sequence[int]:
    """The shape of a stack of `down_proj` of experts in a folder's files; empty without one."""
    with suppress(*_NONSENSE):
        shapes = (it for name, it in _tensors(folder) if name.endswith("experts.down_proj"))
        return next(shapes, ())
    return ()


def _tensors(folder: Path) -> Iterator[tuple[str, Sequence[int]]]:
    """Name and shape of every tensor that is loaded from a folder; no tensor is read."""
    for path in _weight_files(folder):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _LARGEST_HEADER_BYTES:
                raise ValueError(f"{path}: its header cannot be {size} bytes long")
            header = json.loads(file.read(size))
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, entry["shape"]


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that are loaded; others, in the names of other tools, may hold the
    same weights again. None while some of them are not here yet."""
    index = folder / "model.safetensors.index.json"
    whole = folder / "model.safetensors"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    files = [
        folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    ]
    return files if all(path.is_file() for path in files) else []


@dataclass(frozen=True)
class Footprint:
    """What one rank holds at least, in bytes."""

    device: Mapping[str, int]
    """Where the trainer computes; on CPUs that is main memory."""
    host: Mapping[str, int]
    """In main memory besides."""
    on_gpu: bool

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values()) if self.on_gpu else 0

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values()) + (0 if self.on_gpu else sum(self.device.values()))

    def misfit(self, usable_bytes: int, *, ranks: int = 1) -> str:
        """Why `ranks` of this size do not fit into so much memory: that of one GPU, or the main
        memory of a machine for trainers on CPUs; empty where that is not certain."""
        needed = ranks * (self.device_bytes if self.on_gpu else self.host_bytes)
        if needed <= usable_bytes:
            return ""
        kind = "the GPU" if self.on_gpu else "the main memory"
        each = "" if ranks == 1 else f" for each of {ranks} ranks"
        return (
            f"training needs at least {needed / GIB:.1f} GiB of {kind}, of which "
            f"{usable_bytes / GIB:.1f} GiB can be used ({_listed(self.device)}{each}). "
            f"What lowers it: {_REMEDIES}"
        )

    def __str__(self) -> str:
        if not self.on_gpu:
            return f"host {self.host_bytes / GIB:.1f} GiB: {_listed({**self.device, **self.host})}"
        on_host = f"host {self.host_bytes / GIB:.1f} GiB: {_listed(self.host)}"
        return f"device {self.device_bytes / GIB:.1f} GiB: {_listed(self.device)}; {on_host}"


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)


def footprint_of(
    shape: ModelShape,
    settings: TrainerConfig | SftConfig,
    *,
    on_gpu: bool,
    keeps_reference: bool = False,
) -> Footprint:
    """What one rank of this trainer holds before its first step, and what a step adds for certain.

    `keeps_reference` says that the initial weights stay, which adapters have beneath them anyway.
    """
    lora, parallel, total = settings.lora, settings.parallel, shape.num_parameters
    shards = max(1, settings.num_processes // parallel.replicate_size)
    compute = _MASTER if settings.compute_dtype == "float32" else 2
    if lora is not None:
        trained, kept = shape.num_adapter_parameters(lora.rank, lora.target_modules), total
    else:
        tower, sound = shape.num_tower_parameters, shape.num_sound_parameters
        kept = sound if settings.train_vision else tower
        trained = total - kept
    rule, moments = settings.optimizer, 2
    if isinstance(rule, SgdConfig):
        moments = 1 if rule.momentum else 0
    elif rule.type == "muon":
        moments = 1  # Of a matrix; of the others two.
    gradients = _MASTER * trained // shards
    sync = parallel.gradient_sync
    if shards > 1 and (sync == "last" or (sync == "auto" and not on_gpu)):
        # Micro batches are added up before they are shared out.
        experts = 0 if lora is not None else shape.num_expert_parameters
        elsewhere = experts - experts // parallel.expert_parallel_size
        gradients += _MASTER * (trained - elsewhere)
    device = {
        "weights": (_MASTER * trained + compute * kept) // shards,
        "gradients": gradients,
        "optimizer": moments * _MASTER * trained // shards,
    }
    if keeps_reference and lora is None:
        device["reference"] = compute * total // shards
    host = {"process": _PROCESS_ON_HOST}
    if isinstance(settings, TrainerConfig):
        is_small = settings.lora is not None and settings.lora.serve == "adapter"
        host["version being published"] = compute * (trained if is_small else total)
    if parallel.offload_optimizer and on_gpu:
        host |= {f"{name} (offloaded)": size for name, size in device.items()}
        device = {}
    return Footprint(device, host, on_gpu)


def memory_problems(
    footprint: Footprint,
    inference: InferenceConfig,
    placement: Placement,
    gpus: FoundGpus,
    path: KeyPath,
) -> Iterator[Problem]:
    """A GPU of the trainer that cannot hold what is certain, beside the engine where both share it.

    A GPU whose memory is unknown is left to the trainer, which looks again.
    """
    for number in placement.gpus.get("trainer", ()):
        gpu = gpus.gpus[number]
        memory, name = gpu.memory_bytes, f"GPU {number} ({gpu.description})"
        if memory is None:
            continue
        if misfit := footprint.misfit(memory):
            yield Problem(path, f"{name} is too small: {misfit}")
            return
        kept = footprint.device_bytes
        if inference.gpu_sharing == "turns":  # Gradients are given back between steps.
            kept -= footprint.device.get("gradients", 0)
        engine = int(inference.gpu_memory_utilization * memory)
        if number in placement.shared() and engine + kept > memory:
            yield Problem(
                ("inference", "gpu_sharing"),
                f"{inference.gpu_sharing!r}: {name} cannot hold both: the engine takes "
                f"{engine / GIB:.1f} GiB (gpu_memory_utilization = "
                f"{inference.gpu_memory_utilization:g}) and the trainer at least "
                f"{kept / GIB:.1f} GiB; lower inference.gpu_memory_utilization below "
                f"{math.floor(100 * (1 - kept / memory)) / 100:g}, or what the trainer takes: "
                f"{_REMEDIES}",
            )
            return
