"""The contract of a family that reads images: in a row each sample is as it is alone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_families import (
    CPU,
    IMAGE,
    IMAGE_FAMILIES,
    QWENS,
    adapted_with_images,
    build_image_family,
    drawn,
    image_folder,
    image_logprobs,
    image_policy,
    metered_tower,
    own_image_logprobs,
    pixels_for,
    plain_image_model,
    row_of,
    seen,
    turn_experts,
    usual,
)
from model_families import FAMILIES, distance, family_config, gradients, mean_distance, unpublished
from msgspec import structs
from ranked_families import told
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from gradus.config import AdamWConfig, TrainerConfig, learning
from gradus.config.families import TURNED
from gradus.errors import CorruptStateError, ProtocolError
from gradus.files import DurableFiles
from gradus.trainer.checkpoint.saving import PART
from gradus.trainer.checkpoint.training_state import Origin, TrainingState
from gradus.trainer.distributed import World, whole_tensor
from gradus.trainer.images.pixels import Made, Pixels, RowRule
from gradus.trainer.images.tower import text_part, tower_parameters
from gradus.trainer.losses import Dppo
from gradus.trainer.model.build import build_policy
from gradus.trainer.model.cpu.routing import Routers
from gradus.trainer.model.layers import decoder_layers
from gradus.trainer.model.load import load_model
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.optimizer.optimizer import PolicyOptimizer
from gradus.trainer.publish import serving_tensors
from gradus.trainer.step import GradientStep
from gradus.trainer.tensors import ReadyMicroBatch
from gradus.trainer.throughput import ModelFlops
from gradus.wire.images import ImageSpan
from gradus.wire.micro_batch import MicroBatch
from gradus.wire.packing import pack
from gradus.wire.sample import Sample

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
    # The image of two rows and four columns, in the third sample.
    pixels = row.images.images[1].tensors["pixel_values"]
    assert len(pixels) == 8
    pixels += 1
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


def test_rows_share_an_image_until_the_last_of_them_is_gone() -> None:
    made: list[str] = []

    def make(sha256: str) -> Made:
        made.append(sha256)
        return drawn(sha256)

    model = load_model(family_config(image_folder("qwen3_vl")), CPU)
    pixels = Pixels(make, RowRule.of(model))
    row = MicroBatch.join([seen(40, (5, (4, 6))).sample])
    first, second = pixels.of(row), pixels.of(row)
    assert first is not None
    assert second is not None
    assert first.images[0] is second.images[0]
    del first
    assert pixels.of(row) is not None
    assert len(made) == 1
    del second
    pixels.of(row)
    assert len(made) == 2


@torch.no_grad()
@pytest.mark.parametrize("case", QWENS)
def test_pixels_held_in_the_compute_dtype_are_what_the_tower_rounds_them_to(case: str) -> None:
    """That of Gemma 4 computes with them before it rounds: they are rounded first there, as the
    engine rounds them."""
    policy = image_policy(case, torch.bfloat16)
    row = MicroBatch.join([it.sample for it in usual()])
    scores = []
    for dtype in (torch.float32, torch.bfloat16):
        pixels = pixels_for(policy.model, dtype)
        ready = ReadyMicroBatch.of(row, CPU, pixels)
        assert ready.tensors.images is not None
        assert ready.tensors.images.inputs["pixel_values"].dtype == dtype
        assert ready.tensors.images.inputs["image_grid_thw"].dtype == torch.int64
        scores.append(policy(ready.tensors).logprobs)
    assert torch.equal(*scores)


def test_an_image_with_other_placeholders_than_the_processor_makes_is_refused() -> None:
    model = load_model(family_config(image_folder("qwen3_vl")), CPU)
    sample = seen(40, (5, (4, 6))).sample
    short = structs.replace(sample, images=[ImageSpan(sample.images[0].sha256, 5, 5)])
    with pytest.raises(
        ProtocolError, match="has 5 placeholders, and the trainer's processor makes 6"
    ):
        pixels_for(model).of(MicroBatch.join([short]))


def test_the_layers_of_a_tower_are_no_decoder_layers() -> None:
    model = load_model(family_config(image_folder("qwen2_5_vl")), CPU)
    assert len(decoder_layers(model)) == 4


def one_image_rank() -> list[Sample]:
    """Packed for two ranks, one of which has no image."""
    return [told(it.sample) for it in (seen(120, (5, (4, 6)), (60, (2, 4))), seen(118))]


@pytest.mark.parametrize("trains", [False, True], ids=["frozen tower", "trained tower"])
@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"context_parallel_size": 2},
        {"context_parallel_size": 2, "context_parallel_style": "ring"},
    ],
    ids=["data", "context", "ring"],
)
@pytest.mark.parametrize("case", ["qwen3_vl", "gemma4 with images"])
def test_two_ranks_of_which_one_has_no_image_give_the_gradient_of_one(
    ranks: Any, world: World, case: str, parallel: dict[str, Any], trains: bool
) -> None:
    batch, settings = one_image_rank(), TrainerConfig(train_vision=trains)
    assert [bool(it.images) for (it,) in pack(batch, max_tokens=128, num_ranks=2)] == [True, False]
    policy = build_policy(family_config(image_folder(case)), settings, world, torch.float32)
    (micro_batches,) = pack(batch, max_tokens=128, num_ranks=1)
    pixels = pixels_for(policy.model)
    ready = [ReadyMicroBatch.of(it, CPU, pixels) for it in micro_batches]
    GradientStep(policy, Dppo(learning.DppoConfig()), world).run(ready)
    own = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    grads = {name: whole_tensor(it) for name, it in own.items()}
    tower = "vision_tower" if case.startswith("gemma4") else "visual"
    assert any(tower in name and bool(it.any()) for name, it in grads.items()) == trains
    norm = torch.stack([it.norm() for it in grads.values()]).norm().item()
    _, found = ranks.run(
        [batch], max_tokens=128, model=image_folder(case), train_vision=trains, **parallel
    )
    assert found.keys() == grads.keys()
    for name, gradient in grads.items():
        assert abs(found[name] - gradient.numpy()).max() <= 1e-6 * norm, name


@pytest.mark.parametrize("case", IMAGE_FAMILIES)
def test_a_model_with_its_tower_is_published_bit_by_bit_as_it_was_read(case: str) -> None:
    assert unpublished(image_folder(case)) == []


def test_in_bfloat16_a_frozen_tower_is_kept_and_published_in_bfloat16(world: World) -> None:
    base = family_config(image_folder("qwen3_vl"))
    policy = build_policy(base, TrainerConfig(), world, torch.bfloat16)
    dtypes = {it.dtype for it in tower_parameters(policy.model)}
    assert dtypes == {torch.bfloat16}
    stored = load_file(image_folder("qwen3_vl") / "model.safetensors")
    for name, tensor in serving_tensors(policy.model, torch.bfloat16):
        assert torch.equal(tensor, stored[name].to(torch.bfloat16)), name


def test_a_step_leaves_a_frozen_tower_alone_and_a_resumed_one_reads_it_again(
    world: World, tmp_path: Path
) -> None:
    base = family_config(image_folder("qwen3_vl"))

    def state_of(*, is_resumed: bool) -> TrainingState:
        policy = build_policy(base, TrainerConfig(), world, torch.float32, is_resumed=is_resumed)
        rule = PolicyOptimizer(
            policy, AdamWConfig(lr=1e-2), max_steps=2, max_skipped_steps=1, world=world
        )
        origin = Origin(model={"name": "m"}, compute_dtype="float32")
        return TrainingState(policy, rule, world, origin)

    state = state_of(is_resumed=False)
    before = {name: whole_tensor(p).clone() for name, p in state.policy.named_parameters()}
    pixels = pixels_for(state.policy.model)  # type: ignore[arg-type]
    row = ReadyMicroBatch.of(MicroBatch.join(one_image_rank()), CPU, pixels)
    GradientStep(state.policy, Dppo(learning.DppoConfig()), world).run([row])  # type: ignore[arg-type]
    state.optimizer.step(0)
    after = {name: whole_tensor(p) for name, p in state.policy.named_parameters()}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".visual." not in name}
    state.snapshot(1, {}).write(tmp_path, 0, DurableFiles())
    again = state_of(is_resumed=True)
    again.load(tmp_path / PART)
    found = {name: whole_tensor(p) for name, p in again.policy.named_parameters()}
    assert [name for name in after if not torch.equal(found[name], after[name])] == []


def test_weights_of_the_part_that_reads_text_are_refused(tmp_path: Path) -> None:
    shutil.copytree(image_folder("qwen3_vl"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    kept = {name: it for name, it in load_file(file).items() if "visual" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(CorruptStateError, match="hold none of its tower for images"):
        load_model(family_config(tmp_path / "model"), CPU)


@pytest.mark.parametrize("case", ["qwen3_vl_moe", "qwen3_5_moe with images"])
def test_adapters_of_experts_compute_what_the_merged_model_does_with_images(case: str) -> None:
    found, leaves = adapted_with_images(case, ["experts", "q_proj"])
    assert found <= 1e-5
    assert leaves == ["down_proj", "gate_up_proj", "q_proj"]


@pytest.mark.parametrize("turned", [True, False], ids=["as published", "as transformers saves"])
def test_experts_are_read_in_both_layouts_and_published_as_the_models_of_the_hub(
    turned: bool, tmp_path: Path
) -> None:
    shutil.copytree(image_folder(TURNED), tmp_path / "model")
    if not turned:
        turn_experts(tmp_path / "model")
    policy = image_policy(tmp_path / "model")
    published = dict(serving_tensors(policy.model, torch.float32))
    for name, tensor in load_file(image_folder(TURNED) / "model.safetensors").items():
        assert torch.equal(published[name], tensor), name
    gate_up, down = (
        published[f"model.language_model.layers.0.mlp.experts.{it}"].shape
        for it in ("gate_up_proj", "down_proj")
    )
    assert (gate_up, down) == ((8, 128, 2 * 96), (8, 96, 128))
    with torch.no_grad():
        found = image_logprobs(policy, usual())
        assert distance(found, own_image_logprobs(plain_image_model(TURNED), usual())) <= 2e-6


@pytest.mark.parametrize("case", ["qwen3_vl_moe", "qwen3_5_moe with images"])
def test_a_mixture_takes_the_experts_that_the_engine_chose_for_text_and_images(case: str) -> None:
    model = load_model(family_config(image_folder(case)), CPU)
    policy = PolicyModel(model, routers=Routers.of(model))
    assert policy.routers is not None
    assert sorted(policy.routers.by_layer) == [0, 1, 2, 3]
    micro_batch = MicroBatch.join([it.sample for it in usual()])
    pixels = Pixels(drawn, RowRule.of(model))

    def scored(experts: Any) -> torch.Tensor:
        arrays = structs.replace(micro_batch.arrays, experts=experts)
        told_batch = structs.replace(micro_batch, arrays=arrays)
        with torch.no_grad():
            return policy(ReadyMicroBatch.of(told_batch, CPU, pixels).tensors).logprobs

    chosen = np.zeros((len(micro_batch), 4, policy.routers.num_chosen), np.int16)

    def note(layer: int) -> Any:
        def hook(_: Any, __: Any, outputs: Any) -> None:
            chosen[:, layer] = outputs[2].numpy()

        return hook

    hooks = [it.register_forward_hook(note(n)) for n, it in policy.routers.by_layer.items()]
    own = scored(None)
    for hook in hooks:
        hook.remove()
    assert torch.equal(scored(chosen), own)
    assert float((scored((chosen + 1) % 8) - own).abs().max()) > 1e-3


@pytest.mark.parametrize("case", ["qwen3_vl", "qwen2_5_vl", "gemma4 with images"])
def test_adapters_compute_what_the_merged_model_does_and_leave_the_tower(case: str) -> None:
    found, leaves = adapted_with_images(case)
    assert found <= 1e-5
    projections = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert [it for it in leaves if "per_layer" not in it] == projections


def test_what_reads_sounds_is_never_trained(world: World, tmp_path: Path) -> None:
    sounds = FAMILIES["gemma4 with its tower"][1]["audio_config"]
    build_image_family(tmp_path, "gemma4 with images", audio_config=sounds)
    settings = TrainerConfig(train_vision=True)
    policy = build_policy(family_config(tmp_path), settings, world, torch.bfloat16)
    frozen = {n for n, it in policy.model.named_parameters() if not it.requires_grad}
    assert frozen == {n for n, _ in policy.model.named_parameters() if "audio" in n} != set()
    assert unpublished(tmp_path) == []


@torch.no_grad()
def test_of_an_image_gemma_4_reads_padding_in_each_layer_and_of_its_token_what_it_is() -> None:
    """Where an image lies no input of a layer depends on the placeholder's token, which a policy
    may also write itself."""
    policy, found = image_policy("gemma4 with images"), [seen(40, (5, (4, 6)))]
    before = image_logprobs(policy, found)[0]
    text: Any = text_part(policy.model)
    text.embed_tokens_per_layer.weight[IMAGE] += 1
    assert torch.equal(image_logprobs(policy, found)[0], before)
    ids = np.array(found[0].sample.arrays.token_ids)
    ids[20] = IMAGE
    written = [replace(found[0], sample=found[0].sample.with_arrays(token_ids=ids))]
    after = image_logprobs(policy, written)[0]
    text.embed_tokens_per_layer.weight[IMAGE] += 1
    assert not torch.equal(image_logprobs(policy, written)[0], after)


def test_a_batch_with_images_is_refused_by_a_model_of_text() -> None:
    with pytest.raises(ProtocolError, match="the model reads text alone"):
        ReadyMicroBatch.of(MicroBatch.join([seen(40, (5, (4, 6))).sample]), CPU)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("case", IMAGE_FAMILIES)
def test_operations_of_a_tower_are_those_that_torch_counts(case: str, trains: bool) -> None:
    assert metered_tower(case, trains=trains) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("case", IMAGE_FAMILIES)
def test_operations_of_the_part_that_reads_text_are_those_of_a_model_of_text(case: str) -> None:
    config = load_model(family_config(image_folder(case)), CPU).config
    flops = ModelFlops.of(plain_image_model(case))
    text = AutoModel.from_config(config.text_config)
    weights = sum(p.numel() for n, p in text.named_parameters() if p.ndim == 2 and "embed" not in n)
    chosen = getattr(config.text_config, "num_experts_per_tok", 0)
    experts = sum(p[0].numel() for p in text.parameters() if p.ndim == 3 and len(p) == 8)
    has_states = config.model_type.startswith("qwen3_5")
    assert has_states or flops.per_token == 6 * (weights + chosen * experts)
    assert len(flops.windows) == (1 if has_states else 4)
