"""What the operating system says about processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import wait_until

from gradus.processes import table
from gradus.processes.table import (
    carries_mark,
    descendants,
    is_alive,
    living_processes,
    read_process,
    zombie_children,
)

WAITS = "import sys; sys.stdin.read()"
HAS_CHILD = (
    "import subprocess, sys; "
    "c = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()']); "
    "print(c.pid, flush=True); c.wait()"
)


def start(program: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )


def test_this_process_is_alive() -> None:
    me = read_process(os.getpid())
    assert me is not None
    assert me.parent == os.getppid()
    assert is_alive(me.pid, me.start_time)


@pytest.mark.shows("SEC17")
def test_a_recycled_pid_is_not_the_same_process() -> None:
    me = read_process(os.getpid())
    assert me is not None
    assert not is_alive(me.pid, me.start_time + 1)


@pytest.mark.shows("F12")
def test_a_zombie_counts_as_dead() -> None:
    child = start("pass")
    wait_until(lambda: read_process(child.pid) is None, what="the child's end")
    assert child.pid in [entry.pid for entry in zombie_children(os.getpid())]
    child.communicate()
    assert child.pid not in [entry.pid for entry in zombie_children(os.getpid())]


def test_grandchildren_are_descendants() -> None:
    child = start(HAS_CHILD)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    found = {entry.pid for entry in descendants(os.getpid(), living_processes())}
    assert {child.pid, grandchild} <= found
    assert os.getpid() not in found
    child.communicate()


def test_a_process_carries_the_variables_it_was_started_with() -> None:
    child = start(WAITS, GRADUS_TEST_MARK="abc")
    wait_until(lambda: carries_mark(child.pid, "GRADUS_TEST_MARK", "abc"))
    assert not carries_mark(child.pid, "GRADUS_TEST_MARK", "ab")
    child.communicate()
    assert not carries_mark(child.pid, "GRADUS_TEST_MARK", "abc")


def test_the_memory_of_a_process_is_read_and_of_none_is_nothing() -> None:
    assert table.resident_bytes(os.getpid()) > 2**20
    assert table.resident_bytes(2**22 + 1) == 0


@pytest.mark.shows("F14")
@pytest.mark.parametrize(
    ("group", "file", "inside"),
    [
        ("0::/job", "job/memory.events", "low 0\noom_kill 4\n"),
        ("0::/job", "memory.events", "oom 9\noom_kill 4\n"),
        ("4:cpu,memory:/job", "memory/job/memory.oom_control", "under_oom 0\noom_kill 4\n"),
    ],
)
def test_the_kernel_says_how_many_it_killed_for_want_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, file: str, inside: str
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(f"9:name=systemd:/\n{group}\n")
    monkeypatch.setattr(table, "_PROC", tmp_path)
    groups = tmp_path / "groups"
    assert table.memory_kills(groups) is None
    (groups / file).parent.mkdir(parents=True)
    (groups / file).write_text(inside)
    assert table.memory_kills(groups) == 4
