"""Publishing makes the trained weights a version that inference can apply."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gradus.files import storage_error
from gradus.trainer.distributed import World
from gradus.trainer.model.lora import ADAPTER_STEM, adapter_tensors
from gradus.trainer.model.serving_names import serving_tensors
from gradus.weights.base import Published, WeightPublisher
from gradus.weights.filesystem import write_patiently, write_tensors


class TensorSource(Protocol):
    """Gathers named tensors of a model from all ranks; see `serving_tensors`."""

    def __call__(
        self, model: PreTrainedModel, dtype: torch.dtype, *, keep: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors on ranks that keep them, nothing on the others."""
        ...


class PolicyPublisher:
    """Gathers the policy from all ranks and hands it to a weight transfer or to a model directory.

    `weights` is None on every rank but the first; `served` is what of the model is published.

        >>> published = publisher.publish(version=1)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: PreTrainedModel,
        world: World,
        *,
        dtype: torch.dtype,
        weights: WeightPublisher | None,
        served: TensorSource = serving_tensors,
    ) -> None:
        self._model = model
        self._world = world
        self._dtype = dtype
        self._weights = weights
        self._served = served

    def publish(self, version: int) -> Published | None:
        """Publish the present weights as `version`; what was published on rank 0, else None."""
        published: list[Published] = []

        def write(tensors: Iterable[tuple[str, Tensor]]) -> None:
            assert self._weights is not None
            published.append(self._weights.publish(version, tensors))

        # Before anything is gathered: a rank that waits in a collective gives up after a while.
        self._world.first_rank_does(self._wait_for_room)
        self._gather(write, self._served)
        return published[0] if published else None

    def _wait_for_room(self) -> None:
        assert self._weights is not None
        self._weights.wait_for_room()

    def finish(self) -> None:
        """Wait on all ranks until inference has every published version, and end the transfer."""

        def drain() -> None:
            assert self._weights is not None
            self._weights.drain()
            self._weights.close()

        self._world.first_rank_does(drain)

    def save(self, directory: Path, extra_files: dict[str, bytes]) -> None:
        """Write a Hugging Face model directory that replaces `directory`, adapters merged."""
        self._save(directory, extra_files, serving_tensors, "model")

    def save_adapter(self, directory: Path, extra_files: dict[str, bytes]) -> None:
        """Write a PEFT adapter directory that replaces `directory`."""
        self._save(directory, extra_files, adapter_tensors, ADAPTER_STEM)

    def _save(
        self, directory: Path, extra_files: dict[str, bytes], source: TensorSource, stem: str
    ) -> None:

        def write(tensors: Iterable[tuple[str, Tensor]]) -> None:
            temporary = directory.with_name(f".{directory.name}.tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            try:
                temporary.mkdir(parents=True)
                write_tensors(temporary, tensors, stem=stem)
                for name, content in extra_files.items():
                    path = temporary / name
                    write_patiently(path, partial(_write_file, path, content))
                shutil.rmtree(directory, ignore_errors=True)
                temporary.rename(directory)
            except OSError as error:
                told = storage_error(error, directory)
                shutil.rmtree(temporary, ignore_errors=True)
                raise told from error

        self._gather(write, source)

    def _gather(
        self, write: Callable[[Iterable[tuple[str, Tensor]]], None], source: TensorSource
    ) -> None:
        """Let rank 0 write while all ranks gather; a failed write ends all of them, named."""
        tensors = source(self._model, self._dtype, keep=self._world.is_first)

        def write_and_drain() -> None:
            try:
                write(tensors)
            finally:
                # The other ranks gather to the end; leaving early would leave them waiting.
                deque(tensors, maxlen=0)

        if not self._world.is_first:
            deque(tensors, maxlen=0)
        self._world.first_rank_does(write_and_drain)


def _write_file(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def model_files(model: PreTrainedModel, tokenizer: Any, dtype: torch.dtype) -> dict[str, bytes]:
    """Config, generation config and tokenizer files that stand beside the weights."""
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        if model.generation_config is not None:
            # As it is: saving it "properly" refuses settings that published models do have.
            settings = model.generation_config.to_json_string()
            (Path(folder) / "generation_config.json").write_text(settings)
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
