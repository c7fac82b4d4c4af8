"""The command of a source: run once in a launch, or the reason why nothing starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from commands import wait_until

from gradus.config import EnvironmentProcessConfig
from gradus.environments.process import prepare_source
from gradus.errors import ConfigError, EnvironmentFailure, GradusError
from gradus.processes.table import read_process


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ready").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(
    run_dir: Path, program: str, *words: str, **changes: object
) -> EnvironmentProcessConfig:
    values = {
        "run_dir": str(run_dir),
        "term": 1,
        "name": "game",
        "verifiers": {},
        "prepare": [sys.executable, "-S", "-c", program, *words],
        **changes,
    }
    return EnvironmentProcessConfig.model_validate(values)


ADD_A_LINE = "import sys; open('made', 'a').write(sys.argv[1] + chr(10))"


def test_it_runs_in_the_folder_of_the_launch_once_and_again_in_the_next(run_dir: Path) -> None:
    """A process that is restarted has the same term; its words pass through no shell."""
    for term in (1, 1, 2):
        prepare_source(config_of(run_dir, ADD_A_LINE, "$HOME; *", term=term))
    assert (run_dir / "made").read_text().splitlines() == ["$HOME; *"] * 2


def test_one_that_failed_runs_again(run_dir: Path) -> None:
    with pytest.raises(EnvironmentFailure):
        prepare_source(config_of(run_dir, f"{ADD_A_LINE}; sys.exit(3)", "x"))
    prepare_source(config_of(run_dir, ADD_A_LINE, "x"))
    assert (run_dir / "made").read_text() == "x\nx\n"


def test_a_source_without_one_runs_nothing(run_dir: Path) -> None:
    prepare_source(config_of(run_dir, "", prepare=[]))
    assert list((run_dir / "ready").iterdir()) == []


def test_it_sees_the_variables_of_the_source_and_no_other_secret(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MODE", "HF_TOKEN", "OTHER_KEY"):
        monkeypatch.setenv(name, "x")
    program = "import os; open('seen', 'w').write(' '.join(sorted(os.environ)))"
    named = {"inherited_env": ["MODE", "ABSENT"], "passed_env": ["HF_TOKEN"]}
    prepare_source(config_of(run_dir, program, **named))
    seen = (run_dir / "seen").read_text().split()
    assert {"MODE", "HF_TOKEN", "PATH"} <= set(seen)
    assert not {"OTHER_KEY", "ABSENT"} & set(seen)


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"prepare": ["gradus-test-absent"]}, ConfigError, "cannot be started: No such file"),
        ({"prepare": ["false"]}, EnvironmentFailure, "ended with exit code 1"),
        (
            {"prepare": ["sh", "-c", "kill -9 $$"]},
            EnvironmentFailure,
            "was killed by SIGKILL",
        ),
        (
            {"prepare": ["tail", "-f", "/dev/null"], "prepare_seconds": 0.1},
            EnvironmentFailure,
            r"did not end within 0\.1 s",
        ),
    ],
)
def test_a_command_that_fails_is_named_with_its_source(
    run_dir: Path, changes: dict[str, object], kind: type[GradusError], said: str
) -> None:
    with pytest.raises(kind, match=f"source 'game': prepare = .*{said}"):
        prepare_source(config_of(run_dir, "", **changes))
    assert not (run_dir / "ready" / "env_game.prepared").exists()


def test_its_output_goes_into_the_log(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prepare_source(config_of(run_dir, "print('made 3 files')"))
    written = capfd.readouterr()
    assert (written.out, "made 3 files" in written.err) == ("", True)


def test_what_it_leaves_running_is_ended(run_dir: Path) -> None:
    program = (
        "import subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import signal; signal.pause()']); "
        "open('pid', 'w').write(str(child.pid))"
    )
    prepare_source(config_of(run_dir, program))
    pid = int((run_dir / "pid").read_text())
    assert pid != os.getpid()
    wait_until(lambda: read_process(pid) is None, what="the end of what it left")
