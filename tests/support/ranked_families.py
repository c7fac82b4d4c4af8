"""Trains three steps of each family named, and leaves the weights: one rank, or as many as fork.

    python ranked_families.py FOLDER CASE...

Each rank runs it; the first writes FOLDER/CASE.npz, and FOLDER/CASE.sgd.npz, where gradient descent
trained instead of AdamW; what is there stays. LAYOUTS says by how many ranks, and how they share
what, for a folder of its name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from builders import build_sample
from image_families import IMAGE_FAMILIES, image_folder, usual, with_images
from model_families import CPU, VOCABULARY, family_config, family_folder

from gradus.config import AdamWConfig, ParallelConfig, TrainerConfig, learning
from gradus.trainer.distributed import World, join_world
from gradus.trainer.losses import Dppo
from gradus.trainer.model.build import build_policy
from gradus.trainer.optimizer.optimizer import PolicyOptimizer
from gradus.trainer.step import GradientStep
from gradus.wire.packing import pack
from gradus.wire.sample import Sample

LENGTHS = (65, 9, 40, 3, 64, 17)
STEPS = 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "2": (2, {}),
    "experts": (2, {"expert_parallel_size": 2}),
    "context": (2, {"context_parallel_size": 2}),
}
RULES = {"": AdamWConfig(lr=1e-3), ".sgd": learning.SgdConfig(lr=0.1)}
"""AdamW's moves each weight by about 1e-3 a step, however small its gradient; gradient descent
moves some by more, and those without a gradient not at all."""


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    cases = [case for case in cases if not (folder / f"{case}.npz").exists()]
    for case in cases:
        folder_of(case)  # before there are ranks, of which transformers lets one write
    parallel = ParallelConfig(**LAYOUTS[folder.name][1])
    with join_world(CPU, deterministic=True, parallel=parallel) as world:
        for case in cases:
            found = trained(case, world, parallel)
            # AdamW's come last, and say that both are there.
            for rule in reversed(RULES) if world.is_first else ():
                np.savez(folder / f"{case}{rule}.npz", **found[rule])


def trained(case: str, world: World, parallel: ParallelConfig) -> dict[str, dict[str, np.ndarray]]:
    """The weights, by rule."""
    config = family_config(folder_of(case))
    policy = build_policy(config, TrainerConfig(parallel=parallel), world, torch.float32)
    step = GradientStep(policy, Dppo(learning.DppoConfig()), world)
    named, found = dict(policy.model.named_parameters()), {}
    first = {name: p.detach().clone() for name, p in named.items()}
    for name, rule in RULES.items():
        with torch.no_grad():
            for key, parameter in named.items():
                parameter.copy_(first[key])
        optimizer = PolicyOptimizer(policy, rule, max_steps=STEPS, max_skipped_steps=1, world=world)
        for number in range(STEPS):
            if case in IMAGE_FAMILIES:
                batch = [told(it.sample) for it in usual()]
            else:
                batch = [told(build_sample(n, seed=n, vocabulary=VOCABULARY)) for n in LENGTHS]
            mine = pack(batch, max_tokens=128, num_ranks=world.data_size)[world.data_rank]
            step.run(with_images(policy, mine))
            optimizer.step(number)
        found[name] = {key: p.full_tensor().detach().numpy().copy() for key, p in named.items()}
    return found


def folder_of(case: str) -> Path:
    return image_folder(case) if case in IMAGE_FAMILIES else family_folder(case)


def ranks_apart(folder: Path, case: str, layout: str = "2", rule: str = "") -> float:
    """The largest distance of a weight after training by one rank and by two, as left in FOLDER/1
    and FOLDER/LAYOUT."""
    files = [folder / name / f"{case}{rule}.npz" for name in ("1", layout)]
    with np.load(files[0]) as one, np.load(files[1]) as two:
        assert one.keys() == two.keys()
        return max(float(np.abs(one[name] - two[name]).max()) for name in one)


def told(sample: Sample) -> Sample:
    """Its tokens are to be imitated."""
    sample.arrays.loss_weights["ce"] = sample.arrays.loss_weights.pop("rl")
    return sample


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
