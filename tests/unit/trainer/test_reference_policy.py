"""The trainer scores with the initial weights what the policy samples: GRPO as it was published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import build_micro_batch, build_sample
from configs import build_loss_config
from msgspec import structs
from transformers import AutoModelForCausalLM

from gradus.config import ModelConfig, ServedLoraConfig, TrainerConfig
from gradus.trainer.distributed import World
from gradus.trainer.learner import Learner
from gradus.trainer.losses import LossInputs, LossOutput
from gradus.trainer.model.lora import adapted_layers
from gradus.trainer.tensors import ReadyMicroBatch, TrainTensors
from gradus.trainer.throughput import Stopwatch
from gradus.wire.packing import pack
from gradus.wire.sample import Sample
from gradus.wire.versions import VersionSpan

pytestmark = pytest.mark.torch

TOLERANCE = 2e-5
"""Float32 against float64, relative to the norm of all gradients."""
MOVED = 3.0
"""What training is to have done to the weights: it multiplied all matrices."""
COEFFICIENT = 0.5


def build_learner(model: Path, world: World, estimator: str, **settings: Any) -> Learner:
    loss = build_loss_config(
        "ppo_clip", reference_kl_coefficient=COEFFICIENT, reference_kl_estimator=estimator
    )
    return Learner.build(
        ModelConfig(name=str(model)),
        TrainerConfig(compute_dtype="float32", loss=loss, **settings),
        loss,
        max_steps=2,
        world=world,
    )


@torch.no_grad()
def move(parameters: Any) -> None:
    for parameter in parameters:
        if parameter.ndim > 1:
            parameter.mul_(MOVED)


def without_references(samples: list[Sample]) -> list[Sample]:
    for sample in samples:
        sample.arrays.reference_logprobs[:] = np.nan
        del sample.arrays.loss_weights["ref_kl"]
    return samples


@torch.no_grad()
def initial_logprobs(folder: Path, sample: Sample) -> np.ndarray:
    """In float64, by transformers' own forward: [T], NaN for the first token."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    token_ids = torch.tensor(sample.arrays.token_ids.astype(np.int64))[None]
    logits = model(input_ids=token_ids, use_cache=False).logits[0, :-1]
    temperatures = torch.tensor(sample.arrays.temperatures[1:].astype(np.float64))
    log_p = torch.log_softmax(logits / temperatures[:, None], dim=-1)
    chosen = log_p.gather(1, token_ids[0, 1:, None]).squeeze(1)
    return np.concatenate([[np.nan], chosen.numpy()])


def scored(samples: list[Sample], folder: Path) -> list[Sample]:
    for sample in samples:
        mask = sample.arrays.loss_mask
        sample.arrays.reference_logprobs[mask] = initial_logprobs(folder, sample)[mask]
    return samples


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("max_tokens", [24, 200])
def test_one_step_has_the_loss_and_gradient_of_an_independent_float64_computation(
    tiny_model: Path,
    world: World,
    build_reference: Any,
    ragged_samples: Any,
    estimator: str,
    max_tokens: int,
) -> None:
    """Packed or not, at mixed temperatures, with weights that have moved from the initial ones."""
    learner = build_learner(tiny_model, world, estimator)
    move(p for p in learner.policy.parameters() if p.requires_grad)
    samples = without_references(ragged_samples([9, 17, 4, 12]))
    [micro_batches] = pack(samples, max_tokens=max_tokens, num_ranks=1)
    [batch] = learner._scored([micro_batches], Stopwatch())
    found = learner.gradients.run(batch)
    gradients = {
        name: p.grad.full_tensor().numpy()
        for name, p in learner.model.named_parameters()
        if p.grad is not None
    }
    independent = build_reference(tiny_model)
    move(independent.model.parameters())
    options = {"reference_kl_coefficient": COEFFICIENT, "reference_kl_estimator": estimator}
    total, expected = independent.loss(scored(samples, tiny_model), "ppo_clip", **options)
    norm = sum(float((it**2).sum()) for it in expected.values()) ** 0.5
    assert found.total == pytest.approx(total, rel=1e-5)
    assert found.metrics["loss/reference_kl/mean"] > 0.1
    worst = max(float(np.abs(gradients[name] - expected[name]).max()) for name in expected)
    assert worst < TOLERANCE * norm


def test_with_adapters_the_reference_is_the_policy_without_them(
    tiny_model: Path, world: World, ragged_samples: Any
) -> None:
    """No second copy; what moved the adapters moves the policy alone."""
    learner = build_learner(tiny_model, world, "k3", lora=ServedLoraConfig(rank=4))
    assert learner.reference is not None
    assert learner.reference._policy is learner.policy
    torch.manual_seed(1)
    for layer in adapted_layers(learner.model).values():
        layer.lora_B.data.to_local().normal_(std=0.2)
    samples = without_references(ragged_samples([9, 17, 4]))
    micro_batch = build_micro_batch(samples)
    [ready] = learner.reference.score([micro_batch])
    by_hand = np.concatenate([initial_logprobs(tiny_model, sample) for sample in samples])
    is_member = ready.tensors.members("rl").numpy()
    assert is_member.any()
    found = ready.tensors.reference_logprobs.numpy()
    np.testing.assert_allclose(found[is_member], by_hand[is_member], atol=2e-5)
    with torch.no_grad():
        trained = learner.policy(ready.tensors).logprobs.numpy()
    assert np.abs(trained[is_member] - found[is_member]).max() > 0.05


def test_a_logprob_that_a_served_model_gave_stays(
    tiny_model: Path, world: World, ragged_samples: Any
) -> None:
    learner = build_learner(tiny_model, world, "k2")
    assert learner.reference is not None
    sample = without_references(ragged_samples([12]))[0]
    first = int(np.flatnonzero(sample.arrays.loss_weights["rl"])[0])
    sample.arrays.reference_logprobs[first] = -0.125
    [ready] = learner.reference.score([build_micro_batch([sample])])
    assert float(ready.tensors.reference_logprobs[first]) == -0.125
    assert bool(ready.tensors.is_scored[ready.tensors.members("rl")].all())


@pytest.mark.parametrize("parallel", [{}, {"context_parallel_size": 2}, {"replicate_size": 2}])
def test_ranks_score_as_one_process_does(
    ranks: Any, tmp_path: Path, ragged_samples: Any, parallel: dict[str, int]
) -> None:
    from gradus.testing.tiny_model import build_tiny_model

    model = build_tiny_model(tmp_path / "m", hidden_size=128, num_layers=2, dtype=torch.float32)
    loss = {"type": "ppo_clip", "options": {"reference_kl_coefficient": COEFFICIENT}}
    by_trainer = without_references(ragged_samples([14, 9, 22, 5, 17]))
    found, gradients = ranks.run(
        [by_trainer], model=model, loss=loss, moved=MOVED, max_tokens=32, **parallel
    )
    served = scored(without_references(ragged_samples([14, 9, 22, 5, 17])), model)
    answer, expected = ranks.run([served], model=model, loss=loss, moved=MOVED, max_tokens=70)
    assert answer["metrics"]["loss/reference_kl/mean"] > 0.1
    assert found["total"] == pytest.approx(answer["total"], rel=1e-5)
    norm = sum(float((it.astype(np.float64) ** 2).sum()) for it in expected.values()) ** 0.5
    for name, gradient in expected.items():
        assert float(np.abs(gradients[name] - gradient).max()) < TOLERANCE * norm, name


def test_recomputed_logprobs_are_of_the_weights_before_the_first_update(
    tiny_model: Path, world: World, ragged_samples: Any
) -> None:
    """Two updates of one batch, each against the same proximal policy, which a float64 forward of
    the initial weights gives; and how far engine and staleness are from it."""
    loss = build_loss_config("ppo_clip", importance_sampling="truncated", importance_cap=1.5)
    learner = Learner.build(
        ModelConfig(name=str(tiny_model)),
        TrainerConfig(compute_dtype="float32", loss=loss, recompute_logprobs=True),
        loss,
        max_steps=9,
        world=world,
    )
    samples = without_references(ragged_samples([9, 17, 12, 8]))
    spans = [VersionSpan(5, 5), VersionSpan(3, 5), VersionSpan(5, 5), VersionSpan(4, 4)]
    samples = [structs.replace(it, versions=v) for it, v in zip(samples, spans, strict=True)]
    parts = [[build_micro_batch(samples[:2])], [build_micro_batch(samples[2:])]]
    kls: dict[bool, list[float]] = {True: [], False: []}
    for sample, span in zip(samples, spans, strict=True):
        is_member = sample.arrays.loss_weights["rl"] != 0
        is_member[0] = False
        drift = (initial_logprobs(tiny_model, sample) - sample.arrays.sampling_logprobs)[is_member]
        kls[span.oldest < 5] += (np.exp(drift) - drift - 1).tolist()
    found, _ = learner._recomputed(5, parts, Stopwatch())
    for part, mine in zip(found, (samples[:2], samples[2:]), strict=True):
        tensors = part[0].tensors  # type: ignore[attr-defined]
        by_hand = np.concatenate([initial_logprobs(tiny_model, sample) for sample in mine])
        is_member = tensors.members("rl").numpy()
        proximal = tensors.proximal_logprobs.numpy()
        np.testing.assert_allclose(proximal[is_member], by_hand[is_member], atol=2e-5)
    learned, _ = learner.learn(5, parts, Stopwatch())
    assert learned.metrics["loss/engine_kl/mean"] == pytest.approx(np.mean(kls[False]), rel=1e-4)
    assert learned.metrics["loss/stale_kl/mean"] == pytest.approx(np.mean(kls[True]), rel=1e-4)


def test_with_one_update_no_token_is_clipped_against_the_proximal_policy(
    tiny_model: Path, world: World, ragged_samples: Any
) -> None:
    def dropped(*, recompute: bool) -> float:
        loss = build_loss_config("ppo_clip")
        settings = TrainerConfig(compute_dtype="float32", loss=loss, recompute_logprobs=recompute)
        base = ModelConfig(name=str(tiny_model))
        learner = Learner.build(base, settings, loss, max_steps=2, world=world)
        batch = [[build_micro_batch(ragged_samples([9, 17, 12, 8]))]]
        return learner.learn(0, batch, Stopwatch())[0].metrics["loss/dropped_tokens/share"]

    assert dropped(recompute=False) > 0.0
    assert dropped(recompute=True) == 0.0


class Distant:
    """A loss of the user's own that reads reference logprobs."""

    needs_reference_logprobs = True

    def __call__(self, inputs: LossInputs) -> LossOutput:
        distance = inputs.policy_logprobs - inputs.reference_logprobs
        return LossOutput(torch.where(inputs.mask & inputs.is_scored, distance, 0.0))


def test_a_loss_of_one_s_own_asks_for_the_reference_by_saying_so(
    tiny_model: Path, world: World, ragged_samples: Any
) -> None:
    loss = build_loss_config(f"{__name__}:Distant")
    settings = TrainerConfig(compute_dtype="float32", loss=loss)
    base = ModelConfig(name=str(tiny_model))
    learner = Learner.build(base, settings, loss, max_steps=2, world=world)
    move(learner.policy.parameters())
    samples = without_references(ragged_samples([9, 17]))
    learned, _ = learner.learn(0, [[build_micro_batch(samples)]], Stopwatch())
    assert learned.metrics["loss/rl/mean"] != 0.0


def test_scored_tensors_stay_in_main_memory(
    tiny_model: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step moves to the device is freed there after each micro batch."""
    learner = build_learner(tiny_model, world, "k3")
    moved: list[torch.Tensor] = []

    def on_device(tensors: TrainTensors, _: torch.device) -> TrainTensors:
        moved.append(tensors.token_ids.clone())
        return replace(tensors, token_ids=moved[-1])

    monkeypatch.setattr(TrainTensors, "on", on_device)
    ready = [ReadyMicroBatch.of(build_micro_batch([build_sample(9)]), world.device)]
    [[scored_batch]] = learner._scored([ready], Stopwatch())
    assert isinstance(scored_batch, ReadyMicroBatch)
    assert len(moved) == 1
    assert scored_batch.tensors.token_ids is ready[0].tensors.token_ids
    assert scored_batch.tensors.reference_logprobs.device.type == "cpu"
