"""Training speed of Qwen3 shapes: gradus, plain transformers with FSDP2, and torch.compile only.

    python benchmarks/gpu_train.py --output benchmarks/results/gpu_train.json      # on a GPU
    python benchmarks/gpu_train.py --device cpu --shapes tiny --tokens 128         # shows it runs

Random weights, made-up tokens, one sequence of the given length per micro batch and `--micro`
micro batches a step, AdamW on float32 masters, bfloat16 compute. Each case runs in a process of its
own, with the least recomputation that fits: none, selective, full. Every way counts the same
operations for MFU (docs/training.md).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from gradus.config import AdamWConfig, BenchConfig, LoraConfig, ParallelConfig
from gradus.trainer.distributed import World, join_world
from gradus.trainer.entry.bench import fake_samples
from gradus.trainer.losses import Dppo
from gradus.trainer.model.attention import ATTENTION_NAME
from gradus.trainer.model.lora import add_adapters
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import shard_model
from gradus.trainer.optimizer.optimizer import PolicyOptimizer
from gradus.trainer.step import GradientStep
from gradus.trainer.throughput import ModelFlops, peak_memory_bytes, peak_teraflops
from gradus.wire.packing import pack
from gradus.wire.sample import Sample

SHAPES = {  # hidden, intermediate, layers, heads, key heads, vocabulary, tied
    "tiny": (64, 128, 2, 4, 2, 512, True),
    "0.6B": (1024, 3072, 28, 16, 8, 151936, True),
    "1.7B": (2048, 6144, 28, 16, 8, 151936, True),
    "4B": (2560, 9728, 36, 32, 8, 151936, True),
}
WAYS = ("gradus", "gradus compiled", "transformers", "transformers compiled")
RECOMPUTE = ("none", "selective", "full")
CASE_SECONDS = 1800
UNCOUNTED_STEPS = 2


@dataclass(frozen=True)
class Case:
    """One process."""

    way: str
    shape: str
    tokens: int
    lora: bool
    recompute: str
    device: str
    steps: int
    micro: int


def build_model(case: Case, device: torch.device, attention: str) -> PreTrainedModel:
    hidden, middle, layers, heads, key_heads, vocabulary, tied = SHAPES[case.shape]
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=middle,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=128 if case.shape != "tiny" else 16,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=max(case.tokens, 32768),
    )
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention
        )
    return model.train(False)


Step = Callable[[int, list[Sample]], None]


def gradus_step(case: Case, model: PreTrainedModel, world: World) -> Step:
    parallel = ParallelConfig(
        activation_checkpointing=case.recompute, compile="compiled" in case.way
    )
    if case.lora:
        add_adapters(model, LoraConfig(rank=16), torch.bfloat16)
    policy = shard_model(PolicyModel(model), world.mesh, torch.bfloat16, parallel)
    gradients = GradientStep(policy, Dppo(), world)
    optimizer = PolicyOptimizer(
        policy, AdamWConfig(), max_steps=case.steps, max_skipped_steps=9, world=world
    )

    def run(number: int, samples: list[Sample]) -> None:
        (micro_batches,) = pack(samples, max_tokens=case.tokens, num_ranks=1)
        gradients.run(micro_batches)
        optimizer.step(number)

    return run


def plain_step(case: Case, model: PreTrainedModel, world: World) -> Step:
    """transformers' own forward and loss, whole logits, torch's AdamW."""
    if case.lora:
        add_adapters(model, LoraConfig(rank=16), torch.bfloat16)
    policy = PolicyModel(model)
    parallel = ParallelConfig(
        activation_checkpointing=case.recompute, compile="compiled" in case.way
    )
    # Its own forward passes through the same sharding, so that only the rest differs.
    policy.forward = lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss
    shard_model(policy, world.mesh, torch.bfloat16, parallel)
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def run(_: int, samples: list[Sample]) -> None:
        for sample in samples:
            ids = torch.tensor(sample.arrays.token_ids, dtype=torch.int64, device=world.device)[
                None
            ]
            policy(ids).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def batch(case: Case, number: int) -> list[Sample]:
    config = BenchConfig(samples_per_step=case.micro, ragged=False)
    vocabulary = SHAPES[case.shape][5]
    return fake_samples(config, longest=case.tokens, vocabulary=vocabulary, seed=number)


def work(case: Case) -> dict[str, Any]:
    """Measure one case in this process."""
    with join_world() as world:
        is_gradus = case.way.startswith("gradus")
        attention = ATTENTION_NAME if is_gradus else "sdpa"
        model = build_model(case, world.device, attention)
        build = gradus_step if is_gradus else plain_step
        step = build(case, model, world)
        flops = ModelFlops.of(model)
        (micro_batches,) = pack(batch(case, 0), max_tokens=case.tokens, num_ranks=1)
        batches = [batch(case, number) for number in range(case.steps)]
        seconds = []
        for number, samples in enumerate(batches):
            start = time.perf_counter()
            step(number, samples)
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        median = statistics.median(seconds[min(UNCOUNTED_STEPS, case.steps - 1) :])
        name = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
        teraflops = flops.of_step(micro_batches) / median / 1e12
        peak = peak_teraflops(name)
        return {
            "device": name,
            "tokens_per_second": round(case.tokens * case.micro / median),
            "teraflops_per_second": round(teraflops, 4),
            "mfu": None if peak is None else round(teraflops / peak, 4),
            "peak_memory_gib": round(peak_memory_bytes() / 2**30, 2),
            "first_step_seconds": round(seconds[0], 2),
        }


@dataclass(frozen=True)
class EpisodeOutcome:
    """What a process left."""

    is_done: bool
    output: str
    errors: str


def in_a_process(case: Case) -> EpisodeOutcome:
    words = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if case.device == "cpu" else {}
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **hidden},
            timeout=CASE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return EpisodeOutcome(False, "", f"no answer in {CASE_SECONDS} s")
    return EpisodeOutcome(done.returncode == 0, done.stdout, done.stderr)


def measure(case: Case, run: Callable[[Case], EpisodeOutcome] = in_a_process) -> dict[str, Any]:
    """The case with the least recomputation that fits."""
    for recompute in RECOMPUTE:
        chosen = replace(case, recompute=recompute)
        outcome = run(chosen)
        if outcome.is_done:
            return asdict(chosen) | json.loads(outcome.output.splitlines()[-1])
        if "out of memory" not in outcome.errors:
            return asdict(chosen) | {"failed": outcome.errors.strip().splitlines()[-1:]}
    return asdict(chosen) | {"failed": ["out of memory"]}


def cases(options: argparse.Namespace) -> list[Case]:
    """All ways of one shape, length and kind of training stand side by side."""
    return [
        Case(way, shape, tokens, lora, "none", options.device, options.steps, options.micro)
        for shape in options.shapes
        for tokens in options.tokens
        for lora in (False, True)
        for way in options.ways
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6B", "1.7B", "4B"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384, 32768])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(work(Case(**json.loads(options.case)))))
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; '--device cpu --shapes tiny --tokens 128' shows that it runs")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    results = []
    for case in cases(options):
        results.append(measure(case))
        print(json.dumps(results[-1]), flush=True)
        if options.output:
            report = {"versions": versions, "results": results}
            options.output.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
