"""Scores stored tokens again, one setting at a time: weights, dtype, temperature, nucleus, packing.

Shapes: N trained tokens of all chosen samples in their order, F factors of the temperature, P ways
to cut a distribution, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from gradus.config import ModelConfig, TrainerConfig
from gradus.files import read_json
from gradus.monitor.token_record import TokenRecord
from gradus.run.checkpoints import CheckpointStore
from gradus.run.paths import RunDirectory
from gradus.trainer.distributed import CPU, join_world
from gradus.trainer.export import export
from gradus.trainer.model.build import build_policy
from gradus.trainer.model.policy_model import output_head
from gradus.trainer.tensors import TrainTensors
from gradus.wire.micro_batch import MicroBatch
from gradus.wire.tokens import TokenArrays

Nats = NDArray[np.float64]
FACTORS = tuple(1.03**power for power in range(-24, 25))
"""Of a sample's own temperature; the middle one is 1."""
OWN = len(FACTORS) // 2
"""The column of the sample's own temperature; one more column behind all stands for 1.0."""
_MODES = ("as trained", "merged", "left out")
ADAPTED, MERGED, BARE = _MODES


@dataclass(frozen=True)
class SamplingCut:
    """How an engine may cut the distribution before it samples; 1 and 0 cut nothing."""

    top_p: float = 1.0
    top_k: int = 0

    def __str__(self) -> str:
        said = [f"top_p {self.top_p:g}"] * (self.top_p < 1) + [f"top_k {self.top_k}"] * (
            self.top_k > 0
        )
        return ", ".join(said) or "no cut"


@dataclass(frozen=True)
class StoredSample:
    """A stored sample, and the settings that the config says it was sampled with."""

    record: TokenRecord
    step: int
    temperature: float

    @cached_property
    def places(self) -> NDArray[np.intp]:
        """Of the trained tokens."""
        return np.flatnonzero(self.record.is_trained)

    @cached_property
    def versions(self) -> NDArray[np.int64]:
        """[N] that sampled them; -1 where nobody noted it."""
        if not self.record.versions:
            return np.full(len(self.places), -1)
        runs = [np.full(count, version) for version, count in self.record.versions]
        versions: NDArray[np.int64] = np.concatenate(runs)[self.places]
        return versions


@dataclass(frozen=True)
class Scores:
    """What one set of weights says of the tokens, [N, F + 1] by temperature and [N, P] by cut."""

    by_temperature: Nats
    by_cut: Nats


@dataclass(frozen=True)
class WeightsOnDisk:
    """Which weights of a run are still on the disk."""

    run_dir: RunDirectory
    base: Path
    """The initial weights."""
    scratch: Path

    @cached_property
    def folders(self) -> dict[int, Path]:
        """Version → a whole model or an adapter, the initial one included."""
        found = {0: self.base, **dict(CheckpointStore(self.run_dir, term=0).folders())}
        for path in self.run_dir.weights.glob("version_" + 8 * "[0-9]"):
            found[int(path.name.removeprefix("version_"))] = path
        return found

    def model(self, version: int, mode: str = ADAPTED) -> PreTrainedModel:
        """The weights in float32; of an adapter with it, merged and rounded, or without it."""
        folder = self.folders[version]
        if folder.parent.name == "checkpoints":
            target = self.scratch / folder.name
            if not target.exists():
                export(folder, target)
            folder = target
        is_adapter = (folder / "adapter_config.json").is_file()
        place = self.base if is_adapter else folder
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        if is_adapter and mode != BARE:
            _add_adapter(model, folder, rounds=mode == MERGED)
        return model

    def is_adapter(self, version: int) -> bool:
        return (self.folders[version] / "adapter_config.json").is_file()


def _add_adapter(model: PreTrainedModel, folder: Path, *, rounds: bool) -> None:
    """Add the product of the factors to the weights, and round the sum as the engine holds it."""
    settings = read_json(folder / "adapter_config.json")
    scale = settings["lora_alpha"] / settings["r"]
    tensors = {
        n: it for path in sorted(folder.glob("*.safetensors")) for n, it in load_file(path).items()
    }
    head, tail = "base_model.model.", ".lora_A.weight"
    for name in [it for it in tensors if it.endswith(tail)]:
        other = tensors[name.replace("lora_A", "lora_B")].float()
        layer = model.get_submodule(name.removeprefix(head).removesuffix(tail))
        weight = layer.weight
        assert isinstance(weight, Tensor)
        whole = weight.data + scale * other @ tensors[name].float()
        weight.data = whole.bfloat16().float() if rounds else whole


def plain_scores(
    model: PreTrainedModel, chosen: Sequence[StoredSample], cuts: Sequence[SamplingCut], dtype: str
) -> Scores:
    """Each sample by itself through transformers, the head in float32."""
    model = model.to(getattr(torch, dtype))
    warm, cut = [], []
    for it in chosen:
        logits = _logits(model, it)
        labels = torch.tensor(it.record.token_ids[it.places].astype(np.int64))
        warm.append(np.stack([*_warmed(logits, labels, it.temperature)], axis=1))
        cut.append(np.stack([_cut(logits / it.temperature, labels, way) for way in cuts], axis=1))
    return Scores(np.concatenate(warm), np.concatenate(cut))


@torch.no_grad()
def _logits(model: PreTrainedModel, chosen: StoredSample) -> Tensor:
    """[n, V] float32, of what comes before each trained token."""
    token_ids = torch.tensor(chosen.record.token_ids.astype(np.int64))[None]
    hidden: Tensor = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state[0]
    rows = hidden[torch.tensor(chosen.places - 1)].float()
    head = output_head(model)
    logits: Tensor = rows @ head.weight.float().T
    return logits if head.bias is None else logits + head.bias.float()


def _warmed(logits: Tensor, labels: Tensor, temperature: float) -> Iterator[Nats]:
    for value in (*(temperature * factor for factor in FACTORS), 1.0):
        yield _of(torch.log_softmax(logits / value, -1), labels)


def _cut(logits: Tensor, labels: Tensor, way: SamplingCut) -> Nats:
    """Logprobs after the cut; a token outside of it keeps its own, since it was not cut."""
    logprobs = torch.log_softmax(logits, -1)
    own = _of(logprobs, labels)
    if way == SamplingCut():
        return own
    ordered = logprobs.sort(-1, descending=True).values.exp()
    before = ordered.cumsum(-1) - ordered
    inside = before < way.top_p
    if way.top_k:
        inside[:, way.top_k :] = False
    inside[:, 0] = True
    mass = (ordered * inside).sum(-1).log().double().numpy()
    least = torch.where(inside, ordered, 1.0).amin(-1).log().double().numpy()
    return np.where(own >= least - 1e-6, own - mass, own)


def _of(logprobs: Tensor, labels: Tensor) -> Nats:
    found: Nats = logprobs.gather(1, labels[:, None])[:, 0].double().numpy()
    return found


@torch.no_grad()
def packed_scores(
    folder: Path,
    chosen: Sequence[StoredSample],
    temperatures: Sequence[float],
    trainer: TrainerConfig,
) -> Nats:
    """The samples packed into rows, through the trainer's own model."""
    base = ModelConfig(name=str(folder))
    dtype = getattr(torch, "float32" if trainer.compute_dtype == "float32" else "bfloat16")
    settings = trainer.model_copy(update={"lora": None})
    found = []
    with join_world(CPU) as world:
        policy = build_policy(base, settings, world, dtype)
        for row in _rows(list(zip(chosen, temperatures, strict=True)), trainer.micro_batch_tokens):
            logprobs = policy(TrainTensors.build(_micro_batch(row), CPU)).logprobs.double().numpy()
            start = 0
            for it, _ in row:
                found.append(logprobs[start + it.places])
                start += len(it.record.token_ids)
    return np.concatenate(found)


Row = list[tuple[StoredSample, float]]


def _rows(chosen: Row, most: int) -> Iterator[Row]:
    row: Row = []
    for it in chosen:
        if row and sum(len(one.record.token_ids) for one, _ in [*row, it]) > most:
            yield row
            row = []
        row.append(it)
    if row:
        yield row


def _micro_batch(row: Row) -> MicroBatch:
    lengths = [len(it.record.token_ids) for it, _ in row]
    token_ids = np.concatenate([it.record.token_ids for it, _ in row])
    trained = np.concatenate([it.record.is_trained for it, _ in row])
    heat = np.concatenate(
        [np.full(n, value, np.float32) for n, (_, value) in zip(lengths, row, strict=True)]
    )
    names = [it.record.sample_id for it, _ in row]
    arrays = TokenArrays.build(token_ids, {"ce": trained.astype(np.float32)}, temperatures=heat)
    return MicroBatch(names, lengths, arrays)


def save_whole(model: PreTrainedModel, base: Path, folder: Path) -> Path:
    """A folder that the trainer loads, of weights that exist in memory alone."""
    folder.mkdir()
    save: Mapping[str, Tensor] = model.state_dict()
    model.save_pretrained(folder, state_dict=dict(save))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (base / name).is_file():
            (folder / name).write_bytes((base / name).read_bytes())
    return folder
