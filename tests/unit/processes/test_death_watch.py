"""kill -9 of whoever started a process leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import wait_until

from gradus.errors import ExitCode
from gradus.files import read_json
from gradus.processes.child import dying_with_parent
from gradus.processes.table import read_process

WRITE_PIDS = """
import json, os, pathlib, sys
def write_pids(path, *pids):
    temporary = pathlib.Path(path + ".tmp")
    temporary.write_text(json.dumps([os.getpid(), *pids]))
    temporary.rename(path)
"""

# Starts the program in argv[2] under a supervisor and waits to be killed.
LAUNCHER = """
import pathlib, signal, sys
from gradus.processes.started import ProcessSpec
from gradus.processes.supervisor import Supervisor
folder = pathlib.Path(sys.argv[1])
supervisor = Supervisor(folder / "pids.json", stop_timeout_seconds=5)
argv = (sys.executable, "-c", sys.argv[2], str(folder / "role.json"))
supervisor.start(ProcessSpec("role", argv, {}, folder / "role.log"))
signal.pause()
"""

ROLE = (
    WRITE_PIDS
    + """
import signal
from gradus.processes.child import watch_death_pipe
watch_death_pipe()
write_pids(sys.argv[1])
signal.pause()
"""
)

# Has a child in its group and one in a session of its own; both ignore TERM.
ROLE_WITH_STUBBORN_CHILDREN = (
    WRITE_PIDS
    + """
import signal, subprocess
from gradus.processes import child
child.end_within(0.3)
child.watch_death_pipe()
stubborn = "import signal; signal.signal(15, signal.SIG_IGN); print(1, flush=True); signal.pause()"
def start(**options):
    process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, **options)
    process.stdout.readline()
    return process.pid
pids = [start(), start(start_new_session=True)]
%s
write_pids(sys.argv[1], *pids)
while True:
    signal.pause()
"""
)

# Like torchrun: does not watch anything itself, starts ranks in sessions of their own.
AGENT_WITH_RANKS = (
    WRITE_PIDS
    + """
import subprocess
rank = '''
import signal
from gradus.processes.child import watch_death_pipe
watch_death_pipe()
print(1, flush=True)
signal.pause()
'''
ranks = []
for _ in range(2):
    process = subprocess.Popen(
        [sys.executable, "-c", rank], stdout=subprocess.PIPE, start_new_session=True
    )
    process.stdout.readline()
    ranks.append(process)
write_pids(sys.argv[1], *[process.pid for process in ranks])
for process in ranks:
    process.wait()
"""
)


def launch(tmp_path: Path, role: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """The launcher and the pids of everything below it, all alive."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path), role])
    wait_until((tmp_path / "role.json").exists, what="the role's start")
    pids = read_json(tmp_path / "role.json")
    assert all(read_process(pid) for pid in pids)
    return launcher, pids


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def wait_for_the_end_of(pids: list[int]) -> None:
    wait_until(lambda: not any(read_process(pid) for pid in pids), what=f"the end of {pids}")


@pytest.mark.shows("F04")
def test_a_role_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    launcher, pids = launch(tmp_path, ROLE)
    kill(launcher)
    wait_for_the_end_of(pids)


@pytest.mark.shows("F04")
def test_stubborn_children_of_a_role_end_with_the_launcher(tmp_path: Path) -> None:
    launcher, pids = launch(tmp_path, ROLE_WITH_STUBBORN_CHILDREN % "")
    assert len(pids) == 3
    kill(launcher)
    wait_for_the_end_of(pids)


@pytest.mark.parametrize(("seconds", "can_finish"), [(0.3, False), (60.0, True)])
def test_a_role_has_the_time_that_it_asked_for(
    tmp_path: Path, seconds: float, can_finish: bool
) -> None:
    role = f"""
import pathlib, signal, sys, time
from gradus.processes import child
child.watch_death_pipe()
child.end_within({seconds})
def finish(*_):
    time.sleep(1.5)
    pathlib.Path(sys.argv[1] + ".finished").touch()
    sys.exit(0)
signal.signal(15, finish)
write_pids(sys.argv[1])
while True:
    signal.pause()
"""
    launcher, pids = launch(tmp_path, WRITE_PIDS + role)
    kill(launcher)
    wait_for_the_end_of(pids)
    assert (tmp_path / "role.json.finished").exists() is can_finish


def test_a_role_that_handles_term_still_leaves_nobody_behind(tmp_path: Path) -> None:
    handler = "signal.signal(15, lambda *_: sys.exit(0))"
    launcher, pids = launch(tmp_path, ROLE_WITH_STUBBORN_CHILDREN % handler)
    kill(launcher)
    wait_for_the_end_of(pids)


@pytest.mark.shows("F04")
def test_a_role_that_ignores_term_ends_after_the_grace(tmp_path: Path) -> None:
    launcher, pids = launch(
        tmp_path, ROLE_WITH_STUBBORN_CHILDREN % "signal.signal(15, signal.SIG_IGN)"
    )
    kill(launcher)
    wait_for_the_end_of(pids)


@pytest.mark.shows("F03", "F04")
def test_ranks_below_an_agent_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    launcher, pids = launch(tmp_path, AGENT_WITH_RANKS)
    assert len(pids) == 3
    kill(launcher)
    wait_for_the_end_of(pids)


@pytest.mark.shows("F03")
def test_ranks_end_when_their_agent_is_killed(tmp_path: Path) -> None:
    launcher, (agent, *ranks) = launch(tmp_path, AGENT_WITH_RANKS)
    os.kill(agent, signal.SIGKILL)
    wait_for_the_end_of(ranks)
    kill(launcher)


def test_a_role_whose_launcher_is_gone_before_it_watches_ends(tmp_path: Path) -> None:
    env = {**os.environ, "GRADUS_DEATH_PIPE": "not-a-number", "GRADUS_LAUNCH": "999999.1"}
    role = subprocess.run(
        [sys.executable, "-c", ROLE, str(tmp_path / "role.json")], env=env, timeout=20, check=False
    )
    assert role.returncode == 75


def test_a_number_that_is_another_file_now_is_not_taken_for_the_pipe(tmp_path: Path) -> None:
    program = (
        "import os; r, w = os.pipe(); os.environ['GRADUS_DEATH_PIPE'] = f'{r}:1'; os.close(w); "
        "from gradus.processes.child import watch_death_pipe; watch_death_pipe(); "
        "import sys; sys.stdin.read(); print('alive')"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        input="",
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert result.stdout == "alive\n"


def test_a_process_started_by_hand_watches_nothing() -> None:
    program = (
        "import threading; from gradus.processes.child import watch_death_pipe; "
        "watch_death_pipe(); print(threading.active_count())"
    )
    env = {k: v for k, v in os.environ.items() if k != "GRADUS_DEATH_PIPE"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert result.stdout == "1\n"


# Prints the pid of a program that it starts and whose start is slow, and waits to be killed.
PARENT = """
import signal, subprocess, sys
from gradus.processes.child import dying_with_parent
program = [sys.executable, "-c", "import signal; print(1, flush=True); signal.pause()"]
started = subprocess.Popen(
    dying_with_parent(program), stdout=subprocess.PIPE, start_new_session=True
)
if sys.argv[1] == "ready":
    started.stdout.readline()
print(started.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("when", ["at once", "ready"])
def test_a_program_dies_with_its_parent_before_it_can_ask_for_that(when: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, when], stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_for_the_end_of([pid])


def test_a_program_whose_parent_is_gone_never_starts(tmp_path: Path) -> None:
    trace = tmp_path / "started"
    command = dying_with_parent([sys.executable, "-c", f"open({str(trace)!r}, 'w')"])
    position = command.index(str(os.getpid()))
    command[position] = str(os.getpid() + 1)
    assert subprocess.run(command, check=False, timeout=20.0).returncode == ExitCode.TRY_AGAIN
    assert not trace.exists()


def test_a_program_that_cannot_start_says_so(tmp_path: Path) -> None:
    command = dying_with_parent([str(tmp_path / "absent")])
    done = subprocess.run(command, check=False, timeout=20.0, stderr=subprocess.PIPE, text=True)
    assert done.returncode != 0
    assert (
        done.stderr.strip() == f"{tmp_path / 'absent'} cannot be started: No such file or directory"
    )


@pytest.mark.shows("SEC13")
@pytest.mark.parametrize("hard", ["0", "1 << 20", "resource.RLIM_INFINITY"])
def test_a_role_and_what_it_starts_leave_no_core(hard: str, tmp_path: Path) -> None:
    program = (
        "import os, resource, subprocess, sys\n"
        f"resource.setrlimit(resource.RLIMIT_CORE, ({hard}, {hard}))\n"
        "from gradus.cli.roles import run_role\n"
        "try:\n    run_role('trainer', ['--no-such-key', '1'])\nexcept Exception:\n    pass\n"
        "print(resource.getrlimit(resource.RLIMIT_CORE)[0])\n"
        "child = subprocess.run([sys.executable, '-c', 'import os; os.abort()'])\n"
        "print(child.returncode)\n"
    )
    done = subprocess.run(
        (sys.executable, "-c", program), capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.split() == ["0" if hard == "0" else "1", "-6"]
    assert not list(tmp_path.iterdir())
