"""The command as a process: fast, quiet, and with the exit codes that scripts rely on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from configs import RUN_TOML

MOST_SECONDS = 5.0
"""Of CPU time: what else runs on the machine says nothing about the command."""


def children_seconds() -> float:
    """CPU time of the processes that were started and ended so far."""
    times = os.times()
    return times.children_user + times.children_system


def gradus(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gradus.cli.main", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_overview_imports_no_library_at_all(tmp_path: Path) -> None:
    script = (
        "import sys, gradus.cli.main\n"
        "heavy = {'pydantic', 'numpy', 'msgspec', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=60)


@pytest.mark.shows("F74")
def test_check_ends_with_64_and_one_line_per_problem(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN_TOML + "[trainer]\nnum_procesess = 2\n")
    started = children_seconds()
    ended = gradus("check", "@", "run.toml", "--seed", "x", folder=tmp_path)
    assert children_seconds() - started < MOST_SECONDS
    assert ended.returncode == 64
    assert ended.stdout == ""
    first, second = ended.stderr.splitlines()
    assert first.startswith("gradus check: --seed: 'x': ")
    assert second == (
        "gradus check: run.toml:7: trainer.num_procesess: unknown key; "
        "did you mean trainer.num_processes?"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_check_of_a_good_config_ends_with_0(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN_TOML)
    ended = gradus("check", "--level", "config", "@", "run.toml", folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "processes, in starting order:" in ended.stdout


def test_a_trainer_leaves_at_once_with_its_words_and_its_code(tmp_path: Path) -> None:
    ended = gradus("trainer", "@", "missing.json", folder=tmp_path)
    assert ended.returncode == 64
    assert "missing.json" in ended.stderr


def test_leaving_prints_what_was_said_and_skips_what_python_would_do_then(tmp_path: Path) -> None:
    script = (
        "import atexit\n"
        "from gradus.cli.main import leave\n"
        "atexit.register(print, 'too late')\n"
        "print('last words', end='')\n"
        "leave(3)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (3, "last words")


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "gradus.cli.main", "rl", "--help"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_the_console_script_points_at_the_command_table(flag: str, tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("gradus")
    if not script.exists():
        pytest.skip("gradus is not installed as a command here")
    ended = subprocess.run([script, flag], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.startswith("gradus ")
