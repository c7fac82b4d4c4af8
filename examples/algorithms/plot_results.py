"""Draw what results.json holds, one small panel per run and quantity (needs the extra `plot`).

python examples/algorithms/plot_results.py --out examples/algorithms/curves.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

import matplotlib

matplotlib.use("Agg")

from learn import Row, read_results
from matplotlib import pyplot

COLUMNS = 5
_LINE_CHARS = 32
_FEWEST = 2
"""A quantity measured so often, before and after, is no curve."""


def plot_results(rows: Sequence[Row], out: Path) -> None:
    """Every quantity of every run over its steps; further seeds go into the same panel."""
    keys = dict.fromkeys((row["name"], it["measure"]) for row in rows for it in row["shown"])
    drawn = [key for key in keys if any(_values(row, key) for row in rows)]
    num_lines = -(-len(drawn) // COLUMNS)
    figure, grid = pyplot.subplots(
        num_lines, COLUMNS, figsize=(2.3 * COLUMNS, 2.1 * num_lines), dpi=90, squeeze=False
    )
    for panel in grid.flat:
        panel.set_visible(False)
    for key, panel in zip(drawn, grid.flat, strict=False):
        panel.set_visible(True)
        panel.tick_params(labelsize=7)
        panel.grid(alpha=0.3)
        panel.set_title(key[0], fontsize=9)
        panel.set_xlabel(fill(key[1].replace("`", ""), _LINE_CHARS), fontsize=7)
        for row in rows:
            if values := _values(row, key):
                steps = [place * row["steps"] / len(values) for place in range(len(values))]
                panel.plot(steps, values, label=f"seed {row['seed']}")
        if len(panel.lines) > 1:
            panel.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(out)
    pyplot.close(figure)


def _values(row: Row, key: tuple[str, str]) -> list[float]:
    """The curve of one quantity in a run; none where it is of another run, or only two points."""
    found = [it["values"] for it in row["shown"] if (row["name"], it["measure"]) == key]
    return found[0] if found and len(found[0]) > _FEWEST else []


def main() -> None:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(description="Draw the results of the algorithm runs.")
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    arguments = parser.parse_args()
    plot_results(read_results(), arguments.out)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
