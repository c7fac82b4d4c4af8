"""Biases of routing that learn: moved with each batch, published, saved, resumed and exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import new_run
from model_families import CPU, family_config, family_folder, samples
from ranked_families import told
from torch import Tensor

from gradus.config import TrainerConfig, learning
from gradus.errors import ConfigError
from gradus.files import DurableFiles
from gradus.run.checkpoints import CheckpointStore
from gradus.trainer.checkpoint.saving import resume
from gradus.trainer.checkpoint.training_state import PART, load_weights
from gradus.trainer.distributed import World
from gradus.trainer.learner import Learner
from gradus.trainer.model.cpu.routing import is_bias, routing_biases
from gradus.trainer.model.load import load_model
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.publish import serving_tensors
from gradus.trainer.throughput import Stopwatch
from gradus.wire.packing import pack

pytestmark = pytest.mark.torch

RATE = 0.03125
BASE = "glm4_moe"


def learner_of(world: World, rate: float = RATE, *, is_resumed: bool = False) -> Learner:
    settings = TrainerConfig(compute_dtype="float32", router_bias_rate=rate)
    base, loss = family_config(family_folder(BASE)), learning.DppoConfig()
    return Learner.build(base, settings, loss, max_steps=4, world=world, is_resumed=is_resumed)


def learn(learner: Learner, step: int) -> None:
    batch = [told(it) for it in samples((65, 9 + step))]
    learner.learn(step, pack(batch, max_tokens=128, num_ranks=1), Stopwatch())


def biases(learner: Learner) -> list[Tensor]:
    return [it.clone() for it in routing_biases(learner.policy).values()]


def test_a_batch_moves_biases_by_the_rate_and_the_next_version_has_them(world: World) -> None:
    learner = learner_of(world)
    before = biases(learner)
    learn(learner, 0)
    for now, was in zip(biases(learner), before, strict=True):
        assert set((now - was).tolist()) <= {-RATE, 0.0, RATE}
        assert not torch.equal(now, was)
    published = dict(serving_tensors(learner.model, torch.bfloat16))
    stored = [it for name, it in published.items() if name.endswith("e_score_correction_bias")]
    assert all(map(torch.equal, stored, biases(learner)))
    assert len(stored) == len(before) == 3


def test_at_rate_0_and_in_a_step_that_is_skipped_biases_stay(world: World) -> None:
    learner = learner_of(world, 0.0)
    before = biases(learner)
    learn(learner, 0)
    assert all(map(torch.equal, biases(learner), before))
    learner = learner_of(world)
    with torch.no_grad():
        learner.model.get_output_embeddings().weight.fill_(float("inf"))  # type: ignore[no-untyped-call]
    learn(learner, 0)
    assert learner.optimizer.num_skipped == 1
    assert all(map(torch.equal, biases(learner), before))


def test_a_resumed_run_moves_them_on_bit_by_bit_whatever_its_rate(
    tmp_path: Path, world: World
) -> None:
    checkpoints, learner = CheckpointStore(new_run(tmp_path), 1), learner_of(world)
    learn(learner, 0)
    learner.state.snapshot(1, {}).write(checkpoints.staging(1), 0, DurableFiles())
    checkpoints.commit(1, ["trainer"])
    saved = biases(learner)
    learn(learner, 1)
    again = learner_of(world, is_resumed=True)
    resume(again.state, CheckpointStore(checkpoints.run_dir, 2), 1)
    assert all(map(torch.equal, biases(again), saved))
    learn(again, 1)
    assert all(map(torch.equal, biases(again), biases(learner)))
    still = learner_of(world, 0.0, is_resumed=True)
    resume(still.state, CheckpointStore(checkpoints.run_dir, 2), 1)
    learn(still, 1)
    assert all(map(torch.equal, biases(still), saved))
    exported = PolicyModel(load_model(family_config(family_folder(BASE)), CPU))
    checkpoint = CheckpointStore(checkpoints.run_dir, term=0).latest()
    assert checkpoint is not None
    load_weights(exported, checkpoint.part(PART))
    assert all(map(torch.equal, routing_biases(exported).values(), saved))


def test_a_checkpoint_without_biases_leaves_those_of_the_model(
    tmp_path: Path, world: World
) -> None:
    checkpoints, learner = CheckpointStore(new_run(tmp_path), 1), learner_of(world)
    learn(learner, 0)
    whole = learner.state.snapshot(1, {})
    pieces = {name: it for name, it in whole.pieces.items() if not is_bias(name)}
    assert len(whole.pieces) - len(pieces) == 3
    replace(whole, pieces=pieces).write(checkpoints.staging(1), 0, DurableFiles())
    checkpoints.commit(1, ["trainer"])
    again = learner_of(world, is_resumed=True)
    resume(again.state, CheckpointStore(checkpoints.run_dir, 2), 1)
    assert all(map(torch.equal, biases(again), biases(learner_of(world))))


def test_a_model_without_biases_is_refused(world: World) -> None:
    settings = TrainerConfig(compute_dtype="float32", router_bias_rate=RATE)
    base, loss = family_config(family_folder("qwen3_moe")), learning.DppoConfig()
    with pytest.raises(ConfigError, match="router_bias_rate"):
        Learner.build(base, settings, loss, max_steps=1, world=world)
