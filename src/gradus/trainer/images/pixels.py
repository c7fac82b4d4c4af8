"""The pixels of a micro batch: read from the run's store, and made into what a tower reads by the
processor of the model, as the engine makes them.

Shapes: T tokens of a packed row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from gradus.config import ModelConfig
from gradus.errors import ConfigError, ProtocolError
from gradus.run.model_files import merged_patches
from gradus.trainer.images.tower import Image, RowImages, reads_images
from gradus.wire.images import ImageSpan, ImageStore, open_image
from gradus.wire.micro_batch import MicroBatch

Made = Mapping[str, Tensor]
"""What a processor makes of one image, by the names that a tower's arguments have."""
_READ = frozenset({"pixel_values", "image_grid_thw", "image_position_ids"})
"""Some processors make more than a tower reads."""
Grid = tuple[int, int, int]
"""Frames, rows and columns of patches."""


@dataclass(frozen=True)
class RowRule:
    """How a model counts the tokens of an image."""

    merge: int
    """Patches of which a tower makes one embedding, along each side."""
    is_in_three: bool
    """True if a token has its place in time, row and column."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> RowRule:
        merge = merged_patches(model.config.vision_config.to_dict())
        return cls(merge, is_in_three=hasattr(model.base_model, "get_rope_index"))

    def num_tokens(self, grid: Grid) -> int:
        frames, rows, columns = grid
        return frames * rows * columns // self.merge**2

    def positions(self, length: int, images: Sequence[tuple[ImageSpan, Grid]]) -> NDArray[np.int64]:
        """[length, 3] of one sample: text counts on in all three, and so it does after an image by
        its longer side.

        >>> RowRule(2, True).positions(5, [(ImageSpan("0" * 64, 1, 2), (1, 2, 4))])[:, 2].tolist()
        [0, 1, 2, 3, 4]
        """
        found = np.empty((length, 3), np.int64)
        done = place = 0
        for span, (frames, rows, columns) in images:
            text = np.arange(span.start - done)
            found[done : span.start] = place + text[:, None]
            place += len(text)
            sides = (frames, rows // self.merge, columns // self.merge)
            found[span.start : span.end] = place + np.indices(sides).reshape(3, -1).T
            place += max(rows, columns) // self.merge
            done = span.end
        found[done:] = place + np.arange(length - done)[:, None]
        return found


class Pixels:
    """Makes the images of micro batches ready, each different image of a step once."""

    def __init__(
        self, make: Callable[[str], Made], rule: RowRule, dtype: torch.dtype = torch.float32
    ) -> None:
        """`make` gives what the tower reads of the image with this hash; pixels are held in
        `dtype`, to which a tower rounds them first."""
        self._make = make
        self._rule = rule
        self._dtype = dtype
        self._held: WeakValueDictionary[str, Image] = WeakValueDictionary()

    @classmethod
    def made_by(
        cls, processor: Any, rule: RowRule, read: Callable[[str], bytes], dtype: torch.dtype
    ) -> Pixels:
        """By a processor, of the bytes that `read` gives for a hash."""
        return cls(lambda it: made_of(read(it), processor, f"image {it}"), rule, dtype)

    def _image(self, sha256: str) -> Image:
        """Not made again while a row holds it."""
        image = self._held.get(sha256)
        if image is None:
            made = self._make(sha256).items()
            image = Image(
                {n: it.to(self._dtype) if it.is_floating_point() else it for n, it in made}
            )
            self._held[sha256] = image
        return image

    def of(self, micro_batch: MicroBatch) -> RowImages | None:
        """None where it has no image. ProtocolError for an image that cannot be read, or has other
        placeholders in its sample than the processor makes embeddings."""
        spans = [span for of_sample in micro_batch.images for span in of_sample]
        if not spans:
            return None
        images = {it: self._image(it) for it in dict.fromkeys(it.sha256 for it in spans)}
        grids = {sha256: _grid(image.tensors) for sha256, image in images.items()}
        starts, first = {}, 0
        for sha256, grid in grids.items():
            starts[sha256] = first
            first += self._rule.num_tokens(grid)
        for span in spans:
            if span.length != (expected := self._rule.num_tokens(grids[span.sha256])):
                raise ProtocolError(
                    f"image {span.sha256} has {span.length} placeholders, and the trainer's "
                    f"processor makes {expected} of it; engine and trainer must load the same "
                    "processor settings"
                )
        offsets = np.cumsum([0, *micro_batch.sequence_lengths[:-1]])
        places = [
            offset + np.arange(span.start, span.end)
            for offset, of_sample in zip(offsets, micro_batch.images, strict=True)
            for span in of_sample
        ]
        sources = [starts[span.sha256] + np.arange(span.length) for span in spans]
        return RowImages(
            images=tuple(images.values()),
            places=torch.from_numpy(np.concatenate(places)),
            sources=torch.from_numpy(np.concatenate(sources)),
            positions=self._positions(micro_batch, grids),
        )

    def _positions(self, micro_batch: MicroBatch, grids: Mapping[str, Grid]) -> Tensor | None:
        if not self._rule.is_in_three:
            return None
        found = [
            self._rule.positions(length, [(span, grids[span.sha256]) for span in of_sample])
            for length, of_sample in zip(
                micro_batch.sequence_lengths, micro_batch.images, strict=True
            )
        ]
        return torch.from_numpy(np.concatenate(found))


def pixels_of(
    model: PreTrainedModel, config: ModelConfig, folder: Path, dtype: torch.dtype
) -> Pixels | None:
    """As the processor of a model makes them of the images in a store's folder; None for a model
    that reads text alone."""
    if not reads_images(model):
        return None
    processor = load_processor(config)
    return Pixels.made_by(processor, RowRule.of(model), ImageStore(folder).read, dtype)


def load_processor(config: ModelConfig) -> Any:
    """What makes pixels of images for a model; ConfigError where its files have none."""
    try:
        # Found when asked for: models of text import nothing of it.
        find: Any = transformers.AutoImageProcessor.from_pretrained
        return find(config.name, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"model {config.name!r} reads images, and its processor cannot be loaded: {error}"
        ) from error


def made_of(content: bytes, processor: Any, what: str) -> Made:
    """What the processor makes of an image file; ProtocolError, with `what`, where it cannot."""
    try:
        made: Made = processor(images=[open_image(content)], return_tensors="pt")
    except (ProtocolError, ValueError, TypeError) as error:
        raise ProtocolError(f"{what} cannot be read: {error}") from error
    return {name: tensor for name, tensor in made.items() if name in _READ}


def _grid(made: Made) -> Grid:
    if "image_grid_thw" in made:
        frames, rows, columns = made["image_grid_thw"][0].tolist()
        return frames, rows, columns
    # Columns and rows of each patch, -1 where a patch is padding.
    columns, rows = (made["image_position_ids"][0].amax(0) + 1).tolist()
    return 1, rows, columns
