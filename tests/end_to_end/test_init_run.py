"""The folder that `gradus init` writes, trained as its page says: what the model then says."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gradus.files import read_json

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

PYTHON = os.environ.get("GRADUS_TRIED", sys.executable)
"""In `make try-wheel` that of a fresh environment with nothing but the wheel and what it needs."""


def replies(folder: Path, step: int) -> list[str]:
    """What the policy said at a step."""
    lines = (folder / "episodes" / f"step_{step}" / "train.jsonl").read_text().splitlines()
    traces = [trace for line in lines for trace in json.loads(line)["traces"]]
    return [trace["nodes"][-1]["message"].get("content") or "" for trace in traces]


def share(said: list[str], rule: Callable[[str], bool]) -> float:
    return statistics.fmean(map(rule, said))


def is_lower(text: str) -> bool:
    return bool(re.fullmatch("[a-z]+", text))


def is_pronounced(text: str) -> bool:
    """Letters only, two or more, vowels and consonants by turns."""
    kinds = "".join("v" if c in "aeiou" else "c" for c in text)
    return bool(re.fullmatch("[a-z]{2,}", text)) and not re.search("vv|cc", kinds)


def gradus(folder: Path, *words: str) -> str:
    """What the command prints in a folder."""
    done = subprocess.run(
        [PYTHON, "-m", "gradus", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_model_of_gradus_init_learns_what_makes_a_word_and_no_trick(
    tmp_path: Path,
) -> None:
    gradus(tmp_path, "init", "demo")
    # 12 of its 70 steps: letters come first, then their turns, and whole words last.
    printed = gradus(tmp_path / "demo", "rl", "@", "rl.toml", "--max-steps", "12")
    run_dir = tmp_path / "demo" / "runs" / "demo"
    summary = read_json(run_dir / "summary.json")
    assert summary["outcome"] == "done", printed
    assert summary["reward_last"] > summary["reward_first"] + 0.15
    first, last = replies(run_dir, 0), replies(run_dir, 11)
    assert share(first, is_pronounced) < 0.02
    assert share(last, is_pronounced) > 0.04, last[:20]
    assert share(first, is_lower) < 0.1
    assert share(last, is_lower) > 0.3, last[:20]
    assert share(last, lambda text: "<" in text) < 0.1, "markup is no letter"
    assert share(last, lambda text: len(set(text)) < len(text) / 2) < 0.1, "one letter again"
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rung = {
        name
        for record in records
        for name, value in record.items()
        if name.startswith("alarm/") and not name.endswith("/value") and value
    }
    assert rung == set()
