"""Collect the curves of the small runs, and draw them with one line per seed (extra `plot`).

    python examples/recipes/curves.py               # what lies in runs/tiny
    python examples/recipes/curves.py --out x.png   # the picture elsewhere

What is found goes into curves.json, from which the picture is drawn; a run is stored again when it
has more steps than before. What is not in curves.json was not run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path.insert(0, str(HERE.parent / "reverse_text"))

from curve import read_curve  # noqa: E402

RESULTS = HERE / "curves.json"
COLUMNS = 3
EDGE_STEPS = 3
"""Steps that "first" and "last" average over."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One quantity of one kind of run."""

    run: str
    """Folder in `runs/tiny`, `{seed}` for the seed."""
    title: str
    metric: str


DEBATER = "episode/debate/agent/{}/metric/{}/mean"
PANELS: Sequence[Panel] = (
    Panel("alphabet_sort-{seed}/rl", "alphabet-sort: reward", "episode/reward/mean"),
    Panel("wordle-{seed}/rl", "wordle: reward", "episode/reward/mean"),
    Panel(
        "debate-{seed}/selfplay",
        "self-play: judge picks the right answer",
        "episode/debate/metric/episode/judge_selected_correct/mean",
    ),
    Panel(
        "debate-{seed}/selfplay",
        "self-play: unreadable replies of debater_a",
        DEBATER.format("debater_a", "parse_errors"),
    ),
    Panel(
        "debate-{seed}/selfplay",
        "self-play: debater_a is right",
        DEBATER.format("debater_a", "final_correct"),
    ),
    Panel(
        "debate-{seed}/opponent",
        "opponent: reward of debater_a",
        "episode/debate/agent/debater_a/reward/mean",
    ),
    Panel(
        "debate-{seed}/consultancy",
        "consultancy: reward",
        "episode/debate/agent/consultant/reward/mean",
    ),
    Panel(
        "debate-{seed}/consultancy",
        "consultancy: judge picks the assigned answer",
        "episode/debate/agent/consultant/reward/debate/mean",
    ),
    Panel(
        "debate-{seed}/consultancy",
        "consultancy: unreadable or empty replies",
        DEBATER.format("consultant", "lost_turns"),
    ),
    Panel(
        "debate-{seed}/consultancy",
        "consultancy: judge picks the right answer",
        "episode/debate/metric/episode/judge_selected_correct/mean",
    ),
    Panel("debate-{seed}/rlvr", "rlvr: right letters", "episode/reward/mean"),
)


def collect(runs: Path, stored: Sequence[Row]) -> list[Row]:
    """The stored rows, with those of the runs below `runs` put in or replaced."""
    rows = {(row["run"], row["title"], row["seed"]): row for row in stored}
    for panel in PANELS:
        for folder in sorted(runs.glob(panel.run.format(seed="*"))):
            seed = int(folder.parent.name.rpartition("-")[2])
            metrics = folder / "metrics.jsonl"
            if not metrics.is_file():
                continue
            curve = read_curve(metrics, panel.metric)
            key = (panel.run, panel.title, seed)
            if len(curve.values) >= len(rows.get(key, {}).get("values", [])):
                rows[key] = {
                    "run": panel.run,
                    "title": panel.title,
                    "metric": panel.metric,
                    "seed": seed,
                    "steps": list(curve.steps),
                    "values": [round(value, 4) for value in curve.values],
                }
    order = {(panel.run, panel.title): place for place, panel in enumerate(PANELS)}
    return sorted(rows.values(), key=lambda r: (order[(r["run"], r["title"])], r["seed"]))


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown: of each quantity, means over the first and the last steps of every seed."""
    lines = ["| quantity, by seed | first 3 steps | last 3 steps | steps |", "|---|---|---|---|"]
    for title, seeds in groupby(rows, key=lambda row: row["title"]):
        runs = [row["values"] for row in seeds]
        edges = [[run[:EDGE_STEPS] for run in runs], [run[-EDGE_STEPS:] for run in runs]]
        first, last = (", ".join(f"{statistics.fmean(it):.3f}" for it in edge) for edge in edges)
        lines.append(f"| {title} | {first} | {last} | {len(runs[0])} |")
    return lines


def draw(rows: Sequence[Row], out: Path) -> None:
    """One panel per quantity, one line per seed."""
    titles = list(dict.fromkeys(row["title"] for row in rows))
    num_lines = max(1, -(-len(titles) // COLUMNS))
    figure, grid = pyplot.subplots(
        num_lines, COLUMNS, figsize=(3.6 * COLUMNS, 2.6 * num_lines), dpi=90, squeeze=False
    )
    panels: Mapping[str, Any] = dict(zip(titles, grid.flat, strict=False))
    for row in rows:
        panel = panels[row["title"]]
        panel.plot(row["steps"], row["values"], marker=".", label=f"seed {row['seed']}")
        panel.set_title(row["title"], fontsize=9)
        panel.set_xlabel("step", fontsize=8)
    for panel in grid.flat:
        panel.set_visible(bool(panel.lines))
        panel.grid(alpha=0.3)
        panel.tick_params(labelsize=7)
        if len(panel.lines) > 1:
            panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(out)
    pyplot.close(figure)


def main() -> None:
    """Collect, draw, and print the table."""
    parser = argparse.ArgumentParser(description="Draw the curves of the small runs.")
    parser.add_argument("--runs", type=Path, default=REPOSITORY / "runs" / "tiny")
    parser.add_argument("--out", type=Path, default=HERE / "curves.png")
    arguments = parser.parse_args()
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    rows = collect(arguments.runs, stored)
    if not rows:
        raise SystemExit(f"curves: there is no run in {arguments.runs}")
    lines = ",\n".join(json.dumps(row) for row in rows)
    RESULTS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    draw(rows, arguments.out)
    print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
