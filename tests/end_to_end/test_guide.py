"""docs/environments.md in a folder of its own: its commands, and a tool server that starts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.end_to_end
ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"# file: (\w+\.py)\n")
BLOCKS = BLOCK.findall((ROOT / "docs" / "environments.md").read_text())
COMMANDS = [
    text.strip()
    for kind, text in BLOCKS
    if not kind and text.startswith("gradus env check") and "some-environment" not in text
]
TOOLS = "gradus env check shop-questions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader who follows the page has written."""
    made = tmp_path_factory.mktemp("reader")
    for kind, text in BLOCKS:
        if kind == "python" and (name := FILE.match(text)):
            (made / name[1]).write_text(text)
    (made / "tasks.jsonl").write_text("".join(text for kind, text in BLOCKS if kind == "json"))
    return made


def start(command: str, folder: Path) -> subprocess.Popen[str]:
    """A command as its reader gives it: no PYTHONPATH, outside the source tree."""
    words = [sys.executable, "-m", *shlex.split(command)]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        words,
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_commands_of_the_page_work_where_its_reader_is(folder: Path) -> None:
    assert len(COMMANDS) == 2
    running = {command: start(command, folder) for command in [*COMMANDS, TOOLS]}
    said = {command: process.communicate(timeout=400)[0] for command, process in running.items()}
    assert [text for command, text in said.items() if running[command].returncode != 0] == []
    assert "stock_price" in said[TOOLS]


def test_a_tool_server_that_cannot_start_is_told_by_its_cause_in_the_last_line(
    folder: Path,
) -> None:
    text = (folder / "shop_questions.py").read_text()
    broken = text.replace("    Stock.run()", "    import gone_module\n\n    Stock.run()")
    (folder / "shop_broken.py").write_text(broken)
    process = start("gradus env check shop-broken", folder)
    said = " ".join(process.communicate(timeout=400)[0].split())
    assert process.returncode == 64
    assert "tool server 'stock' did not start: ModuleNotFoundError: No module named" in said
    assert "No module named 'gone_module'" in said
