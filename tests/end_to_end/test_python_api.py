"""`gradus.train` in a script: the runs that docs/python.md shows, and what comes of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradus

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]

HERE = Path(__file__).parent
OWN = """
import os, signal, sys, threading, time
from pathlib import Path

import gradus
import scripted_run
from gradus.launch import job

job.plan_config = scripted_run.with_script
GOOD = set("aeiou")

def times(weight):
    async def letters(reply):
        return {"letters": weight * sum(it in GOOD for it in reply), "any": bool(reply)}
    return letters

def broken(reply, row):
    n = len(reply) + row["n"]
    return 1 / (n - n)

def stop_after(steps, run):
    lines = Path(run) / "metrics.jsonl"
    while not (lines.is_file() and lines.read_text().count("throughput/") >= steps):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

keys = dict(
    model={"name": sys.argv[1], "renderer": "qwen3", "max_length_tokens": 64},
    tasks=({"prompt": f"say {n}", "n": n} for n in range(4)), group_size=4, groups_per_batch=2,
    max_completion_tokens=8, pool={"type": "static", "num_workers": 1}, lr=1e-3,
)
rows = list(keys.pop("tasks"))
own = [times(0.5), lambda reply, row: row["n"] / 10]
threading.Thread(target=stop_after, args=(2, "runs/own"), daemon=True).start()
try:
    reward = {"letters": own[0], "number": own[1]}
    gradus.train(**keys, tasks=rows, reward=reward, max_steps=400, name="own")
except gradus.RunInterrupted as stopped:
    done = stopped.run.checkpoints()[-1].step
    print("INTERRUPTED", stopped.run.outcome, done >= 2)
run = gradus.train(resume="runs/own", max_steps=done + 2)
print("RESUMED", run.outcome, sorted(run.rewards()[-1]), run.model.is_dir(), len(run.rows()) > 8)
try:
    gradus.train(**keys, tasks=rows, reward=broken, max_steps=3, name="broken")
except gradus.errors.GradusError as error:
    print("FAILED", isinstance(error, gradus.errors.ProcessError), error.__notes__)
"""
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


def test_functions_of_a_script_reach_the_run_and_its_resume(
    tmp_path: Path, tiny_model: Path
) -> None:
    """With a scripted engine; no `if __name__ == "__main__"`, and no module to import."""
    program = tmp_path / "mine.py"
    program.write_text(OWN)
    words = [sys.executable, str(program), str(tiny_model)]
    path = {"PYTHONPATH": f"{HERE}:{HERE.parent / 'support'}"}
    result = subprocess.run(
        words,
        cwd=tmp_path,
        env=os.environ | path,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    lines = result.stdout.splitlines()
    told = [line for line in lines if line.split(" ")[0] in ("INTERRUPTED", "RESUMED", "FAILED")]
    assert told == [
        "INTERRUPTED interrupted True",
        "RESUMED done ['any', 'letters', 'number', 'reward', 'step'] True True",
        "FAILED True ['the run: runs/broken']",
    ], result.stdout + result.stderr
    number = OWN.splitlines().index("    return 1 / (n - n)") + 1
    place = lines.index(f'  File "{program}", line {number}, in broken')
    assert lines[place + 1].strip() == "return 1 / (n - n)"
    assert "reward 'broken' failed: ZeroDivisionError" in lines[place - 1]
