"""The contract of a family that reads images: in a row each sample is as it is alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from image_families import (
    CPU,
    IMAGE,
    IMAGE_FAMILIES,
    drawn,
    image_folder,
    image_logprobs,
    image_policy,
    own_image_logprobs,
    plain_image_model,
    row_of,
    seen,
    usual,
)
from model_families import distance, family_config, gradients, mean_distance
from msgspec import structs

from gradus.errors import ProtocolError
from gradus.trainer.images.pixels import Pixels, RowRule
from gradus.trainer.model.layers import decoder_layers
from gradus.trainer.model.load import load_model
from gradus.wire.images import ImageSpan
from gradus.wire.micro_batch import MicroBatch

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("case", IMAGE_FAMILIES)
def test_a_row_with_images_is_each_sample_alone(case: str) -> None:
    plain, policy, found = plain_image_model(case), image_policy(case), usual()
    ours, own = image_logprobs(policy, found), own_image_logprobs(plain, found)
    allowed = 2e-6
    if distance(ours, own) > allowed:
        with torch.no_grad():
            wide = own_image_logprobs(plain_image_model(case).double(), found)
        allowed = max(allowed, 2 * distance(wide, own))
    assert distance(ours, own) <= allowed
    by_ours, by_own = gradients(policy.model, ours), gradients(plain, own)
    assert by_ours.keys() == by_own.keys() == dict(plain.named_parameters()).keys()
    for name, gradient in by_own.items():
        torch.testing.assert_close(by_ours[name], gradient, rtol=0, atol=allowed)


@pytest.mark.parametrize("case", IMAGE_FAMILIES)
@torch.no_grad()
def test_in_bfloat16_images_are_no_further_from_float32_than_by_the_model_itself(case: str) -> None:
    found = usual()
    exact = own_image_logprobs(plain_image_model(case), found)
    own = own_image_logprobs(plain_image_model(case, torch.bfloat16), found)
    ours = image_logprobs(image_policy(case, torch.bfloat16), found)
    assert mean_distance(ours, exact) <= 1.2 * mean_distance(own, exact)


@torch.no_grad()
def test_an_image_is_seen_by_its_own_sample_alone_and_by_what_comes_after() -> None:
    policy, found = image_policy("qwen3_vl"), usual()
    lengths = [len(it.sample) for it in found]
    row = row_of(policy.model, found)
    assert row.images is not None
    before = torch.split(policy(row).logprobs, lengths)
    pixels = row.images.inputs["pixel_values"]
    pixels[24 : 24 + 8] += 1  # the image of two rows and four columns, in the third sample
    after = torch.split(policy(row).logprobs, lengths)
    changed = [one != other for one, other in zip(before, after, strict=True)]
    assert [bool(it.any()) for it in changed] == [False, False, True, False, False]
    assert not changed[2][:5].any()
    assert changed[2][5:30].all()


@torch.no_grad()
def test_a_placeholder_that_the_policy_sampled_is_a_token_like_any_other() -> None:
    """Its embedding is read, here one that equals another token's."""
    policy = image_policy("qwen3_vl")
    weight = policy.model.get_input_embeddings().weight
    weight[IMAGE] = weight[3]
    ids = np.array(seen(40, (5, (4, 6))).sample.arrays.token_ids)
    scores = []
    for token in (3, IMAGE):
        ids[20] = token
        it = seen(40, (5, (4, 6)))
        it = replace(it, sample=it.sample.with_arrays(token_ids=ids.copy()))
        scores.append(image_logprobs(policy, [it])[0])
    differs = (scores[0] != scores[1]).nonzero().flatten()
    assert len(differs) == 1  # itself, as a target


def test_an_image_of_several_samples_goes_through_the_tower_once() -> None:
    policy = image_policy("qwen3_vl")
    row = row_of(policy.model, usual())
    assert row.images is not None
    assert row.images.inputs["image_grid_thw"].tolist() == [[1, 4, 6], [1, 2, 4], [1, 6, 4]]
    assert len(row.images.places) == 6 + 2 + 6 + 6


def test_an_image_with_other_placeholders_than_the_processor_makes_is_refused() -> None:
    model = load_model(family_config(image_folder("qwen3_vl")), CPU)
    sample = seen(40, (5, (4, 6))).sample
    short = structs.replace(sample, images=[ImageSpan(sample.images[0].sha256, 5, 5)])
    with pytest.raises(
        ProtocolError, match="has 5 placeholders, and the trainer's processor makes 6"
    ):
        Pixels(drawn, RowRule.of(model)).of(MicroBatch.join([short]))


def test_the_layers_of_a_tower_are_no_decoder_layers() -> None:
    model = load_model(family_config(image_folder("qwen2_5_vl")), CPU)
    assert len(decoder_layers(model)) == 4
