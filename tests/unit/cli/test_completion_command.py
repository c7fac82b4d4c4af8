"""`gradus completion`: what a shell offers when TAB is pressed."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from gradus.cli.main import main
from gradus.errors import ExitCode


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"there is no {shell} here")


@pytest.fixture
def script(
    tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> Path:
    """What the command prints for the shell that the test names."""
    assert main(["completion", request.param]) == ExitCode.DONE
    path = tmp_path / "completion"
    path.write_text(capsys.readouterr().out)
    return path


def output(*words: str, folder: Path) -> list[str]:
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@needs("bash")
@pytest.mark.parametrize("script", ["bash"], indirect=True)
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["gradus", "che"], ["check"]),
        (["gradus", "rl", "--max-st"], ["--max-steps"]),
        (["gradus", "rl", "--re"], ["--resume"]),
        (["gradus", "eval", "--env.0.num-ta"], ["--env.0.num-tasks"]),
        (["gradus", "rl", "@", "my"], ["my.toml"]),
        (["gradus", "rl", "--trainer.loss.type", "d"], ["dppo", "dapo"]),
        (["gradus", "rl", "--trainer.deterministic", ""], ["true", "false"]),
        (["gradus", "rl", "--trainer.deterministic", "--max-st"], ["--max-steps"]),
        (["gradus", "compare", "--o"], ["--out", "--over"]),
        (["gradus", "compare", "--over", "t"], ["tokens"]),
        (["gradus", "view", "--g"], ["--grafana"]),
        (["gradus", "export", "--p"], ["--private", "--push"]),
    ],
)
def test_bash_offers_commands_keys_and_files(
    typed: list[str], offered: list[str], script: Path, tmp_path: Path
) -> None:
    (tmp_path / "my.toml").touch()
    press_tab = (
        f"source {script}; COMP_WORDS=({shlex.join(typed)}); COMP_CWORD={len(typed) - 1}; "
        '_gradus; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    assert output("bash", "-c", press_tab, folder=tmp_path) == offered


@needs("fish")
@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish_offers_commands_and_keys(script: Path, tmp_path: Path) -> None:
    def offered(typed: str) -> list[str]:
        return output("fish", "-c", f"source {script}; complete -C '{typed}'", folder=tmp_path)

    assert offered("gradus ev")[0] == "eval"
    assert offered("gradus rl --trainer.optimizer.lr") == ["--trainer.optimizer.lr"]


@needs("zsh")
@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh_reads_the_lines(script: Path, tmp_path: Path) -> None:
    read = f"autoload -U compinit; compinit -u -D; source {script}; print $_comps[gradus]"
    assert output("zsh", "-f", "-c", read, folder=tmp_path) == ["_gradus"]


@pytest.mark.parametrize("words", [[], ["powershell"], ["bash", "zsh"]])
def test_another_shell_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *words]) == ExitCode.CONFIG
    assert "bash|zsh|fish" in capsys.readouterr().err
