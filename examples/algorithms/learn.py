"""Does each algorithm learn? Short CPU runs on the tiny model, one per algorithm, and a table.

    python examples/algorithms/learn.py                # everything, 45 minutes on two cores
    python examples/algorithms/learn.py rae echo       # these two
    python examples/algorithms/learn.py grpo --seed 1  # another seed of the run
    python examples/algorithms/learn.py --table        # the table of results.json, into README.md

A new algorithm is one entry in recipes.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measures import Edge, edges
from recipes import FOLDER, RECIPES, RUNS, TEACHER, Recipe, model_of, warm_up_arguments
from teacher import served

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / FOLDER / "results.json"
README = REPOSITORY / FOLDER / "README.md"
_MARKS = ("<!-- table -->\n", "<!-- end -->")
"""In the README, around the table."""
Row = dict[str, Any]


def run(arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> float:
    """Run Python with these arguments in the repository; its seconds. Refuses a failure."""
    print("==>", *arguments, flush=True)
    started = time.perf_counter()
    code = subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **(variables or {})},
        check=False,
    ).returncode
    if code:
        raise SystemExit(f"learn: ended with code {code}; its own words are above")
    return time.perf_counter() - started


def prepare(recipes: Sequence[Recipe]) -> None:
    """Build the model, and warm it up for each task; what is there already is kept."""
    start = RUNS / "start"
    needed = dict.fromkeys(name for recipe in recipes for name in recipe.warm_ups)
    files = [REPOSITORY / start / f"{name}.jsonl" for name in needed]
    if not all(file.exists() for file in files):
        run([str(FOLDER / "prepare.py"), str(start)])
    for name in needed:
        if not (REPOSITORY / model_of(name)).exists():
            seconds = run(["-m", "gradus.cli.main", *warm_up_arguments(name)])
            print(f"warm-up {name}: {seconds:.0f} s", flush=True)


@contextmanager
def teacher_of(recipe: Recipe) -> Iterator[Mapping[str, str]]:
    """The variables of a run, while its teacher is served if it has one."""
    if not recipe.has_teacher:
        yield {}
        return
    log = REPOSITORY / RUNS / "teacher.log"
    with served(REPOSITORY / model_of(TEACHER), log) as variables:
        yield variables


def measured(recipe: Recipe, *, seed: int, seconds: float, repository: Path = REPOSITORY) -> Row:
    """What a finished run showed, for results.json."""
    run_dir = recipe.run_dir(repository, seed)
    shown, num_steps = [], 0
    for measure in recipe.shown:
        values = measure.read(run_dir)
        before, after = edges(values, steps_per_value=measure.steps_per_value)
        num_steps = max(num_steps, len(values) * measure.steps_per_value)
        shown.append(
            {
                "measure": measure.words,
                "before": vars(before),
                "after": vars(after),
                "values": [round(value, 5) for value in values],
            }
        )
    return {
        "name": recipe.name,
        "seed": seed,
        "task": recipe.config,
        "command": " ".join(["gradus", *recipe.arguments(seed)]),
        "steps": num_steps,
        "seconds": round(seconds),
        "shown": shown,
    }


def store(row: Row, path: Path = RESULTS) -> None:
    """Put a result in place of the older one of the same run."""
    rows = [r for r in read_results(path) if (r["name"], r["seed"]) != (row["name"], row["seed"])]
    order = {recipe.name: place for place, recipe in enumerate(RECIPES)}
    rows = sorted([*rows, row], key=lambda r: (order.get(r["name"], len(order)), r["seed"]))
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def read_results(path: Path = RESULTS) -> list[Row]:
    """The stored results; none when there is no file."""
    if not path.exists():
        return []
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown: what each run showed before and after."""
    lines = [
        "| run | seed | task | shown by | first 3 steps | last 3 steps | steps | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        heads = [f"`{row['name']}`", str(row["seed"]), row["task"]]
        tails = [str(row["steps"]), str(row["seconds"])]
        for shown in row["shown"]:
            edge_texts = [Edge(**shown[end]).text() for end in ("before", "after")]
            lines.append(f"| {' | '.join([*heads, shown['measure'], *edge_texts, *tails])} |")
            heads, tails = [""] * len(heads), [""] * len(tails)
    return lines


def write_table(lines: Sequence[str], readme: Path = README) -> None:
    """Put the table in place of the older one."""
    before, mark, rest = readme.read_text(encoding="utf-8").partition(_MARKS[0])
    after = rest.partition(_MARKS[1])[2]
    text = "\n".join(lines)
    readme.write_text(f"{before}{mark}{text}\n{_MARKS[1]}{after}", encoding="utf-8")


def main() -> None:
    """Run what was asked for, and print the table."""
    parser = argparse.ArgumentParser(description="Show that each algorithm learns.")
    names = [recipe.name for recipe in RECIPES]
    parser.add_argument("names", nargs="*", choices=[[], *names], help="runs; all by default")
    parser.add_argument("--seed", type=int, default=0, help="seed of tasks and sampling")
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--warm-up", action="store_true", help="only make the models")
    arguments = parser.parse_args()
    chosen = [recipe for recipe in RECIPES if not arguments.names or recipe.name in arguments.names]
    if not arguments.table:
        prepare(chosen)
    if not arguments.table and not arguments.warm_up:
        for recipe in chosen:
            with teacher_of(recipe) as variables:
                words = ["-m", "gradus.cli.main", *recipe.arguments(arguments.seed)]
                seconds = run(words, variables)
            store(measured(recipe, seed=arguments.seed, seconds=seconds))
    lines = table(read_results())
    write_table(lines)
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
