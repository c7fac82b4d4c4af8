"""Draw the reward curve of one or more runs as a PNG (needs the extra `plot`).

python examples/reverse_text/plot_curve.py runs/demo/rl --out curve.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from curve import REWARD, read_curve
from matplotlib import pyplot


def plot_runs(run_dirs: list[Path], out: Path, *, key: str = REWARD) -> None:
    """One line per run directory, small enough for a README."""
    figure, axes = pyplot.subplots(figsize=(6.0, 3.2), dpi=100)
    for run_dir in run_dirs:
        curve = read_curve(run_dir / "metrics.jsonl", key)
        axes.plot(curve.steps, curve.values, marker=".", label=run_dir.name)
    axes.set_xlabel("step")
    axes.set_ylabel(key)
    axes.grid(alpha=0.3)
    if key == REWARD:
        axes.set_ylim(0, 1)
    if len(run_dirs) > 1:
        axes.legend()
    figure.tight_layout()
    figure.savefig(out)
    pyplot.close(figure)


def main() -> None:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(description="Draw a metric of runs over their steps.")
    parser.add_argument("run_dirs", type=Path, nargs="+", help="run directories")
    parser.add_argument("--out", type=Path, default=Path("curve.png"))
    parser.add_argument("--key", default=REWARD, help="metric of metrics.jsonl")
    arguments = parser.parse_args()
    plot_runs(arguments.run_dirs, arguments.out, key=arguments.key)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
