"""Training speed of Qwen3 shapes: gradus, plain transformers with FSDP2, and torch.compile only.

    python benchmarks/gpu_train.py --output benchmarks/results/gpu_train.json      # on a GPU
    python benchmarks/gpu_train.py --device cpu --shapes tiny --tokens 128         # shows it runs

Random weights, made-up tokens, one sequence of the given length per micro batch and `--micro`
micro batches a step, AdamW on float32 masters, bfloat16 compute. Each case runs in a process of its
own with a deadline, with the least recomputation that fits: none, selective, full. What was tried
and did not fit, failed or took too long is recorded, and the next case runs. The output file is
complete after every case. Every way counts the same operations for MFU (docs/training.md).
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
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from gradus.config import AdamWConfig, BenchConfig, LoraConfig, ParallelConfig, learning
from gradus.files import write_json
from gradus.trainer.distributed import World, join_world
from gradus.trainer.entry.bench import fake_samples
from gradus.trainer.losses import Dppo
from gradus.trainer.model.attention import ATTENTION_NAME
from gradus.trainer.model.gpu.flash import choose_flash_attention
from gradus.trainer.model.kernels import Platform, count_gpus, own_device
from gradus.trainer.model.lora import add_adapters
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import shard_model, sync_on
from gradus.trainer.optimizer.optimizer import PolicyOptimizer
from gradus.trainer.step import GradientStep
from gradus.trainer.throughput import (
    ModelFlops,
    caps_scores,
    head_size,
    peak_memory_gib,
    peak_teraflops,
)
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
CASE_SECONDS = 600.0
PACKAGES = ("torch", "transformers", "triton", "flash-attn-3", "flash-attn-4", "gradus-rl")
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
    sync = sync_on(world.device, parallel)
    gradients = GradientStep(policy, Dppo(learning.DppoConfig()), world, sync=sync)
    optimizer = PolicyOptimizer(
        policy, AdamWConfig(lr=1e-5), max_steps=case.steps, max_skipped_steps=9, world=world
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
    device = own_device(count_gpus() if case.device == "cuda" else 0, local_rank=0)
    with join_world(device) as world:
        is_gradus = case.way.startswith("gradus")
        kernels = {"attention": "sdpa"}
        model = build_model(case, device, ATTENTION_NAME if is_gradus else "sdpa")
        if is_gradus:
            platform = Platform.of(device)
            kernels = platform.names(torch.bfloat16, head_size(model), is_capped=caps_scores(model))
            kernels["flash"] = choose_flash_attention(platform)
        build = gradus_step if is_gradus else plain_step
        step = build(case, model, world)
        flops = ModelFlops.of(model)
        (micro_batches,) = pack(batch(case, 0), max_tokens=case.tokens, num_ranks=1)
        seconds = step_seconds(case, step, device)
        median = statistics.median(seconds[min(UNCOUNTED_STEPS, case.steps - 1) :])
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        teraflops = flops.of_step(micro_batches) / median / 1e12
        peak = peak_teraflops(name)
        return {
            "mfu": None if peak is None else round(teraflops / peak, 4),
            "tokens_per_second": round(case.tokens * case.micro / median),
            "teraflops_per_second": float(f"{teraflops:.4g}"),
            "peak_memory_gib": round(peak_memory_gib(device), 2),
            "step_seconds": round(median, 4),
            "first_step_seconds": round(seconds[0], 2),
            "kernels": kernels,
            "device": name,
        }


def step_seconds(case: Case, step: Step, device: torch.device) -> list[float]:
    """Of every step, with the samples made before the clock starts."""
    seconds = []
    for number, samples in enumerate([batch(case, number) for number in range(case.steps)]):
        start = time.perf_counter()
        step(number, samples)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds


@dataclass(frozen=True)
class CaseOutcome:
    """What a process left."""

    is_done: bool
    output: str
    errors: str

    @property
    def failure(self) -> str:
        """Why it is not done, in a line."""
        if "out of memory" in self.errors.lower():
            return "out of memory"
        lines = self.errors.strip().splitlines()
        return lines[-1] if lines else "ended without a word"


def in_a_process(case: Case, seconds: float = CASE_SECONDS) -> CaseOutcome:
    words = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if case.device == "cpu" else {}
    # Read when torch starts: sizes change from step to step, and fragments would add up.
    memory = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            check=False,
            env={**memory, **os.environ, **hidden},
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return CaseOutcome(False, "", f"no answer in {seconds:g} s")
    errors = done.stderr
    if done.returncode < 0:
        # The system kills what takes too much main memory without a word.
        errors += f"\nended by signal {-done.returncode}"
    return CaseOutcome(done.returncode == 0, done.stdout, errors)


def measure(case: Case, run: Callable[[Case], CaseOutcome] = in_a_process) -> dict[str, Any]:
    """The case with the least recomputation that fits, and what was tried before."""
    tried: dict[str, str] = {}
    for recompute in RECOMPUTE:
        chosen = replace(case, recompute=recompute)
        outcome = run(chosen)
        if outcome.is_done:
            measured = json.loads(outcome.output.splitlines()[-1])
            return measured | asdict(chosen) | ({"tried": tried} if tried else {})
        tried[recompute] = outcome.failure
        if outcome.failure != "out of memory":
            break
    return {"mfu": None, "failed": outcome.failure} | asdict(chosen) | {"tried": tried}


def surroundings() -> dict[str, Any]:
    """What a reader of the numbers must know of the machine."""
    found: dict[str, Any] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    facts: dict[str, Any] = {"versions": found, "cuda": torch.version.cuda, "gpus": []}
    for index in range(count_gpus()):
        properties = torch.cuda.get_device_properties(index)
        facts["gpus"].append(
            {
                "name": properties.name,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    return facts


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
    parser.add_argument("--seconds", type=float, default=CASE_SECONDS, help="of one process")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(work(Case(**json.loads(options.case)))))
        return
    if options.device == "cuda" and count_gpus() == 0:
        parser.error("no GPU here; '--device cpu --shapes tiny --tokens 128' shows that it runs")
    report: dict[str, Any] = {**surroundings(), "results": []}
    print(json.dumps(report), flush=True)
    for case in cases(options):
        result = measure(case, partial(in_a_process, seconds=options.seconds))
        report["results"].append(result)
        print(json.dumps(result), flush=True)
        if options.output:
            write_json(options.output, report)


if __name__ == "__main__":
    main()
