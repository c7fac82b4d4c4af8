"""What publishing a version costs the step, and how long a version takes to be whole.

    python benchmarks/publish.py --parameters 135 1000

Made-up bfloat16 weights of so many million parameters and a made-up step, matrix products that take
about `--step-seconds` by themselves, in three ways that take turns: nothing is published; every
version is waited for before the next step; every version is written behind the next step. Then what
an inference server reads to check a version. Medians; the CPU time is of the whole process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gradus.run.paths import RunDirectory
from gradus.trainer.distributed import CPU, World, join_world
from gradus.trainer.publish import PolicyPublisher
from gradus.weights.filesystem import FilesystemWeights
from gradus.weights.published import Published, verify_version
from gradus.weights.publishing_thread import PublishingThread

WAYS = ("nothing", "waited for", "behind the step")
LAYER_PARAMETERS = 4 * 2048 * 2048


def build_weights(million_parameters: int) -> dict[str, Tensor]:
    """Layers of 16.8M parameters, with random bits that no disk compresses."""
    num_layers = max(1, million_parameters * 1_000_000 // LAYER_PARAMETERS)
    return {
        f"layers.{number}.weight": torch.randn(8192, 2048, dtype=torch.bfloat16)
        for number in range(num_layers)
    }


class MadeUpStep:
    """Matrix products for about so many seconds when nothing else runs, then an update in place."""

    def __init__(self, seconds: float, weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self.values = torch.randn(1024, 1024)
        began = time.perf_counter()
        for _ in range(20):
            self.values @ self.values
        self.num_products = max(1, int(20 * seconds / (time.perf_counter() - began)))

    def run(self) -> None:
        for _ in range(self.num_products):
            self.values @ self.values
        for weight in self.weights.values():
            weight[0].add_(1.0)


def timed_steps(
    way: str, step: MadeUpStep, publisher: PolicyPublisher, versions: Iterator[int], num_steps: int
) -> dict[str, Any]:
    """The medians of some steps; the first one is not counted."""
    seconds, waits, until_whole, cpu = [], [], [], []
    for _ in range(num_steps + 1):
        began, cpu_began = time.perf_counter(), time.process_time()
        step.run()
        stepped = time.perf_counter()
        pending = None
        if way != "nothing":
            pending = publisher.publish_version(next(versions))
        if way == "waited for":
            publisher.settle()
        seconds.append(time.perf_counter() - began)
        waits.append(time.perf_counter() - stepped)
        cpu.append(time.process_time() - cpu_began)
        if pending is not None:
            until_whole.append(pending)
    publisher.settle()
    medians = {"step_seconds": seconds, "waits_seconds": waits, "step_core_seconds": cpu}
    found = {name: round(statistics.median(values[1:]), 3) for name, values in medians.items()}
    if until_whole:
        whole = statistics.median(pending.seconds for pending in until_whole[1:])
        found["until_whole_seconds"] = round(whole, 3)
    return found


def check_seconds(published: Published) -> dict[str, float]:
    """Of what an inference server does before it loads a version."""
    began, cpu_began = time.perf_counter(), time.process_time()
    verify_version(published.directory, published.digest)
    return {
        "seconds": round(time.perf_counter() - began, 3),
        "core_seconds": round(time.process_time() - cpu_began, 3),
    }


def measure(million_parameters: int, options: argparse.Namespace, world: World) -> dict[str, Any]:
    weights = build_weights(million_parameters)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=32, num_hidden_layers=1))
    versions = iter(range(1, 1_000_000))
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=options.folder) as name, PublishingThread() as thread:
        publisher = PolicyPublisher(
            model,
            world,
            dtype=torch.bfloat16,
            weights=FilesystemWeights(RunDirectory(Path(name)), term=0, extra_files={}),
            thread=thread,
            served=lambda *_, place, **__: (
                (name, place(name, tensor, torch.bfloat16)) for name, tensor in weights.items()
            ),
        )
        step = MadeUpStep(options.step_seconds, weights)
        for _ in range(options.rounds):
            for way in WAYS:
                result = timed_steps(way, step, publisher, versions, options.steps)
                found[way].append(result)
        pending = publisher.publish_version(next(versions))
        thread.wait()
        assert pending is not None
        check = check_seconds(pending.published)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "million_parameters": million_parameters,
        "weights_gib": round(sum(w.nbytes for w in weights.values()) / 2**30, 2),
        "peak_memory_gib": round(peak / 2**30, 2),
        "ways": {
            way: {name: statistics.median(it[name] for it in results) for name in results[0]}
            for way, results in found.items()
        },
        "check": check,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, nargs="*", default=[135, 1000], help="millions")
    parser.add_argument("--step-seconds", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", help="on the disk to measure; the default is the temporary one")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with join_world(CPU) as world:
        cases = [measure(million, options, world) for million in options.parameters]
    text = json.dumps({"threads": torch.get_num_threads(), "cases": cases}, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
