"""`gradus init`: a folder that runs as it is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf

from gradus.cli.main import main
from gradus.config import RunConfig, load_config
from gradus.errors import ExitCode
from gradus.plan.machine import check


@pytest.mark.torch
def test_the_printed_commands_fit_a_path_with_spaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my runs" / "first"
    assert main(["init", str(folder)]) == ExitCode.DONE
    assert f"cd '{folder}'\n" in capsys.readouterr().out


@pytest.mark.torch
def test_the_folder_passes_the_check_and_its_tasks_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my-first"]) == ExitCode.DONE
    assert "gradus rl @ rl.toml" in capsys.readouterr().out
    monkeypatch.chdir("my-first")
    monkeypatch.syspath_prepend(".")
    config = load_config(RunConfig, ["@", "rl.toml"], check=check)
    source = config.orchestrator.train.env[0]
    tasks = vf.load_taskset(vf.taskset_config_type(source.id)(id=source.id))
    assert (config.name, source.id, len(list(tasks))) == ("my-first", "my-first-tasks", 256)


@pytest.mark.torch
async def test_the_reward_of_the_folder_pays_words_of_vowels_and_no_trick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "rewarded"))
    main(["init", "rewarded"])
    tasks = vf.load_taskset(vf.taskset_config_type("rewarded-tasks")(id="rewarded-tasks"))
    task = next(iter(tasks))

    async def reward(reply: str, *, is_cut: bool = False) -> float:
        return await task.vowels(SimpleNamespace(last_reply=reply, is_truncated=is_cut))

    assert await reward("uoiea") == await reward("aaaaaaaaa") == 1.0
    assert await reward("aeiou" * 3, is_cut=True) == 0.0
    assert await reward("a") == 0.2
    assert await reward("") == await reward("<tool_response></think>") == 0.0
    assert await reward("aeiou<tool_response>") == 5 / 20


def test_a_folder_that_holds_something_is_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    assert main(["init", str(tmp_path)]) == ExitCode.CONFIG
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", ["1st", "a b", "ä"])
def test_a_name_that_gives_no_module_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / name)]) == ExitCode.CONFIG
    assert "cannot name a task set" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("words", [[], ["one", "two"]])
def test_exactly_one_folder_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", *words]) == ExitCode.CONFIG
    assert "usage: gradus init FOLDER" in capsys.readouterr().err
