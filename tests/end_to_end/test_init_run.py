"""The folder that `gradus init` writes, trained as its page says: what the model then says."""

from __future__ import annotations

import json
import statistics
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


def test_the_model_of_gradus_init_learns_words_of_vowels_and_no_trick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finish(start("init", "demo"))
    monkeypatch.chdir(tmp_path / "demo")
    printed = finish(start("rl", "@", "rl.toml"))
    run_dir = tmp_path / "demo" / "runs" / "demo"
    summary = read_json(run_dir / "summary.json")
    assert summary["outcome"] == "done", printed
    assert summary["reward_last"] > max(0.5, summary["reward_first"] + 0.4)
    said = replies(run_dir, 29)
    assert statistics.fmean("<" in text for text in said) < 0.05, "markup is not a vowel"
    assert statistics.fmean(len(text) >= 5 and set(text) <= set("aeiou") for text in said) > 0.3
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    alarms = {name: value for name, value in records[-1].items() if name.startswith("alarm/")}
    ringing = [name for name, value in alarms.items() if value and not name.endswith("/value")]
    assert ringing == []
