"""Everything that a restart of the trainer would lose, as tensors and a few numbers.

Weights and moments are float32 masters, saved as they are; learning rates follow from the step and
the config. Frozen weights are not saved: they come from the model that the config names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from gradus.errors import ConfigError, CorruptStateError
from gradus.files import DurableFiles
from gradus.log import get_logger
from gradus.trainer.checkpoint.shards import (
    Piece,
    ShardReader,
    num_bytes,
    open_shards,
    own_pieces,
    write_shard,
)
from gradus.trainer.distributed import World
from gradus.trainer.model.cpu.routing import is_bias, routing_biases
from gradus.trainer.model.lora import adapted_layers
from gradus.trainer.model.shard import release_gathered
from gradus.trainer.optimizer.optimizer import PolicyOptimizer
from gradus.trainer.optimizer.parameter_kinds import trained_parameters

log = get_logger(__name__)

PART = "trainer"
"""Name of the trainer's part of a checkpoint."""

_PROGRESS_FILE = "progress.json"
_WEIGHTS = "weights."
_OPTIMIZER = "optimizer."


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the saved weights belong to, so that a checkpoint can be exported without a config."""

    model: dict[str, Any]
    """The model that training started from, as the config names it."""
    compute_dtype: str
    """Dtype of compute and of published weights."""
    lora: dict[str, Any] | None = None
    """The adapters, when only they are saved."""
    base_sha256: str | None = None
    """Of the model's files where they stay in use: under adapters, or as the reference of the loss.
    None when everything that is used is saved."""

    def refuse_other(self, saved: Origin) -> None:
        """ConfigError when what stays frozen is not here what it was where `saved` was trained.

        Names, shapes and dtypes are compared with the tensors themselves.
        """
        for key in ("rank", "alpha"):
            was, now = (None if state.lora is None else state.lora[key] for state in (saved, self))
            if was != now:
                raise ConfigError(
                    f"lora.{key} was {was} in the checkpoint and is {now}; resume with {was}"
                )
        # A reference may come with a resume, or go; adapters mean nothing without their base.
        if self.lora is not None or None not in (self.base_sha256, saved.base_sha256):
            refuse_other_base(saved, self.base_sha256)


class TrainingProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far training has come."""

    step: int
    """Updates applied; training continues with this step."""
    num_ranks: int
    """Ranks that wrote the state; any other number can read it."""
    counters: dict[str, int]
    """What else counts up, by name: conversations read, for example."""
    origin: Origin
    """What the weights belong to."""


@dataclass(frozen=True)
class StateSnapshot:
    """A copy of this rank's part of the state; training may continue while it is written."""

    progress: TrainingProgress
    pieces: Mapping[str, Piece]

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.pieces)

    def write(self, folder: Path, rank: int, files: DurableFiles) -> None:
        """Write this rank's files into the trainer's part; StorageError when the disk fails."""
        part = folder / PART
        files.make_folder(part)
        write_shard(part, rank, self.pieces, files)
        if rank == 0:
            files.write(part / _PROGRESS_FILE, msgspec.json.encode(self.progress))


@dataclass(frozen=True)
class TrainingState:
    """The live state of one rank: weights, moments, random numbers."""

    policy: torch.nn.Module
    optimizer: PolicyOptimizer
    world: World
    origin: Origin

    def snapshot(self, step: int, counters: Mapping[str, int]) -> StateSnapshot:
        """A copy on the CPU of what this rank has to save after `step` updates."""
        shared = {_WEIGHTS + name: tensor for name, tensor in self._weights().items()}
        moments = self.optimizer.state_dict()
        shared |= {_OPTIMIZER + name: tensor for name, tensor in moments.items()}
        pieces = own_pieces(shared, self._random(), is_first=self.world.is_first)
        progress = TrainingProgress(step, self.world.size, dict(counters), self.origin)
        return StateSnapshot(progress, pieces)

    def load(self, part: Path) -> TrainingProgress:
        """Put the state of a verified checkpoint in place, whatever number of ranks wrote it.

        With another number of ranks each rank keeps the random numbers that its seed gave it.
        ConfigError when the part holds trained state that has no place here.
        """
        progress = read_progress(part)
        with open_shards(part) as reader:
            weights, moments = self._weights(), self.optimizer.state_dict()
            _refuse_left_over(part, reader, _WEIGHTS, weights)
            _refuse_left_over(part, reader, _OPTIMIZER, moments)
            _fill(reader, weights)
            for name, tensor in moments.items():
                reader.fill(_OPTIMIZER + name, tensor)
            self.optimizer.load_state_dict(moments)
            if progress.num_ranks == self.world.size:
                self._restore_random(reader)
        return progress

    def num_bytes(self) -> int:
        """Bytes of the whole state over all ranks."""
        tensors = [*self._weights().values(), *self.optimizer.state_dict().values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _weights(self) -> dict[str, Tensor]:
        release_gathered(self.policy)
        return _trained(self.policy)

    def _random(self) -> dict[str, Tensor]:
        """The states of torch's generators on this rank, under names that no other rank uses."""
        states = {self._name_of_random("cpu"): torch.get_rng_state()}
        if self.world.device.type == "cuda":
            states[self._name_of_random("cuda")] = torch.cuda.get_rng_state(self.world.device)
        return states

    def _restore_random(self, reader: ShardReader) -> None:
        torch.set_rng_state(reader.whole(self._name_of_random("cpu")))
        if self.world.device.type != "cuda":
            return
        if (name := self._name_of_random("cuda")) in reader.names:
            torch.cuda.set_rng_state(reader.whole(name), self.world.device)
        else:
            log.info("the checkpoint was made without a GPU: its random numbers begin anew")

    def _name_of_random(self, device: str) -> str:
        return f"random.{self.world.rank}.{device}"


def load_weights(policy: torch.nn.Module, part: Path) -> TrainingProgress:
    """Put only the weights of a verified checkpoint in place, to export or to evaluate them."""
    weights = _trained(policy)
    with open_shards(part) as reader:
        _refuse_left_over(part, reader, _WEIGHTS, weights)
        _fill(reader, weights)
    return read_progress(part)


def _trained(policy: torch.nn.Module) -> dict[str, Tensor]:
    """What training changes. Biases of routing move with the whole model; adapters leave them."""
    biases = {} if adapted_layers(policy) else routing_biases(policy)
    return {it.name: it.parameter.detach() for it in trained_parameters(policy)} | biases


def _fill(reader: ShardReader, weights: Mapping[str, Tensor]) -> None:
    for name, tensor in weights.items():
        # A checkpoint without biases leaves them as the model's files have them.
        if not is_bias(name) or _WEIGHTS + name in reader.names:
            reader.fill(_WEIGHTS + name, tensor)


def refuse_other_base(saved: Origin, base_sha256: str | None) -> None:
    """ConfigError when a checkpoint was trained beside another frozen model."""
    if saved.base_sha256 != base_sha256:
        raise ConfigError(
            f"model {saved.model.get('name')!r} is not the one that the checkpoint was trained "
            "beside, as the base of its adapters or as the reference of its loss: its files have "
            f"digest {_short(base_sha256)}, they had {_short(saved.base_sha256)}; put the model "
            "back as it was"
        )


def _short(digest: str | None) -> str:
    return "none" if digest is None else f"{digest[:16]}…"


def _refuse_left_over(
    part: Path, reader: ShardReader, prefix: str, wanted: Mapping[str, Tensor]
) -> None:
    """Trained state that nothing reads would be silently lost."""
    saved = {name.removeprefix(prefix) for name in reader.names if name.startswith(prefix)}
    if left := sorted(saved - wanted.keys()):
        raise ConfigError(
            f"{part} also holds {left[0]!r} ({len(left)} in all) in its {prefix}*, for which this "
            "run has no place; resume with the model, the optimizer and the trained parameters of "
            "the checkpoint"
        )


def read_progress(part: Path) -> TrainingProgress:
    """How far training had come when the part was saved."""
    path = part / _PROGRESS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=TrainingProgress)
    except (OSError, ValueError) as error:
        raise CorruptStateError(f"{path} does not say where training stood: {error}") from error
