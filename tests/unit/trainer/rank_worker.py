"""One rank of a small world that answers commands, one JSON line each, which it reads from a pipe.

The fixture `ranks` starts it: the ranks stay alive over many examples of a property test. Each
command names a folder with one encoded batch per step and data-parallel rank; rank 0 leaves the
gradients, or the weights after training, in that folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from configs import build_loss_config
from gpu_stand_in import stand_in_gpu
from image_families import with_images

from gradus.config import ModelConfig, ParallelConfig, TrainerConfig, learning
from gradus.errors import GradusError
from gradus.run.paths import RunDirectory
from gradus.trainer.distributed import CPU, World, build_world, join_world
from gradus.trainer.entry.token_recorder import TokenRecorder
from gradus.trainer.losses import build_loss, needs_reference
from gradus.trainer.model.build import build_policy, build_reference
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import sync_on
from gradus.trainer.optimizer.optimizer import PolicyOptimizer
from gradus.trainer.step import GradientStep, StepLoss
from gradus.wire.codec import decode_rank_batch
from gradus.wire.micro_batch import MicroBatch

Arrays = dict[str, np.ndarray]
RULES = {"adamw": learning.AdamWConfig, "sgd": learning.SgdConfig}


def read_batch(folder: Path, step: int, world: World) -> list[MicroBatch]:
    path = folder / f"step_{step}_rank_{world.data_rank}.msgpack"
    return decode_rank_batch(path.read_bytes()).micro_batches


def gradients_of(policy: PolicyModel) -> Arrays:
    found = {}
    for name, parameter in policy.model.named_parameters():
        assert (parameter.grad is None) != parameter.requires_grad, name
        if parameter.grad is None:
            continue
        found[name] = parameter.grad.full_tensor().numpy().copy()
        parameter.grad = None
    return found


def weights_of(policy: PolicyModel) -> Arrays:
    named = policy.model.named_parameters()
    return {name: p.full_tensor().detach().numpy().copy() for name, p in named}


def work(command: dict[str, Any]) -> dict[str, Any]:
    """Train the steps of a command, or take the gradients of its only step."""
    parallel = ParallelConfig(**command["parallel"])
    world = build_world(parallel, CPU)
    folder = Path(command["folder"])
    base = ModelConfig(name=command["model"])
    settings = TrainerConfig(
        parallel=parallel,
        router_replay=command["router_replay"],
        train_vision=command["train_vision"],
    )
    platform = stand_in_gpu(takes_float32=True)[0] if command["on_gpu_path"] else None
    policy = build_policy(base, settings, world, torch.float32, platform=platform)
    given = dict(command["loss"])
    loss_config = build_loss_config(given.pop("type", "dppo"), **given.pop("options", {}), **given)
    loss_of_tokens, reference = build_loss(loss_config), None
    if needs_reference(loss_of_tokens):
        reference = build_reference(policy, base, settings, world, torch.float32)
    with torch.no_grad():
        for matrix in (p for p in policy.parameters() if p.ndim > 1):
            matrix.mul_(command["moved"])

    def learned(number: int) -> StepLoss:
        batch = with_images(policy, read_batch(folder, number, world))
        return step.run(batch if reference is None else reference.score(batch))

    step = GradientStep(
        policy,
        loss_of_tokens,
        world,
        sync=sync_on(CPU, parallel),
        aggregation=loss_config.aggregation,
    )
    recorder = TokenRecorder(RunDirectory(folder), share=1.0, term=1, world=world)
    step = step.observed_by(recorder.observe)
    if command["lr"] is None:
        loss = learned(0)
        arrays = gradients_of(policy)
    else:
        optimizer = PolicyOptimizer(
            policy,
            RULES[command["rule"]](lr=command["lr"]),
            max_steps=command["steps"],
            max_skipped_steps=1,
            world=world,
        )
        for number in range(command["steps"]):
            loss = learned(number)
            optimizer.step(number)
        arrays = weights_of(policy)
    recorder.write(0)
    recorder.close()
    if world.is_first:
        np.savez(folder / "arrays.npz", **arrays)
    return {"total": loss.total, "members": dict(loss.members), "metrics": dict(loss.metrics)}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    with (
        (folder / f"in_{rank}").open() as commands,
        (folder / f"out_{rank}").open("w", buffering=1) as answers,
        join_world(CPU, deterministic=True),
    ):
        answers.write(json.dumps({"ready": os.getpid()}) + "\n")
        for line in commands:
            try:
                answer = work(json.loads(line))
            except GradusError as error:
                answer = {"error": str(error)}
            answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
