"""How a process failed comes as data too, for whoever decides what follows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gradus.processes.started import ChildFailed, ChildHere, ChildNotReady, Fault, ProcessSpec


@pytest.fixture
def child(tmp_path: Path) -> ChildHere:
    log = tmp_path / "trainer.log"
    log.write_text("gradus trainer: ValueError: the reward is nan\n")
    process = subprocess.Popen(["true"])
    process.wait()
    spec = ProcessSpec("trainer", ("true",), {}, log)
    return ChildHere(spec, 0.0, 0, process, 0, death_pipe=-1)


def test_an_exit_code_comes_with_what_the_log_says(child: ChildHere) -> None:
    found = ChildFailed(child, 70).fault
    assert found == Fault("trainer", "exit", 70, "ValueError: the reward is nan")


def test_a_signal_comes_with_its_number(child: ChildHere) -> None:
    found = ChildFailed(child, -9).fault
    assert (found.process, found.kind, found.number) == ("trainer", "signal", 9)


def test_the_signal_of_a_rank_is_that_of_its_group(child: ChildHere) -> None:
    child.spec.log.write_text("  exitcode  : -9 (pid: 3)\n")
    found = ChildFailed(child, 1).fault
    assert (found.process, found.kind, found.number) == ("trainer", "signal", 9)


def test_one_that_never_became_ready_is_told_apart(child: ChildHere) -> None:
    assert ChildNotReady(child, 2.0).fault == Fault("trainer", "not_ready")
