"""Blocks of every page: configs are accepted, commands and files exist, Python names what there is.

Those of docs/environments.md also run: see test_environments_guide, and end_to_end/test_guide."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gradus.cli.main import COMMANDS
from gradus.config import EvalConfig, RunConfig, SftConfig, StrictConfig, load_config
from gradus.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))),
    *sorted((ROOT / "environments").glob("*/README.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"(?<=@ )[\w./-]+\.toml")
MODEL = {"name": "some/model"}
BASES: dict[type[StrictConfig], Mapping[str, Any]] = {
    RunConfig: {
        "max_steps": 1,
        "model": MODEL,
        "orchestrator": {"train": {"env": [{"id": "reverse-text"}]}},
    },
    SftConfig: {"max_steps": 1, "model": MODEL, "data": {"path": "data.jsonl"}},
    EvalConfig: {"model": "some/model"},
}
SOURCE = "[[orchestrator.train.env]]"


def blocks(language: str) -> list[Any]:
    return [
        pytest.param(page, text, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, (kind, text) in enumerate(BLOCK.findall(page.read_text()))
        if kind == language
    ]


@pytest.mark.parametrize(("page", "text"), blocks("toml"))
def test_a_config_of_a_page_is_accepted(
    page: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "[orchestrator.train.env." in text and SOURCE not in text:
        text = f'{SOURCE}\nid = "reverse-text"\n{text}'  # what the text around it is about
    (tmp_path / "page.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    refusals = []
    for kind, base in BASES.items():
        try:
            load_config(kind, ["@", "page.toml"], base=base)
        except ConfigError as error:
            refusals.append(f"{kind.__name__}: {error}")
        else:
            return
    pytest.fail("\n".join([str(page), text, *refusals]))


@pytest.mark.parametrize(("page", "text"), blocks(""))
def test_a_command_of_a_page_exists_and_so_do_the_files_of_the_repository(
    page: Path, text: str
) -> None:
    lines = [line for line in text.splitlines() if line.startswith("gradus ")]
    for line in lines:
        words = shlex.split(line, comments=True)
        assert words[1] in COMMANDS, f"{page}: {line}"
        files = [name for name in FILE.findall(line) if "/" in name]
        assert [name for name in files if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_python_of_a_page_imports_what_there_is_and_names_nothing_else(
    page: Path, text: str
) -> None:
    imports = [
        part for part in ast.parse(text).body if isinstance(part, ast.Import | ast.ImportFrom)
    ]
    exec(compile(ast.Module(imports, []), str(page), "exec"), {})
    words = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"]
    checked = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
