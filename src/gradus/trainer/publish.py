"""The trained policy as others load it: a version that inference applies, or a model directory.

Gathering weights from all ranks is a collective: every rank calls these functions, rank 0 writes.
A version is copied between two steps, and hashed and written while the next step runs.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from gradus.files import PatientFiles
from gradus.plan.hardware import given_dtype
from gradus.run.model_files import json_table, model_folder, text_part
from gradus.sealed import put_in_place, stage
from gradus.tokenizing import PLAIN_CLASS, TOKENIZER_CONFIG, misreads_ascii, reply_end
from gradus.trainer.distributed import Place, World, on_cpu, whole_tensor
from gradus.trainer.model.lora import (
    ADAPTER_STEM,
    adapted_layers,
    adapter_tensors,
    is_adapter_tensor,
)
from gradus.trainer.model.stored import as_stored, in_order, layer_of
from gradus.weights.published import Published, WeightPublisher
from gradus.weights.publishing_thread import PublishingThread
from gradus.weights.tensor_files import write_tensors
from gradus.wire.control_tokens import read_stop_token_ids
from gradus.wire.events import PolicyPublished

Tensors = Iterable[tuple[str, Tensor]]

CONFIG, GENERATION = "config.json", "generation_config.json"
_TOKENIZER_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template.*"),
    *("vocab*", "merges.txt", "*.model", "*.model.v*", "*.tiktoken", "tekken.json"),
)
_DTYPE_KEYS = ("dtype", "torch_dtype")
"""In new and in old config files."""


def serving_dtype(compute_dtype: str) -> torch.dtype:
    """Dtype of compute, publishing and serving; ConfigError for "auto"."""
    names = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    return names[given_dtype("compute_dtype", compute_dtype)]


def serving_tensors(
    model: PreTrainedModel, dtype: torch.dtype, *, keep: bool = True, place: Place = on_cpu
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and saved buffer, whole, as `save_pretrained` names them.

    A collective: all ranks must exhaust it. Ranks with `keep` false take part and yield nothing.
    Tied parameters come once, under the name that Hugging Face keeps; adapters are added to their
    weights. Where `place` does not copy, the tensors may be the trained weights themselves.
    """
    gathered = _gathered(model, dtype)
    if not keep:
        deque(gathered, maxlen=0)
    for _, layer in groupby(gathered, key=lambda it: layer_of(it.name)):
        by_dtype: defaultdict[torch.dtype, dict[str, Tensor]] = defaultdict(dict)
        for it in layer:
            by_dtype[it.dtype][it.name] = it.whole
        for kind, tensors in by_dtype.items():
            for name, tensor in as_stored(model, tensors).items():
                yield name, place(name, tensor, kind)


@dataclass(frozen=True)
class _Gathered:
    """A tensor of the model on this rank's device."""

    name: str
    whole: Tensor
    dtype: torch.dtype
    """In which it is served. On a GPU it is in it already, since a copy from there would be
    converted in main memory; on a CPU that is left to the copy."""


def _gathered(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[_Gathered]:
    """Every tensor that is saved, whole, layer by layer; a collective."""
    tied = set(model.all_tied_weights_keys)
    adapted = adapted_layers(model)
    buffers = {name for name, _ in model.named_buffers()}
    state = model.state_dict(keep_vars=True)
    for name in in_order(
        name for name in state if name not in tied and not is_adapter_tensor(name)
    ):
        value = state[name].detach()
        # The trainer computes with buffers as they are, and with rounded parameters.
        served = dtype if value.is_floating_point() and name not in buffers else value.dtype
        adapter = adapted.get(name.removesuffix(".weight"))
        if adapter is not None:
            whole = adapter.merged(whole_tensor(value))
        else:
            # Ranks send each other what is served.
            is_split = isinstance(value, DTensor) and value.device_mesh.size() > 1
            whole = whole_tensor(value.to(served) if is_split else value)
        yield _Gathered(name, whole.to(served) if whole.is_cuda else whole, served)


class TensorSource(Protocol):
    """Gathers named tensors of a model from all ranks: `serving_tensors` or `adapter_tensors`."""

    def __call__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        *,
        keep: bool = True,
        place: Place = on_cpu,
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors on ranks that keep them, nothing on the others."""


class PolicyCopy(Protocol):
    """A copy of what is published, made between two steps and read while the next one runs."""

    def place(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """One tensor in the dtype of serving, where `take` wants it; without waiting for a GPU."""

    def take(self, tensors: Tensors) -> None:
        """Keep a stream of what `place` gave."""

    def tensors(self) -> Tensors:
        """What was copied, once it is whole."""


class WeightSnapshot:
    """Owns one copy in main memory of what is published, which the next version overwrites.

    >>> tensors = serving_tensors(model, torch.bfloat16, place=snapshot.place)  # doctest: +SKIP
    >>> snapshot.take(tensors)  # doctest: +SKIP
    >>> write(snapshot.tensors())  # on another thread  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._is_copied: torch.cuda.Event | None = None

    def place(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        copied = self._copies.get(name)
        if copied is None or (copied.dtype, copied.shape) != (dtype, tensor.shape):
            copied = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
        return copied.copy_(tensor, non_blocking=True)

    def take(self, tensors: Tensors) -> None:
        self._copies = dict(tensors)
        self._is_copied = None
        if any(copied.is_pinned() for copied in self._copies.values()):
            self._is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._is_copied.record()

    def tensors(self) -> Tensors:
        """What was copied; waits until a GPU has delivered it. Valid until the next `take`."""
        if self._is_copied is not None:
            self._is_copied.synchronize()
        return self._copies.items()


@dataclass
class PendingVersion:
    """A version on its way to inference; it is whole when the thread comes to a later task."""

    version: int
    began: float
    """When the step's thread turned to it, by `time.perf_counter`."""
    seconds: float = 0.0
    """From then on until it was available."""
    _published: Published | None = None

    @property
    def published(self) -> Published:
        """The whole version; only for tasks that were submitted after it."""
        assert self._published is not None, "asked for a version that is not written"
        return self._published

    def note(self, published: Published) -> None:
        self._published = published
        self.seconds = time.perf_counter() - self.began


@dataclass(frozen=True)
class PolicyPublisher:
    """Gathers the policy from all ranks and hands it to a weight transfer behind the next step.

    At most one version is in the air: the next waits for it.

    >>> pending = publisher.publish_version(1)  # doctest: +SKIP
    >>> publisher.thread.submit(lambda: announce(pending.published))  # doctest: +SKIP
    """

    model: PreTrainedModel
    world: World
    dtype: torch.dtype
    weights: WeightPublisher | None
    """None on every rank but the first."""
    thread: PublishingThread
    """Only that of rank 0 is given work."""
    served: TensorSource = serving_tensors
    """What of the model is published."""
    snapshot: PolicyCopy = field(default_factory=WeightSnapshot)
    """Holds a version while it is handed over."""
    newest: int = 0
    """That an earlier process of this term published: those before it are known and not published
    again, and it shows that what was trained again is the same."""

    def publish_version(self, version: int) -> PendingVersion | None:
        """Begin to publish the present weights as `version`; None on all ranks but the first, and
        for a version that is known.

        Raises what became of the version before.
        """
        if version < self.newest:
            return None
        pending = PendingVersion(version, time.perf_counter())
        # Before anything is gathered: a rank that waits in a collective gives up after a while.
        self.world.first_rank_does(self._make_room)
        copied = self.served(
            self.model, self.dtype, keep=self.world.is_first, place=self.snapshot.place
        )
        _write_gathered(copied, self.snapshot.take, self.world)
        if not self.world.is_first:
            return None
        self.thread.submit(partial(self._publish, pending))
        return pending

    def settle(self) -> None:
        """Wait on all ranks until no version is in the air."""
        self.world.first_rank_does(self.thread.wait)

    def finish(self) -> None:
        """Wait on all ranks until inference has every published version, and end the transfer."""

        def drain() -> None:
            assert self.weights is not None
            self.thread.wait()
            self.weights.drain()
            self.weights.close()

        self.world.first_rank_does(drain)

    def _make_room(self) -> None:
        assert self.weights is not None
        self.thread.wait()
        self.weights.wait_for_room()

    def _publish(self, pending: PendingVersion) -> None:
        assert self.weights is not None
        tensors = self.snapshot.tensors()
        pending.note(self.weights.publish_version(pending.version, tensors))


def save_model(
    model: PreTrainedModel,
    world: World,
    dtype: torch.dtype,
    directory: Path,
    files: Mapping[str, bytes],
    *,
    is_adapter: bool = False,
) -> None:
    """Write a Hugging Face model directory that replaces `directory`, adapters merged, or the PEFT
    directory of the adapters alone."""
    gather: TensorSource = adapter_tensors if is_adapter else serving_tensors
    tensors = gather(model, dtype, keep=world.is_first)
    stem = ADAPTER_STEM if is_adapter else "model"
    _write_gathered(tensors, partial(_replace_directory, directory, files, stem), world)


def _write_gathered(
    tensors: Iterator[tuple[str, Tensor]], write: Callable[[Tensors], None], world: World
) -> None:
    """Let rank 0 write while all ranks gather; a failed write ends all of them."""

    def write_and_drain() -> None:
        try:
            write(tensors)
        finally:
            # The other ranks gather to the end; leaving early would leave them waiting.
            deque(tensors, maxlen=0)

    if not world.is_first:
        deque(tensors, maxlen=0)
    world.first_rank_does(write_and_drain)


def _replace_directory(
    directory: Path, files: Mapping[str, bytes], stem: str, tensors: Tensors
) -> None:
    disk, directory = PatientFiles(), directory.resolve()
    with stage(directory, disk) as staging:
        write_tensors(staging, tensors, disk, stem=stem)
        for name, content in files.items():
            disk.stage(staging / name, content)
        put_in_place(staging, directory, disk, before_rename=partial(disk.delete, directory))


def announcement(published: Published, term: int) -> PolicyPublished:
    """The event that tells of a published version."""
    return PolicyPublished(
        version=published.version,
        term=term,
        directory=str(published.directory),
        digest=published.digest,
    )


def model_files(model: PreTrainedModel, tokenizer: Any, dtype: torch.dtype) -> dict[str, bytes]:
    """Every file of a model directory except the weights, as the base model has them: what reads
    the base reads this too. Changed is what training changed: the dtype, the architecture, and the
    ends of a generation where the template teaches one that no file names.
    """
    saved = _saved(model, tokenizer, dtype)
    names = model.name_or_path or "", tokenizer.name_or_path or ""
    base, words = (model_folder(name) if name else None for name in names)
    files = _tokenizer_files(words, tokenizer) or {
        name: saved[name] for name in saved.keys() - {CONFIG, GENERATION}
    }
    files[CONFIG] = saved[CONFIG]
    if GENERATION in saved:
        files[GENERATION] = saved[GENERATION]
    if base is not None and json_table(base / CONFIG).get("model_type") == model.config.model_type:
        files[CONFIG] = _own_config((base / CONFIG).read_bytes(), json.loads(saved[CONFIG]), dtype)
        patterns = (GENERATION, "*processor_config.json", *_own_code(base, CONFIG))
        files |= _read_files(base, patterns)
    stops = read_stop_token_ids(*names)
    end = reply_end(tokenizer, stops).new
    if end is not None and GENERATION in files:
        settings = json.loads(files[GENERATION])
        known = settings.get("eos_token_id", model.config.get_text_config().eos_token_id)
        known = known if isinstance(known, list) else [known]
        settings["eos_token_id"] = [*(it for it in known if it is not None and it != end), end]
        files[GENERATION] = _as_json(settings)
    return files


def _saved(model: PreTrainedModel, tokenizer: Any, dtype: torch.dtype) -> dict[str, bytes]:
    """What this version of transformers writes, which may be read by no other."""
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        if model.generation_config is not None:
            # As it is: saving it "properly" refuses settings that published models do have.
            settings = model.generation_config.to_json_string()
            (Path(folder) / GENERATION).write_text(settings)
        tokenizer.save_pretrained(folder)
        return _read_files(Path(folder), ("*",))


def _own_config(base: bytes, saved: Mapping[str, Any], dtype: torch.dtype) -> bytes:
    """The base model's config.json with the dtype, architecture and vocabulary of the weights."""
    written, changed = json.loads(base), json.loads(base)
    name = str(dtype).removeprefix("torch.")
    for part in (changed, *(table for table in changed.values() if isinstance(table, dict))):
        part.update({key: name for key in _DTYPE_KEYS if key in part})
    if not any(key in changed for key in _DTYPE_KEYS):
        changed["torch_dtype"] = name
    changed["architectures"] = saved["architectures"]
    rows = text_part(saved).get("vocab_size")
    text: Any = text_part(changed)
    if rows is not None and text.get("vocab_size", rows) != rows:
        text["vocab_size"] = rows
    return base if changed == written else _as_json(changed)


def _tokenizer_files(folder: Path | None, tokenizer: Any) -> dict[str, bytes]:
    """Its files as they came; a class that misreads them is named no more."""
    if folder is None:
        return {}
    files = _read_files(folder, (*_TOKENIZER_FILES, *_own_code(folder, TOKENIZER_CONFIG)))
    if misreads_ascii(tokenizer) and TOKENIZER_CONFIG in files:
        settings = json.loads(files[TOKENIZER_CONFIG])
        files[TOKENIZER_CONFIG] = _as_json({**settings, "tokenizer_class": PLAIN_CLASS})
    return files


def _own_code(folder: Path, config: str) -> tuple[str, ...]:
    """Modules of a model or a tokenizer that bring their own classes."""
    return ("*.py",) if "auto_map" in json_table(folder / config) else ()


def _read_files(folder: Path, patterns: Iterable[str]) -> dict[str, bytes]:
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return {path.name: path.read_bytes() for path in sorted(found)}


def _as_json(settings: Mapping[str, Any]) -> bytes:
    return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
