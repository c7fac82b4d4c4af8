"""What a program is given: its command, its files, and an environment made anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from gradus.errors import ConfigError
from gradus_program.settings import ProgramKeys, check_program, program_environment

MODEL = {"OPENAI_BASE_URL": "http://127.0.0.1:1/v1", "OPENAI_API_KEY": "key"}
WORKER = {
    "PATH": "/bin",
    "LANG": "de_DE.UTF-8",
    "HOME": "/root",
    "HF_TOKEN": "hub",
    "GRADUS_INFERENCE_TOKEN": "token",
    "GRADUS_LAUNCH": "1.2",
    "HTTPS_PROXY": "http://user:password@proxy",
    "SEARCH_KEY": "search",
}


def test_a_program_sees_six_variables_and_nothing_of_the_worker() -> None:
    seen = program_environment(ProgramKeys(), WORKER, home="/tmp/home", model=MODEL)
    assert seen == {
        "PATH": "/bin",
        "LANG": "de_DE.UTF-8",
        "HOME": "/tmp/home",
        "TMPDIR": "/tmp/home",
        **MODEL,
    }


def test_a_container_keeps_its_own_path() -> None:
    seen = program_environment(
        ProgramKeys(), {"PATH": "/bin"}, home="/h", model=MODEL, is_contained=True
    )
    assert seen == {"LANG": "C.UTF-8", "HOME": "/h", **MODEL}


def test_a_variable_is_passed_when_it_is_named_for_the_program() -> None:
    keys = ProgramKeys(pass_env=["SEARCH_KEY"], env={"MODE": "fast"})
    seen = program_environment(keys, WORKER, home="/h", model=MODEL)
    assert (seen["SEARCH_KEY"], seen["MODE"]) == ("search", "fast")
    assert "HF_TOKEN" not in seen


def test_a_named_variable_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'name it in the source too: pass_env = \["ABSENT"\]'):
        program_environment(ProgramKeys(pass_env=["ABSENT"]), WORKER, home="/h", model=MODEL)


@pytest.mark.parametrize("name", ["GRADUS_INFERENCE_TOKEN", "OPENAI_API_KEY", "", "A=B", "A\0"])
def test_what_belongs_to_gradus_cannot_be_passed_or_set(name: str) -> None:
    with pytest.raises(ValidationError):
        ProgramKeys(pass_env=[name])
    with pytest.raises(ValidationError):
        ProgramKeys(env={name: "x"})


@pytest.mark.parametrize("name", ["/etc/passwd", "../task.txt", "a/../../b", "", "."])
def test_a_task_file_lies_in_the_working_folder(name: str) -> None:
    with pytest.raises(ValidationError, match="below the working folder"):
        ProgramKeys(task_file=name)


@pytest.mark.parametrize("files", [["."], [".."], ["a/x.py", "b/x.py"]])
def test_files_have_names_of_their_own(files: list[str]) -> None:
    with pytest.raises(ValidationError):
        ProgramKeys.model_validate({"files": files})


def test_a_program_needs_a_command_that_can_be_started() -> None:
    with pytest.raises(ConfigError, match="`command` is missing"):
        check_program(ProgramKeys())
    for command in ([""], ["python", "a\0b"]):
        with pytest.raises(ValidationError):
            ProgramKeys(command=command)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no {tmp_path}/agent.py"):
        check_program(ProgramKeys(command=["python"], files=[tmp_path / "agent.py"]))


def test_a_script_beside_the_config_must_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("src").mkdir()
    Path("src/agent.py").touch()
    keys = ProgramKeys(command=["python", "src/agent.py"])
    with pytest.raises(ConfigError, match=r"add files = \['src'\]"):
        check_program(keys)
    check_program(keys.model_copy(update={"files": [Path("src")]}))
