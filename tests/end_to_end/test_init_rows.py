"""Rows of a user through every stage that `gradus init --from` writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import finish, start

from gradus.files import read_json

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

REWARD = """
import difflib
def score(reply, row):
    return difflib.SequenceMatcher(None, reply, row["answer"]).ratio()
"""


def test_rows_of_a_user_pass_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["red", "green", "blue", "oak", "pine", "salt"]
    rows = [{"question": f"{a} {b}", "answer": f"{b} {a}"} for a in words for b in words]
    Path("my rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rewards.py").write_text(REWARD)
    finish(start("init", "mine", "--from", "my rows.jsonl", "--reward", "rewards.py:score"))
    monkeypatch.chdir("mine")
    finish(start("sft", "@", "sft.toml", "--max-steps", "30"))
    trained = ["--model.name", "runs/mine-sft/model"]
    small = ["--max-steps", "2", "--orchestrator.groups-per-batch", "2"]
    finish(start("rl", "@", "rl.toml", *trained, *small))
    finish(start("eval", "@", "eval.toml", "--model.name", "runs/mine/model"))
    outcomes = {
        path.parent.name: read_json(path)["outcome"] for path in Path("runs").glob("*/summary.json")
    }
    assert outcomes == dict.fromkeys(("mine", "mine-sft"), "done")
    lines = Path("runs/mine-sft/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line).get("loss/total/mean") for line in lines]
    known = [loss for loss in losses if loss is not None]
    assert known[-1] < known[0] / 2, "the answers are learned"
