"""Does each algorithm learn? Short CPU runs on the tiny model, one per algorithm, and a table.

    python examples/algorithms/learn.py                # everything, about ten minutes
    python examples/algorithms/learn.py rae echo       # these two
    python examples/algorithms/learn.py --table        # the table of the runs that are there

A new algorithm is one line in RECIPES.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
RUNS = Path("runs/algorithms")
"""Relative to the repository, like the paths in the TOML files."""
EDGE_STEPS = 3
"""Steps that "before" and "after" average over."""

Measure = Callable[[Path], list[float]]
"""One number per step of a run, in step order."""


def metric(name: str) -> Measure:
    """The values of a metric."""

    def read(run_dir: Path) -> list[float]:
        rows = read_lines(run_dir / "metrics.jsonl")
        values = {row["step"]: row[name] for row in rows if row.get(name) is not None}
        return [values[step] for step in sorted(values)]

    return read


def mistakes(run_dir: Path) -> list[float]:
    """Share of the clear decisions in poker (K or J against a bet) that give chips away."""
    shares = []
    folders = (run_dir / "episodes").glob("step_*")
    for folder in sorted(folders, key=lambda path: int(path.name.removeprefix("step_"))):
        traces = [
            trace
            for record in read_lines(folder / "train.jsonl")
            for trace in record.get("traces", ())
        ]
        decisions = sum(trace["metrics"].get("clear_decisions") or 0 for trace in traces)
        wrong = sum(trace["metrics"].get("mistakes") or 0 for trace in traces)
        if decisions:
            shares.append(wrong / decisions)
    return shares


def read_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """The JSON objects of a file."""
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


REWARD = ("mean reward", metric("episode/reward/mean"))
MISTAKES = ("mistakes per clear decision", mistakes)
SURPRISE = ("surprise at tool outputs, nats", metric("loss/ce/nll/mean"))
SURPRISE_IN_BATCH = ("surprise at tool outputs, nats", metric("loss/ce_batch/nll/mean"))


@dataclass(frozen=True)
class Recipe:
    """One run: which algorithm on which task, and what shows that it learned."""

    name: str
    task: str
    """Names `sft_<task>.toml` and `rl_<task>.toml`."""
    algorithm: str
    shown: tuple[tuple[str, Measure], ...]
    flags: Sequence[str] = ()

    @property
    def command(self) -> list[str]:
        """The arguments of `gradus`."""
        config = HERE.relative_to(REPOSITORY) / f"rl_{self.task}.toml"
        algo = ["--orchestrator.train.algo.type", self.algorithm]
        return ["rl", "@", str(config), "--name", self.name, *algo, *self.flags, "--clean"]

    @property
    def run_dir(self) -> Path:
        """Where the run's results are."""
        return REPOSITORY / RUNS / self.name


RECIPES = (
    Recipe("grpo", "reverse_text", "grpo", (REWARD,)),
    Recipe("max_rl", "reverse_text", "max_rl", (REWARD,)),
    Recipe("hierarchical_grpo", "kuhn_poker", "hierarchical_grpo", (MISTAKES,)),
    Recipe("rae", "kuhn_poker", "rae", (MISTAKES,)),
    Recipe("echo", "word_lookup", "echo", (SURPRISE, REWARD)),
)


def warm_up(task: str) -> list[str]:
    """The arguments of `gradus` that make the model of a task."""
    return ["sft", "@", str(HERE.relative_to(REPOSITORY) / f"sft_{task}.toml"), "--clean"]


def run(arguments: Sequence[str]) -> float:
    """Run Python with these arguments in the repository; its seconds. Refuses a failure."""
    print("==>", *arguments, flush=True)
    started = time.perf_counter()
    code = subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, check=False).returncode
    if code:
        raise SystemExit(f"learn: ended with code {code}; its own words are above")
    return time.perf_counter() - started


def prepare(recipes: Sequence[Recipe]) -> None:
    """Build the model, and warm it up for each task; what is there already is kept."""
    start = RUNS / "start"
    if not (REPOSITORY / start / "model").exists():
        run([str(HERE.relative_to(REPOSITORY) / "prepare.py"), str(start)])
    for task in dict.fromkeys(recipe.task for recipe in recipes):
        if not (REPOSITORY / RUNS / f"warm-up-{task}" / "model").exists():
            seconds = run(["-m", "gradus.cli.main", *warm_up(task)])
            print(f"warm-up of {task}: {seconds:.0f} s", flush=True)


def table(recipes: Sequence[Recipe]) -> list[str]:
    """Markdown: what each run showed before and after."""
    lines = [
        "| algorithm | task | shown by | before | after | steps |",
        "|---|---|---|---|---|---|",
    ]
    for recipe in recipes:
        if not (recipe.run_dir / "metrics.jsonl").exists():
            continue
        for words, measure in recipe.shown:
            values = measure(recipe.run_dir)
            if not values:
                continue
            before = statistics.fmean(values[:EDGE_STEPS])
            after = statistics.fmean(values[-EDGE_STEPS:])
            lines.append(
                f"| `{recipe.name}` | {recipe.task} | {words} | {before:.3f} | {after:.3f} "
                f"| {len(values)} |"
            )
    return lines


def main() -> None:
    """Run what was asked for, and print the table."""
    parser = argparse.ArgumentParser(description="Show that each algorithm learns.")
    names = [recipe.name for recipe in RECIPES]
    parser.add_argument("names", nargs="*", choices=[[], *names], help="runs; all by default")
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--warm-up", action="store_true", help="only make the models")
    arguments = parser.parse_args()
    chosen = [recipe for recipe in RECIPES if not arguments.names or recipe.name in arguments.names]
    if not arguments.table:
        prepare(chosen)
    if not arguments.table and not arguments.warm_up:
        for recipe in chosen:
            seconds = run(["-m", "gradus.cli.main", *recipe.command])
            print(f"{recipe.name}: {seconds:.0f} s", flush=True)
    print(*table(RECIPES), sep="\n")


if __name__ == "__main__":
    main()
