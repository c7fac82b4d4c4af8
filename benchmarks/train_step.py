"""One training run on 1, 2 and 4 gloo ranks, and with context parallelism: seconds and weights.

    python benchmarks/train_step.py --output benchmarks/results/train_step.json

Strong scaling: the same made-up batches on any number of ranks, one thread each. `speedup` is the
time of one rank over that of the layout, `efficiency` that over the number of ranks. More ranks
than cores cannot be faster; what is shown is that the weights come out the same. Ends with an error
when a weight differs by more than 1e-4, a tenth of the size of one update.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradus.config import AdamWConfig, BenchConfig, ModelConfig, ParallelConfig, learning
from gradus.testing.tiny_model import build_tiny_model
from gradus.trainer.distributed import CPU, join_world
from gradus.trainer.entry.bench import fake_samples
from gradus.trainer.losses import Dppo
from gradus.trainer.model.load import load_model
from gradus.trainer.model.policy_model import PolicyModel, vocabulary_size
from gradus.trainer.model.shard import shard_model
from gradus.trainer.optimizer.optimizer import PolicyOptimizer
from gradus.trainer.step import GradientStep
from gradus.wire.packing import pack

STEPS = 6
LR = 1e-3
LARGEST_DIFFERENCE = 1e-4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks": (2, {}),
    "2 ranks, one context": (2, {"context_parallel_size": 2}),
    "4 ranks": (4, {}),
    "4 ranks, two copies": (4, {"replicate_size": 2}),
    "4 ranks, two contexts": (4, {"context_parallel_size": 2}),
}


def work(model: Path, folder: Path, parallel: dict[str, Any]) -> None:
    """One rank of one layout; rank 0 leaves weights and seconds."""
    torch.set_num_threads(1)
    choice = ParallelConfig(**parallel)
    with join_world(CPU, parallel=choice) as world:
        loaded = load_model(ModelConfig(name=str(model)), world.device)
        vocabulary = vocabulary_size(loaded)
        policy = PolicyModel(loaded, world.context)
        shard_model(policy, world.mesh, torch.float32, choice)
        step = GradientStep(policy, Dppo(learning.DppoConfig()), world)
        optimizer = PolicyOptimizer(
            policy, AdamWConfig(lr=LR), max_steps=STEPS, max_skipped_steps=1, world=world
        )
        config, seconds = BenchConfig(samples_per_step=64), []
        for number in range(STEPS):
            samples = fake_samples(config, longest=128, vocabulary=vocabulary, seed=number)
            micro_batches = pack(samples, max_tokens=1024, num_ranks=world.data_size)
            start = time.perf_counter()
            step.run(micro_batches[world.data_rank])
            optimizer.step(number)
            seconds.append(time.perf_counter() - start)
        weights = {n: p.full_tensor().detach().numpy() for n, p in loaded.named_parameters()}
        if world.is_first:
            np.savez(folder / "weights.npz", **weights)
            (folder / "seconds.json").write_text(json.dumps(statistics.median(seconds[1:])))


def launch(model: Path, folder: Path, ranks: int, parallel: dict[str, Any]) -> None:
    """All ranks of one layout, to their end."""
    own = [str(Path(__file__)), "--worker", json.dumps([str(model), str(folder), parallel])]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([sys.executable, *torchrun, *own], env=variables, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        model, folder, parallel = json.loads(options.worker)
        work(Path(model), Path(folder), parallel)
        return
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        model = build_tiny_model(Path(root) / "tiny", hidden_size=128, dtype=torch.float32)
        first = None
        for name, (ranks, parallel) in LAYOUTS.items():
            folder = Path(tempfile.mkdtemp(dir=root))
            launch(model, folder, ranks, parallel)
            with np.load(folder / "weights.npz") as arrays:
                weights = dict(arrays)
            first = first or weights
            worst = max(float(np.abs(weights[k] - first[k]).max()) for k in weights)
            seconds = float((folder / "seconds.json").read_text())
            alone = results[0]["step_seconds"] if results else seconds
            speedup = round(alone / seconds, 2)
            results.append(
                {"layout": name, "ranks": ranks, "step_seconds": round(seconds, 3)}
                | {"speedup": speedup, "efficiency": round(speedup / ranks, 2)}
                | {"largest_weight_difference": worst}
            )
            print(f"{name:<24}{seconds:8.3f} s a step, speedup {speedup:4.2f}, weights {worst:.1e}")
    report = {"cores": os.cpu_count(), "steps": STEPS, "lr": LR, "results": results}
    if options.output:
        options.output.write_text(json.dumps(report, indent=2))
    if max(result["largest_weight_difference"] for result in results) > LARGEST_DIFFERENCE:
        sys.exit("weights differ between layouts")


if __name__ == "__main__":
    main()
