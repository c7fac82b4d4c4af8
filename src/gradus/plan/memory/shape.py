"""How large a model is, from its config.json and the headers of its safetensors files."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradus.config.families import family_of, other_layers
from gradus.plan.memory.kept import KeptScores, layer_kind, patch_widths, widths
from gradus.run.model_files import text_part

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
"""Where the number of a decoder layer stands in a tensor's name."""
_TOWER = re.compile(r"(?:^|\.)(?:visual|vision_tower|audio_tower|embed_vision|embed_audio)\.")
"""What makes embeddings of images or of sound."""
_SOUND = re.compile(r"(?:^|\.)(?:audio_tower|embed_audio)\.")
_LARGEST_HEADER_BYTES = 100 * 2**20
_LARGEST_SIZE = 2**53
"""More than any size of any model; a config.json that says more is damaged."""
_MOST_LAYERS = 10_000
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Linear layers that get no adapter unless they are named."""

_STACKS = frozenset({"input_linear", "output_linear"})
"""What the files of some call their stacked experts."""

_NONSENSE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, struct.error),
    *(ZeroDivisionError, OverflowError, RecursionError),
)
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
    num_layers: int
    num_layer_parameters: int
    """Of all decoder layers, which may be of several kinds."""
    largest_layer: int
    """Parameters of the largest decoder layer."""
    num_expert_parameters: int
    """Of the experts of all layers; shared ones are none."""
    largest_experts: int
    """Of the layer with most of them."""
    adapted: Mapping[str, int]
    """Of the linear layers in decoder layers, by the last part of their names, and of `experts`:
    the sum of inputs and outputs, which times the rank is the size of their adapters."""
    vocabulary: int
    hidden_size: int
    kinds: Sequence[str]
    """Of each decoder layer, in their order."""
    widths: Mapping[str, float]
    """Of a token in a layer, as the table of what is kept names them."""
    family: str
    """The `model_type` of the part that reads text."""
    scores: KeptScores
    patch: Mapping[str, float]
    """Numbers that a patch of an image has, and that a trained tower keeps of it; empty without."""

    @property
    def query_size(self) -> float:
        """Heads times the size of a head; 0 without attention."""
        return self.widths["queries"]

    @property
    def key_size(self) -> float:
        """Key heads times the size of a head."""
        return self.widths["keys"]

    @property
    def num_outer_parameters(self) -> int:
        """Embedding, last norm and head: what no decoder layer holds."""
        return self.num_parameters - self.num_layer_parameters

    def num_adapter_parameters(self, rank: int, targets: Sequence[str] | None) -> int:
        """Of adapters beside the layers named, or beside all of attention and MLP."""
        names = self.adapted.keys() - _ROUTERS - {"experts"} if targets is None else targets
        return rank * sum(self.adapted.get(name, 0) for name in names)


def read_model_shape(folder: Path) -> ModelShape | None:
    """The shape of the model in a folder; None when its files do not say, or say nonsense."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        tensors = dict(_tensors(folder))
        shape = shape_of(config, tensors) if tensors else shape_of_config(config)
        return shape if _makes_sense(shape) else None
    except _NONSENSE:
        return None


def _makes_sense(shape: ModelShape) -> bool:
    plain = [
        value
        for name, value in vars(shape).items()
        if name not in ("adapted", "widths", "kinds", "family", "scores", "patch")
    ]
    sizes = [*shape.adapted.values(), *shape.widths.values(), *shape.patch.values()]
    return all(
        type(it) in kinds and 0 <= it < _LARGEST_SIZE
        for values, kinds in ((plain, (int,)), (sizes, (int, float)))
        for it in values
    )


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape of a decoder of the usual kind (Llama, Qwen, Mixtral, ...), from config.json alone.

    KeyError when a size is missing. Norms and biases inside layers, at most 0.1 % of a model, are
    counted as two norms a layer.
    """
    own = text_part(config)
    return shape_of(config, dict(_usual_tensors(own, bool(config.get("tie_word_embeddings")))))


def shape_of(config: Mapping[str, Any], tensors: Shapes) -> ModelShape:
    own = text_part(config)
    by_layer: Counter[str] = Counter()
    names: defaultdict[str, list[str]] = defaultdict(list)
    experts: Counter[str] = Counter()
    adapted: defaultdict[str, int] = defaultdict(int)
    if config.get("tie_word_embeddings"):
        tensors = {name: it for name, it in tensors.items() if name != "lm_head.weight"}
    tower = sum(math.prod(it) for name, it in tensors.items() if _TOWER.search(name))
    sound = sum(math.prod(it) for name, it in tensors.items() if _SOUND.search(name))
    tensors = {name: it for name, it in tensors.items() if not _TOWER.search(name)}
    for name, shape in tensors.items():
        if found := _LAYER.search(name):
            by_layer[found.group(1)] += math.prod(shape)
            names[found.group(1)].append(name[found.end() :])
            if ".experts." in name or name.removesuffix(".weight").rpartition(".")[2] in _STACKS:
                experts[found.group(1)] += math.prod(shape)
            if size := _expert_factors(name, shape, tensors):
                adapted["experts"] += size
            elif len(shape) == 2 and name.endswith(".weight") and ".experts." not in name:
                owner, leaf = name.split(".")[-3:-1]
                adapted[owner if owner in _ROUTERS else leaf] += sum(shape)
    return ModelShape(
        num_parameters=tower + sum(map(math.prod, tensors.values())),
        num_tower_parameters=tower,
        num_sound_parameters=sound,
        num_layers=len(by_layer),
        num_layer_parameters=by_layer.total(),
        largest_layer=max(by_layer.values(), default=0),
        num_expert_parameters=experts.total(),
        largest_experts=max(experts.values(), default=0),
        adapted=dict(adapted),
        vocabulary=own["vocab_size"],
        hidden_size=own.get("hidden_size") or own["n_embd"],
        kinds=[layer_kind(names[number]) for number in sorted(names, key=int)],
        widths=_widths(own),
        family=family_of(own),
        scores=KeptScores.of(own),
        patch=patch_widths(config.get("vision_config") or {}),
    )


def _widths(own: Mapping[str, Any]) -> dict[str, float]:
    """With the mean of layers whose heads differ."""
    found = widths(own)
    other = [widths({**own, **layer}) for layer in other_layers(own)]
    plain = own.get("num_hidden_layers", 1) - len(other)
    for name in ("queries", "keys") if other else ():
        total = plain * found[name] + sum(it[name] for it in other)
        found[name] = total / (plain + len(other))
    return found


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


def _num_experts(own: Mapping[str, Any]) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(own[name]) for name in names if own.get(name)), 0)


def _usual_tensors(own: Mapping[str, Any], is_tied: bool) -> Iterator[tuple[str, Sequence[int]]]:
    hidden, vocabulary = own["hidden_size"], own["vocab_size"]
    heads = own["num_attention_heads"]
    head = own.get("head_dim") or hidden // heads
    query, key = heads * head, (own.get("num_key_value_heads") or heads) * head
    yield "embed_tokens.weight", (vocabulary, hidden)
    yield "norm.weight", (hidden,)
    if not is_tied:
        yield "lm_head.weight", (vocabulary, hidden)
    experts, step = _num_experts(own), own.get("interleave_moe_layer_step") or 1
    size = own.get("moe_intermediate_size") or own["intermediate_size"]
    if own["num_hidden_layers"] > _MOST_LAYERS:
        raise ValueError("no model has so many layers")
    for number in range(own["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        yield f"{layer}.norms", (2, hidden)
        for leaf, width in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            yield f"{layer}.self_attn.{leaf}.weight", (width, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, query)
        width = size
        if experts and (number + 1) % step == 0:
            yield f"{layer}.mlp.gate.weight", (experts, hidden)
            yield f"{layer}.mlp.experts.gate_up_proj", (experts, 2 * size, hidden)
            yield f"{layer}.mlp.experts.down_proj", (experts, hidden, size)
            yield f"{layer}.mlp.shared", (own.get("shared_expert_intermediate_size", 0), 3 * hidden)
            if "intermediate_size_mlp" not in own:
                continue
        elif experts:
            width = own.get("intermediate_size_mlp", size)
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            yield f"{layer}.mlp.{leaf}.weight", (width, hidden)


def stored_experts(folder: Path) -> Sequence[int]:
    """The shape of a stack of `down_proj` of experts in a folder's files; empty without one."""
    with suppress(*_NONSENSE):
        return next((it for name, it in _tensors(folder) if name.endswith("experts.down_proj")), ())
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
