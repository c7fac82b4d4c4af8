"""Make docs/task-sets.md: what ships with gradus, and what `env check` says.

    python scripts/task_sets.py --results runs/task_sets          # checks what has no result yet
    python scripts/task_sets.py --results runs/task_sets --only wordle zebra --again

Every result is the output of `gradus env check ... --attack --json`, a file each. With `--only`, a
row that has no result in the folder stays as the page has it. Speed depends on the machine; the
page says where it was measured. `--keep-speeds` leaves the page's, for checks beside other work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "task-sets.md"
NO_TASKS = {
    "chat": "a harness",
    "compact": "a harness",
    "gpqa": "the items of three task sets",
    "kit": "the library of the task sets",
}
"""Packages of `environments/` that are no source, and what they are."""
CONFIGS = {"jsonl", "program"}
"""Task sets that need a key: checked with their file in examples/task_sets."""
IN_CONTAINERS = {"general-agent", "swe-sandbox"}
"""Task sets that need Podman, and an image of their default name."""
CHECK_SECONDS = 600
CONTAINER_CHECK_SECONDS = 3_600
"""Of those; each episode starts a container and waits seconds for its end."""


def task_sets() -> list[str]:
    """The short ids of what `environments/` holds, but for harnesses."""
    folders = sorted(path.parent.name for path in (ROOT / "environments").glob("*/__init__.py"))
    names = [folder.removeprefix("gradus_").replace("_", "-") for folder in folders]
    return [name for name in names if name not in NO_TASKS]


def words_of(name: str) -> list[str]:
    """What to check of a task set."""
    if name in CONFIGS:
        return ["@", f"examples/task_sets/{name.replace('-', '_')}.toml"]
    if name in IN_CONTAINERS:
        return [name, "--agent.runtime.type", "podman"]
    return [name]


def check(name: str, results: Path) -> None:
    """Run `gradus env check` and keep its lines."""
    program = [sys.executable, "-m", "gradus.cli.main"]
    command = [*program, "env", "check", *words_of(name), "--attack", "--json"]
    seconds = CONTAINER_CHECK_SECONDS if name in IN_CONTAINERS else CHECK_SECONDS
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise SystemExit(f"{' '.join(command)} said nothing:\n{done.stderr[-2_000:]}")
    except subprocess.TimeoutExpired:
        lines = []
    (results / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def load(path: Path) -> list[dict[str, Any]]:
    """The lines of one check."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def row(name: str, lines: Sequence[Mapping[str, Any]]) -> str:
    """The table's row of one task set."""
    folder = f"gradus_{name.replace('-', '_')}"
    by_name = {line["check"]: line for line in lines}
    values = {key: value for line in lines for key, value in (line.get("values") or {}).items()}
    tasks = values.get("num_tasks", "?")
    rewards = ", ".join(
        f"{value:g}" if len(values["rewards"]) == 1 else f"{who} {value:g}"
        for who, value in (values.get("rewards") or {}).items()
    )
    speed = values.get("episodes_per_second")
    cells = [
        f"[`{name}`](../environments/{folder}/)",
        "endless" if tasks is None else str(tasks),
        rewards or "-",
        shares(values.get("highest") or {}),
        shares(values.get("chance") or {}),
        "-" if speed is None else f"{speed:.0f}" if speed >= 10 else f"{speed:.2g}",
        verdict(by_name),
    ]
    return f"| {' | '.join(cells)} |"


def with_speed_of(before: str, row: str) -> str:
    """The row with the speed of the row before, if that has one."""
    cells, old = row.split(" | "), before.split(" | ")
    if len(old) == len(cells):
        cells[-2] = old[-2]
    return " | ".join(cells)


def shares(by_role: Mapping[str, float]) -> str:
    """Rewards of the seats that train, without the seat's name where it is alone."""
    shown = [f"{who} {value:.2g}" for who, value in by_role.items()]
    return ", ".join(shown if len(shown) > 1 else [text.split()[-1] for text in shown]) or "-"


def verdict(lines: Mapping[str, Mapping[str, Any]]) -> str:
    """What the check said, with the names of what is not in order."""
    if not lines:
        return "no result"
    counted = {
        kind: [name for name, line in lines.items() if line["outcome"] == kind]
        for kind in ("broken", "note", "not checked")
    }
    parts = [f"{kind}: {', '.join(names)}" for kind, names in counted.items() if names]
    return f"{sum(line['outcome'] == 'ok' for line in lines.values())} ok" + "".join(
        f"; {part}" for part in parts
    )


def page(rows: Sequence[str]) -> str:
    """The whole page."""
    where = f"Python {platform.python_version()}, {os.cpu_count()} cores"
    columns = ["id", "offline tasks", "reward", "best attack", "chance"]
    columns += ["episodes/s", "`gradus env check`"]
    return f"""# Task sets

Made by `python scripts/task_sets.py`; how to write your own: [environments.md](environments.md).
Each row is what `gradus env check` saw: the tasks that work offline, the reward of a perfect or
plain episode, the highest of the hostile policies of `--attack` beside chance, episodes per second
of one worker with 16 in flight and a scripted model ({where}), and the verdict. In games a seat
that wins is compared with its right play; `-` where it was not played.

| {" | ".join(columns)} |
|{"---|" * len(columns)}
{chr(10).join(rows)}

`gradus-chat` and `gradus-compact` are harnesses; `gradus_gpqa` holds the items of `gpqa-rlvr`,
`gpqa-debate` and `gpqa-consultancy`; `gradus_kit` is the library of them all.
"""


def rows_of(results: Path, *, before: str, keeps_speeds: bool = False) -> list[str]:
    """A row for each task set: of its result, else of the page before, else without a result."""
    kept = {line.split("`")[1]: line for line in before.splitlines() if line.startswith("| [`")}
    rows = []
    for name in task_sets():
        file = results / f"{name}.jsonl"
        lines = load(file) if file.exists() else []
        made = row(name, lines)
        if keeps_speeds and lines:
            made = with_speed_of(kept.get(name, ""), made)
        rows.append(made if lines else kept.get(name, made))
    return rows


def main() -> None:
    """Check what has no result, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="folder of the checks' lines")
    parser.add_argument("--only", nargs="+", help="check these alone; the page still has all")
    parser.add_argument("--again", action="store_true", help="also check what has a result")
    parser.add_argument("--keep-speeds", action="store_true", help="keep the page's episodes/s")
    chosen = parser.parse_args()
    chosen.results.mkdir(parents=True, exist_ok=True)
    for name in chosen.only or task_sets():
        if chosen.again or not (chosen.results / f"{name}.jsonl").exists():
            check(name, chosen.results)
    before = PAGE.read_text() if chosen.only or chosen.keep_speeds else ""
    rows = rows_of(chosen.results, before=before, keeps_speeds=chosen.keep_speeds)
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
