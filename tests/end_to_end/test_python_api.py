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
import os, sys, threading, time
from pathlib import Path

import gradus
import scripted_run
from gradus.launch import job

job.plan_config = scripted_run.with_script
GOOD = set("aeiou")
BREAK = str(Path("break").absolute())

def times(weight):
    async def letters(reply):
        return {"letters": weight * sum(it in GOOD for it in reply), "any": bool(reply)}
    return letters

def number(reply, row):
    n = len(reply) + row["n"]
    return 1 / (n - n) if os.path.exists(BREAK) else row["n"] / 10

def break_after(steps, run):
    lines = Path(run) / "metrics.jsonl"
    while not (lines.is_file() and lines.read_text().count("throughput/") >= steps):
        time.sleep(0.05)
    Path(BREAK).touch()

keys = dict(
    model={"name": sys.argv[1], "renderer": "qwen3", "max_length_tokens": 64},
    tasks=({"prompt": f"say {n}", "n": n} for n in range(4)), group_size=4, groups_per_batch=2,
    max_completion_tokens=8, lr=1e-3,
    checkpoint={"interval_steps": 1},
)
reward = {"letters": times(0.5), "number": number, "sum": lambda reply, row: len(reply) + row["n"]}
threading.Thread(target=break_after, args=(2, "runs/own"), daemon=True).start()
try:
    gradus.train(**keys, reward=reward, max_steps=400, name="own")
except gradus.errors.GradusError as error:
    done = gradus.load_run("runs/own").checkpoints()[-1].step
    print("FAILED", isinstance(error, gradus.errors.ProcessError), error.__notes__, done >= 2)
os.unlink(BREAK)
run = gradus.train(resume="runs/own", max_steps=done + 2)
print("RESUMED", run.outcome, sorted(run.rewards()[-1]), run.model.is_dir(), len(run.rows()) > 8)
"""
PAGE = Path(__file__).parents[2] / "docs" / "python.md"
AGAIN = """
import os, signal, threading, time

def stop():
    lines = Path("runs/stopped/metrics.jsonl")
    while not (lines.is_file() and "loss/total/mean" in lines.read_text()):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=stop, daemon=True).start()
try:
    gradus.train(config, name="stopped", max_steps=100000)
except gradus.RunInterrupted as stopped:
    print("INTERRUPTED", stopped.run.outcome, stopped.run.checkpoints()[-1].step >= 1)
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
    assert result.returncode == 0, result.stderr
    assert "INTERRUPTED interrupted True" in result.stdout.splitlines()
    assert result.stdout.splitlines()[-1] == "refused"
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
    told = [line for line in lines if line.split(" ")[0] in ("RESUMED", "FAILED")]
    assert told == [
        "FAILED True ['the run: runs/own'] True",
        "RESUMED done ['any', 'letters', 'number', 'reward', 'step', 'sum'] True True",
    ], result.stdout + result.stderr
    (broken,) = [it for it in OWN.splitlines() if "1 / (n - n)" in it]
    number = OWN.splitlines().index(broken) + 1
    place = lines.index(f'  File "{program}", line {number}, in number')
    assert lines[place + 1].strip() == broken.strip()
    assert "reward 'number' failed: ZeroDivisionError" in lines[place - 1]
