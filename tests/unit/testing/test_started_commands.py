"""The helpers that start commands for end-to-end tests tell the truth about how they ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from commands import finish, kill, processes_of, records, start, wait_until

from gradus.files import write_json
from gradus.processes.table import read_process
from gradus.run.paths import RunDirectory

SLEEPER = ("-c", "import sys, time; print('here', flush=True); time.sleep(60)")


def test_a_command_that_ends_well_gives_what_it_printed() -> None:
    assert finish(start("--version")).startswith("gradus ")


def test_another_exit_code_shows_what_was_printed() -> None:
    with pytest.raises(AssertionError, match=r"exit code 64\n.*no command 'nothing'"):
        finish(start("nothing"))
    assert "no command" in finish(start("nothing"), exit_code=None)
    with pytest.raises(AssertionError, match="exit code 0"):
        finish(start("--version"), exit_code=None)


def test_a_process_is_killed_by_its_name_in_the_registry(tmp_path: Path) -> None:
    process = start(str(tmp_path), program=SLEEPER, variables={"A": "b"})
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    entry = read_process(process.pid)
    assert entry is not None
    wait_until(lambda: processes_of(tmp_path) == [process.pid])
    listed = [{"name": "sleeper", "pid": process.pid, "start_time": entry.start_time}]
    write_json(RunDirectory(tmp_path).processes, {"processes": listed})
    kill(tmp_path, "sleeper")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert processes_of(tmp_path) == []
    with pytest.raises(AssertionError, match="does not run any more"):
        kill(tmp_path, "sleeper")


def test_a_process_that_was_killed_is_no_failure_of_its_own(tmp_path: Path) -> None:
    process = start(str(tmp_path), program=SLEEPER)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(AssertionError, match="exit code -9"):
        finish(process, exit_code=None)


def test_records_are_the_lines_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"b": 2}\n')
    assert records(tmp_path / "x.jsonl") == [{"a": 1}, {"b": 2}]
