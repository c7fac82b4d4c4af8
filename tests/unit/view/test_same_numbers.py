"""Every number that the page gets is the one in the files, read here by json alone."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from run_folders import a_run, add_episode

from gradus.monitor import JsonlMonitor
from gradus.view.server import Viewer
from gradus.view.shelf import open_shelf

Rows = list[dict[str, Any]]


def objects(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained(root: Path) -> None:
    """Steps and evaluations of versions between them, some numbers not finite, some absent."""
    numbers = random.Random(0)
    monitor = JsonlMonitor(root / "metrics.jsonl")
    for step in range(30):
        values = {
            f"loss/m{n}/mean": numbers.uniform(-1e6, 1e6) for n in range(70) if (step + n) % 5
        }
        extra = {"batch/tokens/sum": 100.0 + step, "odd": [math.nan, math.inf, 1e-300][step % 3]}
        monitor.record(values | extra, step=step)
        if step % 10 == 9:
            monitor.record(
                {"eval/version": step + 1.0, "eval/words/avg@1": step / 30}, step=step + 1
            )
    monitor.close()


def played(root: Path) -> None:
    numbers = random.Random(1)
    for step in range(5):
        for number in range(numbers.randrange(1, 30)):
            oldest = max(0, step - number % 3)
            add_episode(
                root,
                step=step,
                reward=numbers.uniform(-3, 3),
                reply="r",
                group=f"g{step}.{number // 4}",
                versions={"oldest": oldest, "newest": step},
                advantages=[numbers.uniform(-1, 1)],
                dropped={"s": "too_old"} if number % 7 == 3 else {},
            )


def evaluated(root: Path) -> None:
    trained(root)
    played(root)
    for path in sorted(root.glob("episodes/step_*/train.jsonl")):
        path.rename(path.with_name("eval.jsonl"))


def both(root: Path) -> None:
    trained(root)
    played(root)


async def numbers_of(root: Path) -> tuple[dict[str, Any], Rows]:
    """All curves over steps, and all cells, as the page gets them."""
    viewer = Viewer(open_shelf([root]), token="t")
    async with TestClient(TestServer(viewer.app(), host="127.0.0.1")) as client:

        async def ask(path: str, **query: Any) -> Any:
            return await (await client.get(f"/api/runs/run/{path}", params=query)).json()

        await (await client.get("/?token=t")).release()
        names = [it["name"] for it in await ask("metrics")]
        curves: dict[str, Any] = {}
        for start in range(0, len(names), 64):
            curves |= await ask("curves", name=names[start : start + 64])
        rows: Rows = []
        while part := (await ask("episodes", **{"from": len(rows)}))["rows"]:
            rows += part
        return curves, rows


@pytest.mark.parametrize("make", [trained, evaluated, both])
async def test_every_curve_and_every_cell_is_what_the_files_say(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    root = a_run(tmp_path / "run")
    (root / "metrics.jsonl").unlink(missing_ok=True)
    make(root)
    curves, rows = await numbers_of(root)
    expected: dict[str, list[tuple[float, float]]] = {}
    for record in objects(root / "metrics.jsonl"):
        is_evaluation = "eval/version" in record
        for name, value in record.items():
            if name in ("step", "time", "non_finite"):
                continue
            if not isinstance(value, int | float) or is_evaluation != name.startswith("eval/"):
                continue
            place = record["step"] + (0 if is_evaluation else 1)
            expected.setdefault(name, []).append((place, value))
    drawn = {name: list(zip(it["x"], it["y"], strict=True)) for name, it in curves.items()}
    assert {name: points for name, points in drawn.items() if points} == expected
    assert len(expected) > 70

    by_key = {row["key"]: row for row in rows}
    num_cells = 0
    for path in root.glob("episodes/step_*/*.jsonl"):
        step, offset = int(path.parent.name.removeprefix("step_")), 0
        for line in path.read_bytes().splitlines(keepends=True):
            record, row = json.loads(line), by_key.pop(f"{path.stem}-{step}-{offset}")
            own, trace = record["gradus"], record["traces"][0]
            cells = {
                "step": step,
                "purpose": path.stem,
                "reward": trace["rewards"]["right"]["score"],
                "part:right": trace["rewards"]["right"]["score"],
                "advantage": own["advantages"][0],
                "tokens": trace["num_output_tokens"],
                "turns": 1,
                "staleness": None if path.stem == "eval" else step - own["versions"]["oldest"],
                "source": own["source"],
                "group": own["group"],
                "task": own["task"]["key"],
                "dropped": next(iter(own["dropped"].values()), ""),
            }
            assert {name: row[name] for name in cells} == cells
            num_cells += len(cells)
            offset += len(line)
    assert by_key == {}
    assert num_cells > 500 or make is trained
