"""docs/roles.md: its files and configs as written, through the commands that it names."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gradus.config import RunConfig, load_config
from gradus.plan.machine import check

pytestmark = pytest.mark.end_to_end

PAGE = (Path(__file__).parents[2] / "docs" / "roles.md").read_text()
FILES = dict(re.findall(r"^```python\n# file: (\w+)\.py\n(.*?)^```$", PAGE, re.M | re.S))
COMMANDS = re.findall(r"^```\n(gradus .+)\n```$", PAGE, re.M)
CONFIGS = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.M | re.S)
BASE = {"max_steps": 1, "model": {"name": "some/model"}}
PRIVATE = {
    "bargain": {"seller": "is worth", "buyer": "It cost"},
    "riddles": {"solver": "Its answer", "proposer": "Its answer"},
}
"""By file and role, what must not stand in its conversation."""


def test_every_file_has_its_command_and_its_config() -> None:
    assert sorted(FILES) == sorted(PRIVATE)
    assert sorted(COMMANDS) == [f"gradus env check {name}" for name in sorted(FILES)]
    assert len(CONFIGS) == len(FILES)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_of_the_page_passes_its_command_and_keeps_its_secrets(
    command: str, tmp_path: Path
) -> None:
    name = shlex.split(command)[-1]
    (tmp_path / f"{name}.py").write_text(FILES[name])
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gold reply        its gold_replies" in done.stdout
    talks = re.findall(r"^  \[(\w+)\]\n((?:    .*\n)+)", done.stdout, re.M)
    assert {role for role, _ in talks} >= set(PRIVATE[name])
    for role, text in talks:
        assert PRIVATE[name].get(role, "\0") not in text


@pytest.mark.parametrize("text", CONFIGS)
def test_a_config_of_the_page_passes_the_fast_check(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, source in FILES.items():
        (tmp_path / f"{name}.py").write_text(source)
    (tmp_path / "rl.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    config = load_config(RunConfig, ["@", str(tmp_path / "rl.toml")], base=BASE, check=check)
    assert config.orchestrator.train.env[0].id in FILES
