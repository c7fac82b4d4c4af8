"""Blocks of every page: configs are accepted, commands and files exist, Python names what there is.

Those of docs/environments.md also run: see test_environments_guide, and end_to_end/test_guide."""

from __future__ import annotations

import ast
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import BASES, refusal
from pages import BLOCK, PAGES, ROOT, command_lines, inline_commands

import gradus
from gradus.config import EvalConfig, RunConfig, SftConfig, load_config
from gradus.errors import ConfigError

SHELLS = ("", "bash", "sh", "console")
SOURCE = "[[orchestrator.train.env]]"


def blocks(language: str) -> list[tuple[Path, int, str]]:
    """Page, number on it, and text."""
    return [
        (page, number, text)
        for page in PAGES
        for number, (kind, text) in enumerate(BLOCK.findall(page.read_text()))
        if kind == language
    ]


@pytest.mark.parametrize(
    ("page", "text"),
    [
        pytest.param(page, text, id=f"{page.relative_to(ROOT)}-{number}")
        for page, number, text in blocks("toml")
    ],
)
def test_a_config_of_a_page_is_accepted(
    page: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "[orchestrator.train.env." in text and SOURCE not in text:
        text = f'{SOURCE}\nid = "reverse-text"\n{text}'  # what the text around it is about
    (tmp_path / "page.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    refusals = []
    for kind in (RunConfig, SftConfig, EvalConfig):
        try:
            load_config(kind, ["@", "page.toml"], base=BASES[kind])
        except ConfigError as error:
            refusals.append(f"{kind.__name__}: {error}")
        else:
            return
    pytest.fail("\n".join([str(page), text, *refusals]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_are_read_by_the_command_line(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [text for kind, text in BLOCK.findall(page.read_text()) if kind in SHELLS]
    lines = [words for text in texts for words in command_lines(text)]
    monkeypatch.chdir(tmp_path)
    refused = [refusal(words) for words in [*lines, *inline_commands(page)]]
    assert [said for said in refused if said is not None] == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gradus trian @ rl.toml", "no command 'trian'"),
        ("gradus rl @ rl.toml --trainer.optimizer.learning-rate 1e-4", "learning-rate"),
        ("gradus rl @ rl.toml --max-steps many", "--max-steps"),
        ("gradus rl @ examples/reverse_text/gone.toml", "gone.toml"),
        ("gradus view runs/a --exprot page.html", "--exprot"),
        ("gradus env chekc jsonl", "chekc"),
        ("gradus env check jsonl --task-set.path a", "task-set"),
        ("gradus view runs/a --to wandb --colour red", "--colour"),
        ("gradus serve out --prot 8000", "prot"),
    ],
)
def test_a_wrong_command_is_found(line: str, said: str) -> None:
    refused = refusal(line.split())
    assert refused is not None
    assert said in refused


def test_python_of_the_pages_names_only_what_it_has(tmp_path: Path) -> None:
    for page, number, text in blocks("python"):
        (tmp_path / f"{page.stem}_{number}.py").write_text(text)
    words = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "."]
    checked = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.torch
@pytest.mark.slow
def test_python_of_the_pages_imports_what_there_is() -> None:
    """In a process that did not import gradus: what comes from other libraries goes first."""
    statements: dict[str, str] = {}
    for page, _, text in blocks("python"):
        own = re.findall(r"^# file: (\w+)\.py$", page.read_text(), re.M)
        for part in ast.parse(text).body:
            is_import = isinstance(part, ast.Import | ast.ImportFrom)
            if is_import and getattr(part, "module", None) not in own:
                statements[ast.unparse(part)] = str(page.relative_to(ROOT))
    lines = sorted(statements, key=lambda line: line.split()[1].startswith("gradus"))
    assert lines[-1].split()[1].startswith("gradus")
    program = "\n".join(f"{line}  # {statements[line]}" for line in lines)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-"], input=program, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.torch
def test_the_page_of_the_python_api_names_what_there_is() -> None:
    text = (ROOT / "docs" / "look-up" / "python-api.md").read_text()
    found = re.findall(r"^::: ([\w.]+)\n(?:    .*\n)*?(?:      members: \[(.*)\]\n)?", text, re.M)
    assert len(found) == text.count(":::")
    for name, members in found:
        thing = pydoc.locate(name)
        assert thing is not None, name
        gone = [it for it in members.split(", ") if it and not hasattr(thing, it)]
        assert gone == [], name


def test_the_page_of_the_python_api_has_all_that_gradus_offers() -> None:
    text = (ROOT / "docs" / "look-up" / "python-api.md").read_text()
    assert [name for name in gradus.__all__ if name not in text and name[0] != "_"] == []
