"""Draw what results.json holds, one small panel per run (needs the extra `plot`).

python examples/algorithms/plot_results.py --out examples/algorithms/curves.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from learn import Row, read_results
from matplotlib import pyplot

COLUMNS = 5
_LONGEST_WORDS = 34


def plot_results(rows: Sequence[Row], out: Path) -> None:
    """The first quantity of every run over its steps; further seeds go into the same panel."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    num_lines = -(-len(names) // COLUMNS)
    figure, grid = pyplot.subplots(
        num_lines, COLUMNS, figsize=(2.3 * COLUMNS, 2.1 * num_lines), dpi=90, squeeze=False
    )
    panels = dict(zip(names, grid.flat, strict=False))
    for row in rows:
        shown = row["shown"][0]
        steps = [
            place * row["steps"] / len(shown["values"]) for place in range(len(shown["values"]))
        ]
        panels[row["name"]].plot(steps, shown["values"], label=f"seed {row['seed']}")
        panels[row["name"]].set_title(row["name"], fontsize=9)
        panels[row["name"]].set_xlabel(_short(shown["measure"]), fontsize=7)
    for panel in grid.flat:
        panel.tick_params(labelsize=7)
        panel.grid(alpha=0.3)
        panel.set_visible(bool(panel.lines))
        if len(panel.lines) > 1:
            panel.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(out)
    pyplot.close(figure)


def _short(words: str) -> str:
    words = words.replace("`", "")
    return words if len(words) <= _LONGEST_WORDS else f"{words[: _LONGEST_WORDS - 1]}…"


def main() -> None:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(description="Draw the results of the algorithm runs.")
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    arguments = parser.parse_args()
    plot_results(read_results(), arguments.out)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
