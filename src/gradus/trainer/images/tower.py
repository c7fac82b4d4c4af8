"""Models with a tower that turns images into embeddings, which stand where the placeholders are.

Shapes: T tokens of a packed row, P placeholders in it, F embeddings of its different images, H the
model's hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gradus.plan.hardware import has_tower
from gradus.run.model_files import merged_patches, unused_tower
from gradus.trainer.model.attention import ATTENTION_NAME
from gradus.trainer.model.context.parts import ContextPart
from gradus.wire.micro_batch import MicroBatch
from gradus.wire.packing import image_tokens

_TEXT = "language_model"
"""What transformers calls the part that reads embeddings; the rest makes them."""


@dataclass(frozen=True)
class Image:
    """What a tower reads of one image, by the names that its processor gives; all rows of a step
    that show the image share it."""

    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class RowImages:
    """The images of a packed row."""

    images: tuple[Image, ...]
    """Each different image once."""
    places: Tensor
    """[P] where in the row the placeholders lie, ascending."""
    sources: Tensor
    """[P] which of the F embeddings each of them gets."""
    positions: Tensor | None
    """[T, 3] time, row and column of each token; None where the model counts tokens alone."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """All of them one after the other, as the tower reads them."""
        names = self.images[0].tensors
        return {name: torch.cat([image.tensors[name] for image in self.images]) for name in names}

    def on(self, device: torch.device) -> RowImages:
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return RowImages(
            images=tuple(
                Image({name: moved(it) for name, it in image.tensors.items()})
                for image in self.images
            ),
            places=moved(self.places),
            sources=moved(self.sources),
            positions=None if self.positions is None else moved(self.positions),
        )

    def shared(self, part: ContextPart) -> RowImages:
        """What a rank needs that has a part of the row: all images, and its own placeholders."""
        mine, places = part.own_targets(self.places)
        return RowImages(
            images=self.images,
            places=places,
            sources=self.sources[mine],
            positions=None if self.positions is None else part.own(self.positions),
        )


def reads_images(model: PreTrainedModel) -> bool:
    """Tell whether a model has a tower that is used, beside the part that reads text."""
    return has_tower(model.config.to_dict())


def packed_attention_of(config: Any) -> str | dict[str, str]:
    """What transformers is to attend with; a tower keeps its images apart by itself."""
    if not has_tower(config.to_dict()):
        return ATTENTION_NAME
    return {"text_config": ATTENTION_NAME, "vision_config": "sdpa"}


def text_part(model: PreTrainedModel) -> torch.nn.Module:
    """Where the decoder layers are: the model itself, or what its tower stands beside."""
    part: torch.nn.Module = getattr(model.base_model, _TEXT) if _has_tower(model) else model
    return part


def _has_tower(model: PreTrainedModel) -> bool:
    return reads_images(model) or unused_tower(model.config.to_dict()) is not None


def tower_parameters(model: PreTrainedModel) -> Iterator[torch.nn.Parameter]:
    """Of all that makes embeddings of images or of sounds, used or not; nothing of a model without
    it."""
    if _has_tower(model):
        for name, parameter in model.base_model.named_parameters():
            if not name.startswith(f"{_TEXT}."):
                yield parameter


def unused_parameters(model: PreTrainedModel) -> Iterator[torch.nn.Parameter]:
    """Of what reads no sample: a tower for sounds, and one for images that is not used."""
    if not reads_images(model):
        yield from tower_parameters(model)
        return
    for name, parameter in model.base_model.named_parameters():
        if name.startswith(("audio_tower.", "embed_audio.")):
            yield parameter


def last_hidden(
    model: PreTrainedModel,
    token_ids: Tensor,
    position_ids: Tensor,
    images: RowImages | None,
    **layout: Any,
) -> Tensor:
    """[T, H] last hidden states of a packed row, of a model that `reads_images`.

    Placeholders are found by their places: a policy may sample their token too.
    """
    base: Any = model.base_model
    embeddings: Tensor = model.get_input_embeddings()(token_ids[None])
    positions, more = position_ids[None], _of_tokens(model, token_ids, images)
    if images is None:
        embeddings = embeddings + _nothing(model)
    else:
        is_trained = any(parameter.requires_grad for parameter in tower_parameters(model))
        with torch.set_grad_enabled(is_trained and torch.is_grad_enabled()):
            found = base.get_image_features(**images.inputs, return_dict=True)
        made = torch.cat(found.pooler_output).to(embeddings.dtype)
        embeddings = embeddings.index_copy(1, images.places, made[images.sources][None])
        more |= _deep(found, images, len(token_ids))
        if images.positions is not None:
            # The first of four is for a mask, which packed rows do not have.
            positions = torch.cat([position_ids[None], images.positions.T])[:, None]
    hidden: Tensor = base.language_model(
        inputs_embeds=embeddings, position_ids=positions, use_cache=False, **more, **layout
    ).last_hidden_state
    return hidden[0]


def _of_tokens(
    model: PreTrainedModel, token_ids: Tensor, images: RowImages | None
) -> dict[str, Any]:
    """What layers read of tokens beside their embeddings; placeholders are padding there."""
    config: Any = model.config.get_text_config()
    if not getattr(config, "hidden_size_per_layer_input", None):
        return {}
    if images is not None:
        token_ids = token_ids.index_fill(0, images.places, config.pad_token_id)
    text: Any = text_part(model)
    return {"per_layer_inputs": text.get_per_layer_inputs(token_ids[None], None)}


def _deep(found: Any, images: RowImages, num_tokens: int) -> dict[str, Any]:
    """What some towers add to the first layers of the part for text."""
    features = getattr(found, "deepstack_features", None)
    if not features:
        return {}
    is_place = torch.zeros(1, num_tokens, dtype=torch.bool, device=images.places.device)
    is_place[0, images.places] = True
    return {
        "visual_pos_masks": is_place,
        "deepstack_visual_embeds": [feature[images.sources] for feature in features],
    }


def _nothing(model: PreTrainedModel) -> Tensor | float:
    """0, with a gradient of 0 to each trained parameter of the tower: ranks add up gradients of
    the same parameters, whether they have an image or not."""
    trained = [parameter for parameter in tower_parameters(model) if parameter.requires_grad]
    return sum((parameter.flatten()[:1].sum() * 0.0 for parameter in trained), 0.0)


@dataclass(frozen=True)
class TowerFlops:
    """Operations of a tower: forward alone where it is frozen, which makes them a third."""

    per_patch: float
    per_pair: float
    """Of one layer, for one pair of patches of an image."""
    per_pooled: float
    """For one pair of a patch and an embedding of an image: some take means by a product."""
    patches: int
    """Of which one embedding is made."""
    windows: tuple[int | None, ...]
    """Of each layer the patches that attend to one another; None means those of an image. Windows
    at its edges are counted as whole ones."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> TowerFlops | None:
        """Counts weights; None for a model that reads text alone."""
        if not reads_images(model):
            return None
        config: Any = model.config.vision_config
        base: Any = model.base_model
        pools = hasattr(config, "pooling_kernel_size")
        patches = merged_patches(config.to_dict()) ** 2
        is_trained = any(parameter.requires_grad for parameter in tower_parameters(model))
        each, weights = 6 if is_trained else 2, 0.0
        parts = (base.vision_tower, base.embed_vision) if pools else (base.visual,)
        for part in parts:
            for name, it in part.named_parameters():
                if it.ndim > 1 and "pos_embed" not in name and "position_embedding" not in name:
                    is_after = "merger" in name or part is not parts[0]
                    weights += it.numel() / (patches if is_after else 1)
        depth = config.num_hidden_layers if pools else config.depth
        heads = config.num_attention_heads * config.head_dim if pools else config.hidden_size
        window, whole = getattr(config, "window_size", None), range(depth)
        whole = whole if window is None else config.fullatt_block_indexes
        inside = None if window is None else (window // config.patch_size) ** 2
        return cls(
            per_patch=each * weights,
            per_pair=2.0 * each * heads,
            per_pooled=(4.0 if is_trained else 2.0) * config.hidden_size if pools else 0.0,
            patches=patches,
            windows=tuple(None if layer in whole else inside for layer in range(depth)),
        )

    def num_patches(self, micro_batch: MicroBatch) -> int:
        """Of the different images of a micro batch."""
        return image_tokens(micro_batch.images) * self.patches

    def of_images(self, micro_batch: MicroBatch) -> float:
        """Each different image goes through the tower once."""
        images = {span.sha256: span.length for spans in micro_batch.images for span in spans}
        sizes = [length * self.patches for length in images.values()]
        pairs = sum(size * min(size, window or size) for size in sizes for window in self.windows)
        pooled = sum(size * size // self.patches for size in sizes)
        return self.per_patch * sum(sizes) + self.per_pair * pairs + self.per_pooled * pooled
