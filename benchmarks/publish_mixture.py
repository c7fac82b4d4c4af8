"""How long publishing a mixture of experts keeps the step's thread standing, and what it copies.

    python benchmarks/publish_mixture.py --megabytes 8 400

Made-up bfloat16 files of a Qwen3-MoE of about so many megabytes, loaded and sharded as a trainer
does, in float32; a version is published several times and each is waited for, so that the copy
between two steps is measured by itself. The digest is of every published byte by name: two
checkouts that publish the same print the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from tiny_experts import build_tiny_moe_model

from gradus.config import ModelConfig
from gradus.run.paths import RunDirectory
from gradus.trainer.distributed import CPU, World, join_world
from gradus.trainer.model.load import load_model
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import shard_model
from gradus.trainer.publish import PolicyPublisher
from gradus.weights.filesystem import FilesystemWeights
from gradus.weights.publishing_thread import PublishingThread

EXPERT_SIZE, HIDDEN, LAYERS = 256, 512, 4


def build_mixture(folder: Path, megabytes: int) -> Path:
    """Of four layers, with as many experts as give the size; the least are four."""
    if megabytes < 10:
        build_tiny_moe_model(folder)
        return folder
    num_experts = max(4, round(megabytes * 1e6 / 2 / LAYERS / (3 * EXPERT_SIZE * HIDDEN)))
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": EXPERT_SIZE}
    sizes |= {"num_experts": num_experts, "num_hidden_layers": LAYERS, "head_dim": 64}
    build_tiny_moe_model(folder, **sizes)
    return folder


def digest_of(folder: Path) -> str:
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def measure(megabytes: int, dtype: str, times: int, world: World) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, PublishingThread() as thread:
        folder = build_mixture(Path(name) / "model", megabytes)
        model = load_model(ModelConfig(name=str(folder)), CPU)
        policy = shard_model(PolicyModel(model), world.mesh, getattr(torch, dtype))
        weights = FilesystemWeights(RunDirectory(Path(name) / "run"), term=0, extra_files={})
        served: Any = getattr(torch, dtype)
        publisher = PolicyPublisher(policy.model, world, served, weights, thread)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        stands, core = [], []
        for version in range(1, times + 2):
            began, cpu_began = time.perf_counter(), time.process_time()
            pending = publisher.publish_version(version)
            stands.append(time.perf_counter() - began)
            core.append(time.process_time() - cpu_began)
            thread.wait()
        assert pending is not None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        stored = sum(p.numel() for p in policy.parameters()) * served.itemsize
        return {
            "megabytes": round(stored / 1e6, 1),
            "dtype": dtype,
            "stands_milliseconds": round(1000 * statistics.median(stands[1:]), 2),
            "first_milliseconds": round(1000 * stands[0], 2),
            "core_milliseconds": round(1000 * statistics.median(core[1:]), 2),
            "more_memory_megabytes": round(peak / 1000, 1),
            "digest": digest_of(pending.published.directory),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, nargs="*", default=[8, 400])
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--times", type=int, default=7)
    options = parser.parse_args()
    with join_world(CPU) as world:
        for megabytes in options.megabytes:
            for dtype in options.dtypes:
                found = measure(megabytes, dtype, options.times, world)
                print(json.dumps(found | {"load": os.getloadavg()[0]}), flush=True)


if __name__ == "__main__":
    main()
