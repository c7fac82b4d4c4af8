"""How good the rate of `lr = "auto"` is: the loss at a tenth, a third, three and ten times of it.

    python benchmarks/learning_rate.py --output benchmarks/results/learning_rate.json --minutes 5

Three sizes of a Qwen3-shaped model, all weights and adapters, three seeds each. Each model first
learns to copy words; what is measured is the loss on held-out words after it was trained to write
them backwards, by the supervised trainer in this process. `--minutes` ends it after a run; started
again it goes on with the runs that its file does not have.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import random
import statistics
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from gradus.config import SftConfig, SftProcessConfig
from gradus.plan.learning_rate import choose
from gradus.run.records import read_records
from gradus.testing.tiny_model import build_tiny_model
from gradus.trainer.entry.sft import run

SIZES = {"0.1 M": (64, 2), "1.6 M": (192, 4), "6 M": (320, 6)}
"""Name → hidden size and layers."""
FACTORS = (0.1, 1 / 3, 1.0, 3.0, 10.0)
SEEDS = (0, 1, 2)
COPY_STEPS = 300
STEPS = 80
BATCH = 16
NUM_HELD_OUT = 64
WORST = 20.0
"""What a loss that is no number counts as."""


@dataclass(frozen=True)
class Case:
    """One run."""

    size: str
    has_adapters: bool
    factor: float
    seed: int

    @property
    def key(self) -> str:
        what = "adapters" if self.has_adapters else "all weights"
        return f"{self.size} / {what} / x{self.factor:.2g} / seed {self.seed}"


def write_words(path: Path, *, seed: int, count: int, backwards: bool) -> Path:
    """Conversations whose replies repeat a word of six letters."""
    letters = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            word = "".join(letters.choices("abcdefghijklmnop", k=6))
            said = word[::-1] if backwards else word
            file.write(json.dumps({"prompt": word, "completion": said}) + "\n")
    return path


def train(
    root: Path, model: Path, *, lr: float, seed: int, steps: int, backwards: bool, lora: bool
) -> float:
    """Train a model; its loss on held-out words, in nats per token."""
    root.mkdir(parents=True)
    data = write_words(
        root / "train.jsonl", seed=seed + 1, count=steps * BATCH, backwards=backwards
    )
    held_out = write_words(
        root / "held_out.jsonl", seed=10_000, count=NUM_HELD_OUT, backwards=backwards
    )
    values: dict[str, Any] = {
        "model": {"name": str(model), "max_length_tokens": 64},
        "data": {"path": str(data)},
        "validation": {"path": str(held_out), "interval_steps": steps},
        "optimizer": {"lr": lr},
        "lora": {"rank": 8, "alpha": 16} if lora else None,
        "max_steps": steps,
        "batch_conversations": BATCH,
        "compute_dtype": "float32",
        "checkpoint": {"interval_minutes": None},
        "seed": seed,
    }
    config = SftConfig.model_validate(values)
    fields = {name: getattr(config, name) for name in SftConfig.model_fields}
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            run(SftProcessConfig(**fields, run_dir=str(root / "run"), term=0))
    except Exception as error:  # a run that diverged may end with one
        print(f"  {type(error).__name__}: {error}")
        return WORST
    found = [it.metrics for it in read_records(root / "run" / "metrics.jsonl")]
    return min(WORST, found[-1].get("validation/loss/mean", WORST))


def base_of(root: Path, size: str) -> Path:
    """A model of the size that copies words, trained once."""
    folder = root / size.replace(" ", "")
    if not (folder / "run" / "model" / "config.json").is_file():
        hidden, layers = SIZES[size]
        start = build_tiny_model(
            root / f"{folder.name}-start", hidden_size=hidden, num_layers=layers
        )
        lr = choose("sft", str(start), has_adapters=False).lr
        loss = train(folder, start, lr=lr, seed=99, steps=COPY_STEPS, backwards=False, lora=False)
        print(f"{size}: copies words with a loss of {loss:.3f} after {COPY_STEPS} steps at {lr:g}")
    return folder / "run" / "model"


def measure(case: Case, root: Path) -> dict[str, Any]:
    """The run of a case."""
    base = base_of(root, case.size)
    auto = choose("sft", str(base), has_adapters=case.has_adapters).lr
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=root) as folder:
        loss = train(
            Path(folder) / "case",
            base,
            lr=auto * case.factor,
            seed=case.seed,
            steps=STEPS,
            backwards=True,
            lora=case.has_adapters,
        )
    return {"auto": auto, "loss": loss, "seconds": round(time.monotonic() - began, 1)}


def table(found: dict[str, dict[str, Any]]) -> str:
    """Means over seeds, and how far x1 is from the best."""
    lines = [f"{'':<22}{'auto':>9}" + "".join(f"{f'x{f:.2g}':>9}" for f in FACTORS) + "  x1/best"]
    for size, has_adapters in product(SIZES, (False, True)):
        cases = [[Case(size, has_adapters, f, seed).key for seed in SEEDS] for f in FACTORS]
        losses = [[found[key]["loss"] for key in keys if key in found] for keys in cases]
        rates = [found[key]["auto"] for keys in cases for key in keys if key in found]
        if not rates:
            continue
        means = [statistics.fmean(it) if it else None for it in losses]
        shown = "".join(f"{'-' if it is None else f'{it:.3f}':>9}" for it in means)
        known = [it for it in means if it is not None]
        ratio = f"{means[2] / min(known):9.2f}" if means[2] is not None else ""
        what = "adapters" if has_adapters else "all weights"
        lines.append(f"{size + ', ' + what:<22}{rates[0]:>9.1e}{shown}{ratio}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "gradus-rates")
    parser.add_argument("--minutes", type=float, default=5.0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    until = time.monotonic() + 60 * arguments.minutes
    output: Path = arguments.output
    found = json.loads(output.read_text()) if output.is_file() else {}
    arguments.work.mkdir(parents=True, exist_ok=True)
    for seed, size, has_adapters, factor in product(SEEDS, SIZES, (False, True), FACTORS):
        case = Case(size, has_adapters, factor, seed)
        if case.key in found or time.monotonic() > until:
            continue
        found[case.key] = measure(case, arguments.work)
        print(f"{case.key}: {found[case.key]['loss']:.3f}", flush=True)
        output.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    left = len(SEEDS) * len(SIZES) * 2 * len(FACTORS) - len(found)
    print(f"{len(found)} runs, {left} left")


if __name__ == "__main__":
    main()
