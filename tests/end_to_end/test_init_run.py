"""The folder that `gradus init` writes, trained as its page says: what the model then says."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import finish, start

from gradus.files import read_json

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]


def replies(folder: Path, step: int) -> list[str]:
    """What the policy said at a step."""
    lines = (folder / "episodes" / f"step_{step}" / "train.jsonl").read_text().splitlines()
    traces = [trace for line in lines for trace in json.loads(line)["traces"]]
    return [trace["nodes"][-1]["message"].get("content") or "" for trace in traces]


def share(said: list[str], rule: Callable[[str], bool]) -> float:
    return statistics.fmean(map(rule, said))


def is_word(text: str) -> bool:
    """Four letters or more, vowels and consonants by turns, none twice."""
    kinds = "".join("v" if c in "aeiou" else "c" for c in text)
    is_new = len(set(text)) == len(text)
    return len(text) >= 4 and text.isalpha() and is_new and not re.search("vv|cc", kinds)


def test_the_model_of_gradus_init_learns_to_say_words_and_no_trick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finish(start("init", "demo"))
    monkeypatch.chdir(tmp_path / "demo")
    printed = finish(start("rl", "@", "rl.toml"), seconds=900)
    run_dir = tmp_path / "demo" / "runs" / "demo"
    summary = read_json(run_dir / "summary.json")
    assert summary["outcome"] == "done", printed
    assert summary["reward_last"] > summary["reward_first"] + 0.4
    first, last = replies(run_dir, 0), replies(run_dir, 69)
    assert share(first, is_word) < 0.02
    assert share(last, is_word) > 0.25, last[:20]
    assert share(last, lambda text: "<" in text) < 0.05, "markup is no letter"
    assert share(last, lambda text: len(text) > 10) < 0.05, "a longer text is no better"
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rung = {
        name
        for record in records
        for name, value in record.items()
        if name.startswith("alarm/") and not name.endswith("/value") and value
    }
    assert rung == set()
