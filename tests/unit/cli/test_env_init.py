"""`gradus env init`: a task set to change, which works as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gradus.cli.env import sources_of
from gradus.cli.main import main
from gradus.config import RunConfig, load_config
from gradus.errors import ExitCode
from gradus.plan.machine import check


@pytest.mark.slow
def test_the_config_and_the_tests_that_it_writes_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["env", "init", "my-sums"]) == ExitCode.DONE
    assert "gradus env check my-sums" in capsys.readouterr().out
    monkeypatch.chdir("my-sums")
    monkeypatch.syspath_prepend(".")
    config = load_config(RunConfig, ["@", "rl.toml"], check=check)
    assert config.orchestrator.train.env[0].id == "my-sums"
    assert [source.id for source in sources_of(["@", "rl.toml"])] == ["my-sums"]
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(pytest_, capture_output=True, text=True, check=False)
    assert (done.returncode, "10 passed" in done.stdout) == (0, True), done.stdout


def test_what_lies_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    assert main(["env", "init", str(tmp_path)]) == ExitCode.CONFIG
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", ["1st", "a b", "reverse-text", "class"])
def test_a_name_that_cannot_be_used_is_refused(name: str, tmp_path: Path) -> None:
    assert main(["env", "init", str(tmp_path / name)]) == ExitCode.CONFIG
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("words", [[], ["one", "two"]])
def test_exactly_one_task_set_is_named(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "init", *words]) == ExitCode.CONFIG
    assert "gradus env init NAME" in capsys.readouterr().err
