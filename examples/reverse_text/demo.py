"""The demo: a tiny model from nothing to reversing texts, on a CPU, in a few minutes.

    python examples/reverse_text/demo.py

Builds the model, warms it up with `gradus sft`, trains it with `gradus rl`, and shows what changed.
Ends with 1 when a phase fails, or when the reward at the end is below what the example promises.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curve import LAST_STEPS, draw_curve, read_curve

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
RUNS = Path("runs/demo")
"""Relative to the repository, like the paths in the two TOML files."""
PROMISED_REWARD = 0.75
NUM_EXAMPLES = 3


@dataclass(frozen=True)
class Phase:
    """One command of the demo."""

    name: str
    shown: str
    """The command as one would type it."""
    arguments: Sequence[str]
    """What to run with this Python."""


def plan(rl_flags: Sequence[str] = ()) -> list[Phase]:
    """The three phases, in order; `rl_flags` go to `gradus rl`."""
    example = HERE.relative_to(REPOSITORY)
    start = str(RUNS / "start")
    prepare = str(example / "prepare.py")
    sft = ["sft", "@", str(example / "sft.toml"), "--clean"]
    rl = ["rl", "@", str(example / "rl.toml"), "--clean", *rl_flags]
    cli = ["-m", "gradus.cli.main"]
    return [
        Phase("build model", f"python {prepare} {start}", [prepare, start]),
        Phase("warm-up", " ".join(["gradus", *sft]), [*cli, *sft]),
        Phase("reinforcement", " ".join(["gradus", *rl]), [*cli, *rl]),
    ]


def run_phase(phase: Phase) -> float:
    """Run one phase with its output on this terminal; returns its seconds. Refuses a failure."""
    print(f"\n==> {phase.name}: {phase.shown}", flush=True)
    started = time.perf_counter()
    code = subprocess.run(
        [sys.executable, *phase.arguments], cwd=REPOSITORY, check=False
    ).returncode
    if code:
        raise SystemExit(f"demo: {phase.name} ended with code {code}; its own words are above")
    return time.perf_counter() - started


@dataclass(frozen=True)
class Example:
    """One episode as a person reads it."""

    text: str
    reply: str
    reward: float


def read_examples(episodes: Path) -> list[Example]:
    """The first episode of each of the first tasks in one `train.jsonl`."""
    examples: dict[str, Example] = {}
    for line in episodes.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        traces = record.get("traces")
        if not traces:
            continue
        task_key = str(record["gradus"]["task"]["key"])
        examples.setdefault(task_key, read_example(traces[0]))
        if len(examples) == NUM_EXAMPLES:
            break
    return list(examples.values())


def read_example(trace: Mapping[str, Any]) -> Example:
    """Question, last reply and reward of one recorded trace."""
    nodes = trace["nodes"]
    replies = [node["message"].get("content") for node in nodes if node["sampled"]]
    rewards = [reward for reward in trace["rewards"].values() if reward is not None]
    return Example(
        text=next(n["message"]["content"] for n in nodes if n["message"]["role"] == "user"),
        reply=replies[-1] if replies and replies[-1] else "",
        reward=sum(reward["score"] * reward["weight"] for reward in rewards),
    )


def show_result(run_dir: Path, seconds: dict[str, float]) -> float:
    """Print curve, episodes before and after, and times; returns the reward at the end."""
    curve = read_curve(run_dir / "metrics.jsonl")
    print("\nmean reward per step (similarity of the reply and the reversed text)\n")
    print(*draw_curve(curve.values), sep="\n")
    for title, step in (("before", curve.steps[0]), ("after", curve.steps[-1])):
        print(f"\n{title}:")
        for example in read_examples(run_dir / "episodes" / f"step_{step}" / "train.jsonl"):
            print(f"  {example.reward:.2f}  {example.text!r} -> {example.reply!r}")
    print(
        f"\nreward      {curve.first:.3f} at the first step, {curve.last:.3f} at the end ", end=""
    )
    print(f"(mean of the last {LAST_STEPS} of {len(curve.steps)} steps)")
    times = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    print(f"time        {times}, all {sum(seconds.values()):.0f} s")
    print(f"results     {run_dir}")
    print(f"next        source .venv/bin/activate; gradus view {RUNS / 'rl'}    # a page about it")
    print("            then 'Your own data' in README.md")
    return curve.last


def main() -> None:
    """Run all phases, show the result, and hold the example to its promise."""
    parser = argparse.ArgumentParser(description="Run the demo; other flags go to `gradus rl`.")
    _, rl_flags = parser.parse_known_args()
    seconds = {phase.name: run_phase(phase) for phase in plan(rl_flags)}
    reward = show_result(REPOSITORY / RUNS / "rl", seconds)
    if reward < PROMISED_REWARD:
        raise SystemExit(
            f"demo: the reward at the end is {reward:.3f}, but this example promises at least "
            f"{PROMISED_REWARD}; please report it with {RUNS / 'rl'}/metrics.jsonl"
        )


if __name__ == "__main__":
    main()
