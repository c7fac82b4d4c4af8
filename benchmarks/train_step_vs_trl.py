"""One training step of gradus and of TRL's GRPO on the same tokens, side by side in one run.

    python benchmarks/train_step_vs_trl.py --output benchmarks/results/train_step_vs_trl.json

64 rollouts of ragged length (longest 128 tokens), a Qwen3-shaped model of hidden size 128 with 4
layers, vocabulary 1,000 and 32,000; forward, loss, backward, clipping and AdamW. Each side runs in
processes of its own, in alternating rounds, in bfloat16 and in float32; TRL with each of several
micro batch sizes, of which its best counts. Tokens per second are real tokens: prompt and
completion, no padding. TRL is installed into a virtual environment of the benchmark's own
(`--trl-python` uses one that exists).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from configs import build_loss_config

from gradus.config import AdamWConfig, ModelConfig
from gradus.trainer.distributed import CPU, World, join_world
from gradus.trainer.losses import build_loss
from gradus.trainer.model.load import load_model
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.model.shard import shard_model
from gradus.trainer.optimizer.optimizer import PolicyOptimizer
from gradus.trainer.step import GradientStep
from gradus.wire.packing import pack
from gradus.wire.sample import Sample
from gradus.wire.tokens import TokenArrays
from gradus.wire.versions import VersionSpan

VOCABULARIES = (1_000, 32_000)
DTYPES = ("bfloat16", "float32")
TRL_MICRO_BATCHES = (8, 16, 64)
NUM_ROLLOUTS = 64
LONGEST = 128
MICRO_BATCH_TOKENS = 4096
TRL_PACKAGES = ("torch==2.13.0+cpu", "trl==1.16.0", "transformers==5.17.0")


def build_rows(vocabulary: int, seed: int = 0) -> list[dict[str, Any]]:
    """Short prompts, heavy-tailed completions: most are short, a few reach the longest length."""
    draw = random.Random(seed)
    rows = []
    for number in range(NUM_ROLLOUTS):
        num_prompt = draw.randint(8, 24)
        num_completion = min(LONGEST - num_prompt, 4 + int(draw.lognormvariate(3.2, 0.8)))
        tokens = [draw.randrange(3, vocabulary) for _ in range(num_prompt + num_completion)]
        rows.append(
            {
                "prompt": tokens[:num_prompt],
                "completion": tokens[num_prompt:],
                "advantage": 1.0 if number % 2 else -1.0,
            }
        )
    return rows


def build_sample(number: int, row: dict[str, Any], sampling_logprob: float) -> Sample:
    length = len(row["prompt"]) + len(row["completion"])
    mask = np.arange(length) >= len(row["prompt"])
    return Sample(
        id=f"e{number}/0/0",
        environment="benchmark",
        group_id="g",
        episode_id=f"e{number}",
        reward=0.0,
        versions=VersionSpan(0, 0),
        arrays=TokenArrays.build(
            np.array(row["prompt"] + row["completion"]),
            {"rl": mask.astype(np.float32)},
            sampling_logprobs=np.where(mask, sampling_logprob, 0.0),
            advantages=np.where(mask, row["advantage"], 0.0),
        ),
    )


def reset_peak() -> int:
    """Forget the peak of this process's memory; the memory now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def build_parts(case: dict[str, Any], world: World) -> tuple[GradientStep, PolicyOptimizer]:
    """What the trainer builds, through the same functions."""
    model = load_model(ModelConfig(name=case["directory"]), world.device)
    policy = shard_model(PolicyModel(model), world.mesh, getattr(torch, case["dtype"]))
    optimizer = PolicyOptimizer(
        policy,
        AdamWConfig(lr=1e-4),
        max_steps=1000,
        max_skipped_steps=1,
        world=world,
    )
    return GradientStep(policy, build_loss(build_loss_config()), world), optimizer


def gradus_side(case: dict[str, Any]) -> dict[str, Any]:
    """Receive-to-update of one rank: packing, forward, loss, backward, clipping, AdamW."""
    samples = [
        build_sample(number, row, -float(np.log(case["model"]["vocab_size"])))
        for number, row in enumerate(case["rows"])
    ]
    with join_world(CPU) as world:
        gradients, optimizer = build_parts(case, world)
        before = reset_peak()
        seconds = []
        for step in range(case["warm_up"] + case["steps"]):
            begun = time.perf_counter()
            (micro_batches,) = pack(samples, max_tokens=MICRO_BATCH_TOKENS, num_ranks=1)
            gradients.run(micro_batches)
            update = optimizer.step(step)
            seconds.append(time.perf_counter() - begun)
            assert not update.is_skipped
        peak = status_bytes("VmHWM")
    return {
        "seconds": seconds[case["warm_up"] :],
        "peak_bytes": peak,
        "peak_over_start_bytes": peak - before,
    }


def build_case(folder: Path, vocabulary: int, dtype: str, steps: int) -> dict[str, Any]:
    """A random model and its rollouts, written once for both sides."""
    model = {
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    directory = folder / f"model_{vocabulary}"
    if not directory.exists():
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**model)).save_pretrained(directory)
        words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, vocabulary)}
        tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        ).save_pretrained(directory)
    return {
        "model": model,
        "directory": str(directory),
        "tokenizer": str(directory),
        "folder": str(folder / "trl"),
        "dtype": dtype,
        "rows": build_rows(vocabulary),
        "warm_up": 2,
        "steps": steps,
    }


def run_side(python: str, script: Path, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One process; its last line is the result."""
    path = folder / "case.json"
    path.write_text(json.dumps(case))
    arguments = [python, str(script), *([] if "trl" in script.stem[:4] else ["--case"]), str(path)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{script.name} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def install_trl(folder: Path) -> str:
    """A virtual environment with TRL; takes about a minute."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", *TRL_PACKAGES]
    subprocess.run(pip, check=True, stderr=subprocess.DEVNULL)
    return str(folder / "bin" / "python")


def compare(
    folder: Path, trl_python: str, vocabulary: int, dtype: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Alternating rounds of both sides; medians over all timed steps."""
    here = Path(__file__).resolve()
    case = build_case(folder, vocabulary, dtype, options.steps)
    num_tokens = sum(len(r["prompt"]) + len(r["completion"]) for r in case["rows"])
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for size in TRL_MICRO_BATCHES:
            script = here.with_name("trl_train_step.py")
            result = run_side(trl_python, script, case | {"micro_batch_rows": size}, folder)
            found.setdefault(f"trl-{size}", []).append(result)
        found.setdefault("gradus", []).append(run_side(sys.executable, here, case, folder))
    sides = {name: summarise(results, num_tokens) for name, results in found.items()}
    best = max(
        (side for name, side in sides.items() if name != "gradus"),
        key=lambda side: side["tokens_per_second"],
    )
    return {
        "vocabulary": vocabulary,
        "dtype": dtype,
        "real_tokens": num_tokens,
        "sides": sides,
        "speed_ratio": round(sides["gradus"]["tokens_per_second"] / best["tokens_per_second"], 2),
        "memory_ratio": round(
            sides["gradus"]["peak_over_start_mib"] / best["peak_over_start_mib"], 2
        ),
    }


def summarise(results: list[dict[str, Any]], num_tokens: int) -> dict[str, float]:
    seconds = [s for result in results for s in result["seconds"]]
    return {
        "step_seconds_median": round(statistics.median(seconds), 4),
        "step_seconds_min": round(min(seconds), 4),
        "step_seconds_max": round(max(seconds), 4),
        "tokens_per_second": round(num_tokens / statistics.median(seconds)),
        "peak_mib": round(max(r["peak_bytes"] for r in results) / 2**20, 1),
        "peak_over_start_mib": round(max(r["peak_over_start_bytes"] for r in results) / 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", type=Path, help="(one side, started by the benchmark itself)")
    parser.add_argument("--trl-python", help="interpreter that has TRL; none: install it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, nargs="*", default=VOCABULARIES)
    parser.add_argument("--dtype", nargs="*", choices=DTYPES, default=DTYPES)
    parser.add_argument("--output", type=Path, help="JSON; other cases that it holds are kept")
    options = parser.parse_args()
    if options.case:
        print("\n" + json.dumps(gradus_side(json.loads(options.case.read_text()))))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = options.trl_python or install_trl(folder / "venv")
        for vocabulary in options.vocabulary:
            for dtype in options.dtype:
                case = compare(folder, python, vocabulary, dtype, options)
                print(json.dumps(case, indent=1), flush=True)
                if options.output:
                    store(options.output, case)


def store(path: Path, case: dict[str, Any]) -> None:
    """Put one case into the report, in the place of an earlier one like it."""
    known = json.loads(path.read_text())["cases"] if path.exists() else []
    cases = [
        c for c in known if (c["vocabulary"], c["dtype"]) != (case["vocabulary"], case["dtype"])
    ]
    cases = sorted([*cases, case], key=lambda c: (c["vocabulary"], c["dtype"]))
    report = {"cores": os.cpu_count(), "python": platform.python_version(), "cases": cases}
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
