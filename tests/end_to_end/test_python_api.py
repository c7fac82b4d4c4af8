"""`gradus.train` in a script: the runs that docs/python.md shows, and what comes of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradus

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
AGAIN = """
try:
    gradus.train(config, name="lr-0.001")
except gradus.errors.RunDirectoryError:
    print("refused")
"""
SFT_TOML = """
max_steps = 2
batch_conversations = 2
[model]
name = "{model}"
max_length_tokens = 96
[data]
path = "conversations.jsonl"
[checkpoint]
interval_steps = 1
"""


def test_the_page_trains_as_it_says(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"prompt": word, "completion": word[::-1]} for word in ("one", "two", "three", "four")]
    data = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "conversations.jsonl").write_text(data)
    (tmp_path / "sft.toml").write_text(SFT_TOML.format(model=tiny_model))
    _, _, training = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    words = [sys.executable, "-c", training + AGAIN]
    result = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "refused"), result.stderr
    run = gradus.load_run(tmp_path / "runs" / "lr-0.003")
    assert [row["step"] for row in run.metrics()] == [0, 1]
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [1, 2]
    assert run.model == run.path / "model"
