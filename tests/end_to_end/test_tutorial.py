"""docs/learn/first-model.md: its files and its commands, one after the other, as written.

But for three things: a tiny model stands for the pre-trained one, so sft has more steps at a larger
rate, and rl two; of three evaluations only the last is played; `gradus check` and `serve` are left
to their own tests. What does not wait for another runs beside it. Who talks to the model at the end
leaves with /quit, and the server, a real one, leaves too.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import wait_until
from pages import BLOCK, ROOT

from gradus.processes.table import descendants, is_alive, living_processes

pytestmark = pytest.mark.end_to_end

LOSS = "loss/total/mean"
PAGE = ROOT / "docs" / "learn" / "first-model.md"
BLOCKS = BLOCK.findall(PAGE.read_text())
FILE = re.compile(r"# file: ([\w.]+)\n")
COMMANDS = [line for kind, text in BLOCKS if not kind for line in text.splitlines()]
CHANGED = {
    "sft": "--max-steps 60 --optimizer.lr 3e-3",
    "rl": "--max-steps 2",
    "chat": "--max-tokens 2",
}
SET_UP = ("pip ", "python examples/", "cd ")
"""What the fixture does, in its own way."""
EVALUATED = ("before", "after-sft")
FIRST = ("python make_rows", "head ", "gradus init ")
LEFT_OUT = (
    "gradus serve ",
    "gradus check ",
    *(f"gradus eval @ eval.toml --name {it} " for it in EVALUATED),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """What a reader who follows the page has written."""
    made = tmp_path_factory.mktemp("dates")
    for _, text in BLOCKS:
        if (name := FILE.match(text)) is not None:
            (made / name[1]).write_text(text)
    (made / "model").symlink_to(tiny_model)
    for line in COMMANDS:
        if line.startswith(FIRST):
            run([line], made)
    return made / "dates"


def start(line: str, folder: Path) -> subprocess.Popen[str]:
    words = shlex.split(line)
    if words[0] == "gradus":
        words = [sys.executable, "-m", *words, *CHANGED.get(words[1], "").split()]
    elif words[0] == "python":
        words[0] = sys.executable
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        words,
        cwd=folder,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def hear(process: subprocess.Popen[str]) -> str:
    """All that a command says to whom types nothing."""
    return process.communicate("", timeout=400)[0]


def talk(process: subprocess.Popen[str]) -> str:
    """All that a chat says that is asked one thing; no process of its server outlives it."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("When is the 3rd of March 2021?\n")
    process.stdin.flush()
    printed = ""
    while not printed.endswith("[cut off: the most tokens]\n"):
        line = process.stdout.readline()
        assert line, printed
        printed += line
    started = descendants(process.pid, living_processes())
    assert len(started) > 1, "the server and its engine"
    printed += process.communicate("/quit\n", timeout=60)[0]
    wait_until(
        lambda: not [entry for entry in started if is_alive(entry.pid, entry.start_time)],
        what="the end of every process of the server",
    )
    return printed


def run(lines: list[str], folder: Path) -> dict[str, str]:
    """All of them at once; what each said."""
    running = {line: start(line, folder) for line in lines}
    said = {
        line: (talk if line.startswith("gradus chat") else hear)(process)
        for line, process in running.items()
    }
    failed = [said[line] for line, process in running.items() if process.returncode != 0]
    assert failed == []
    return said


def test_the_commands_of_the_page_work_one_after_the_other(folder: Path) -> None:
    todo = [line for line in COMMANDS if not line.startswith((*SET_UP, *FIRST, *LEFT_OUT))]
    groups = [
        [line for line in todo if re.match(pattern, line)]
        for pattern in (
            r"gradus (env|sft)",
            r"gradus rl",
            r"gradus (view|chat|eval .*--name after )",
        )
    ]
    assert sorted(line for group in groups for line in group) == sorted(todo)
    said = {line: text for group in groups for line, text in run(group, folder).items()}
    lines = (folder / "runs" / "dates-sft" / "metrics.jsonl").read_text().splitlines()
    losses = [record[LOSS] for line in lines if LOSS in (record := json.loads(line))]
    assert losses[-1] < losses[0] / 2, "the answers are learned"
    assert (folder / "report.html").is_file()
    assert (folder / "runs" / "dates" / "model" / "config.json").is_file()
    assert all("80/80" in text for line, text in said.items() if line.startswith("gradus eval"))
