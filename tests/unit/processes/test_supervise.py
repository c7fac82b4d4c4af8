"""Children start, become ready, fail with a cause, and leave nothing behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from commands import wait_until

from gradus.errors import ConfigError, CorruptStateError, ExitCode, ProcessError
from gradus.files import read_json, write_json
from gradus.processes.leftovers import end_leftovers, was_ended_from_outside
from gradus.processes.started import (
    ChildFailed,
    ChildNotReady,
    Listens,
    ProcessSpec,
    explain_gpu_fault,
    last_words,
)
from gradus.processes.supervisor import Supervisor, become_subreaper
from gradus.processes.table import is_alive, read_process, zombie_children

READY = """
import json, os, pathlib, sys
def say(**content):
    path = pathlib.Path(sys.argv[1])
    path.with_suffix(".tmp").write_text(json.dumps({"pid": os.getpid(), **content}))
    path.with_suffix(".tmp").rename(path)
"""
SERVE = READY + "say(base_url='http://127.0.0.1:1'); import signal; signal.pause()"
STUBBORN = (
    READY + "import signal; signal.signal(15, signal.SIG_IGN); say(); "
    "import threading; threading.Event().wait()"
)
FAMILY = (
    READY
    + """
import signal, subprocess
stubborn = "import signal; signal.signal(15, 1); print(1, flush=True); signal.pause()"
def child(**options):
    process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, **options)
    process.stdout.readline()
    return process.pid
say(pids=[child(), child(start_new_session=True)])
signal.pause()
"""
)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor(tmp_path / "pids.json", stop_timeout_seconds=5) as supervisor:
        yield supervisor


def spec(tmp_path: Path, program: str, name: str = "server", **env: str) -> ProcessSpec:
    ready = tmp_path / f"{name}.ready"
    argv = (sys.executable, "-c", program, str(ready))
    return ProcessSpec(name, argv, env, tmp_path / "logs" / f"{name}.log", ready)


def family_pids(tmp_path: Path) -> list[int]:
    content = read_json(tmp_path / "server.ready")
    return [content["pid"], *content["pids"]]


def test_a_child_is_ready_when_its_file_says_so(supervisor: Supervisor, tmp_path: Path) -> None:
    child = supervisor.start(spec(tmp_path, SERVE))
    ready: dict[str, str] = {}
    supervisor.wait_ready(
        [child], timeout_seconds=10, on_ready=lambda c, content: ready.update(content)
    )
    assert ready["base_url"] == "http://127.0.0.1:1"
    assert child.exit_code() is None


def test_a_port_that_is_taken_leaves_nothing_behind(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = Listens("127.0.0.1", taken.getsockname()[1])
        asked = replace(spec(tmp_path, SERVE), listens=where, temporary_variable="TMPDIR")
        open_before = os.listdir("/proc/self/fd")
        with pytest.raises(ConfigError, match="in use"):
            supervisor.start(asked)
        assert len(os.listdir("/proc/self/fd")) == len(open_before)
    supervisor.stop()
    assert os.listdir(tmp_path) == []


def test_a_child_without_a_ready_file_is_ready_at_once(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    argv = (sys.executable, "-c", SERVE, str(tmp_path / "unused"))
    child = supervisor.start(ProcessSpec("plain", argv, {}, tmp_path / "plain.log"))
    supervisor.wait_ready([child], timeout_seconds=60)


def test_a_child_that_ends_before_it_is_ready_is_named_with_its_cause(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    program = (
        "import sys; print('loading, CUDA out of memory'); "
        "sys.exit(print('gradus server: port 80 is in use', file=sys.stderr) or 64)"
    )
    child = supervisor.start(spec(tmp_path, program))
    with pytest.raises(ChildFailed) as caught:
        supervisor.wait_ready([child], timeout_seconds=60)
    message = str(caught.value)
    assert message.startswith("server ended with exit code 64 after")
    assert "port 80 is in use" in message
    assert str(tmp_path / "logs" / "server.log") in message
    assert "\n" not in message
    assert caught.value.exit_code is ExitCode.CONFIG
    assert "loading, CUDA out of memory" in caught.value.log_tail
    assert "; its log names a fault of a GPU: the memory of the GPU was full" in message


@pytest.mark.shows("F78")
@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "was full"),
        ("NVRM: Xid (PCI:0000:41:00): 79, pid=1, GPU has fallen off the bus.", "the GPU is gone"),
        ("CUDA error: uncorrectable ECC error encountered", "is damaged"),
        ("NVRM: Xid (PCI:0000:41:00): 119, pid=1, Timeout after 6s of waiting", "the firmware"),
        ("NVRM: Xid (PCI:0000:41:00): 74, pid=1, NVLink: fatal error", "a link between GPUs"),
        ("RuntimeError: Error 802: system not yet initialized", "nvidia-fabricmanager must run"),
        ("CUDA error: no kernel image is available for execution", "do not fit together"),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)", "never joined"),
        ("NCCL error: remote process exited or there was a network error", "lost each other"),
        ("RuntimeError: CUDA error: device-side assert triggered", "an index beyond a tensor"),
        ("reward: Xid 79 is a task", ""),
    ],
)
def test_an_error_of_a_gpu_is_told_with_what_to_do(said: str, told: str) -> None:
    """F78"""
    found = explain_gpu_fault(f"loading\n{said}\n")
    assert told in found
    assert bool(found) is bool(told)
    assert told == "" or f"(on {socket.gethostname()}); " in found


@pytest.mark.shows("I7")
@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [(64, ExitCode.CONFIG), (75, ExitCode.TRY_AGAIN), (1, ExitCode.INTERNAL), (3, 70), (78, 78)],
)
def test_the_class_of_a_failure_is_the_childs(
    supervisor: Supervisor, tmp_path: Path, exit_code: int, expected: int
) -> None:
    child = supervisor.start(spec(tmp_path, "pass"))
    assert ChildFailed(child, exit_code).exit_code == expected


@pytest.mark.shows("I7")
def test_the_class_of_a_failure_under_torchrun_is_the_ranks(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    child = supervisor.start(spec(tmp_path, "print('  exitcode  : 78 (pid: 3)')"))
    wait_until(lambda: child.exit_code() == 0)
    assert ChildFailed(child, 1).exit_code is ExitCode.CORRUPT_STATE


@pytest.mark.parametrize(("exit_code", "words"), [(-11, "SIGSEGV"), (-63, "signal 63")])
def test_a_signal_is_named(
    supervisor: Supervisor, tmp_path: Path, exit_code: int, words: str
) -> None:
    child = supervisor.start(spec(tmp_path, "pass"))
    assert f"server was killed by {words} after" in str(ChildFailed(child, exit_code))


@pytest.mark.shows("I7")
def test_a_kill_is_no_line_of_the_log_and_may_be_tried_again(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    child = supervisor.start(spec(tmp_path, "print('1 INFO trainer: step 3 done')"))
    wait_until(lambda: child.exit_code() == 0)
    error = ChildFailed(child, -signal.SIGKILL)
    assert "step 3" not in str(error)
    assert "out of memory (see `dmesg`), or killed by a person or a scheduler" in str(error)
    assert error.exit_code is ExitCode.TRY_AGAIN
    assert ChildFailed(child, -signal.SIGSEGV).exit_code is ExitCode.INTERNAL


@pytest.mark.shows("F01")
def test_the_kill_of_a_rank_is_told_although_torchrun_ends_with_one(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    report = "gradus trainer: rank 0 has left\n  exitcode  : -9 (pid: 3)\n====="
    child = supervisor.start(spec(tmp_path, f"print({report!r})", name="trainer"))
    wait_until(lambda: child.exit_code() == 0)
    error = ChildFailed(child, 1)
    assert "a rank of trainer was killed by SIGKILL" in str(error)
    assert "====" not in str(error)
    assert error.exit_code is ExitCode.TRY_AGAIN


def test_the_cause_of_an_earlier_launch_is_not_told_again(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    first = supervisor.start(spec(tmp_path, "print('gradus server: port 80 is in use')"))
    wait_until(lambda: first.exit_code() == 0)
    second = supervisor.start(spec(tmp_path, "pass"))
    error = ChildFailed(second, 3)
    assert "it gave no reason" in str(error)
    assert error.log_tail == []


def test_the_end_of_the_log_is_shown_only_when_it_says_more_than_the_error(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    words = "print('gradus server: port 80 is in use')"
    short = supervisor.start(spec(tmp_path, words, name="short"))
    long = supervisor.start(spec(tmp_path, f"print('binding'); {words}", name="long"))
    wait_until(lambda: short.exit_code() == 0 and long.exit_code() == 0)
    assert last_words(ChildFailed(short, 64)) == []
    assert last_words(ChildFailed(long, 64)) == [
        "last lines of long.log:",
        "  binding",
        "  gradus server: port 80 is in use",
    ]
    assert last_words(ProcessError("of another kind")) == []


@pytest.mark.shows("F12")
def test_orphans_that_were_given_to_us_are_reaped(supervisor: Supervisor, tmp_path: Path) -> None:
    child = supervisor.start(spec(tmp_path, "pass"))
    stranger = subprocess.Popen([sys.executable, "-c", "pass"])
    wait_until(lambda: read_process(stranger.pid) is None and child.exit_code() == 0)
    supervisor.reap_orphans()
    zombies = {entry.pid for entry in zombie_children(os.getpid())}
    assert stranger.pid not in zombies
    assert child.pid in zombies, "the pid of a dead child stays reserved until stop"
    stranger.wait()


def test_the_exit_code_of_a_child_of_the_caller_is_left_to_it(tmp_path: Path) -> None:
    mine = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"], stdin=-1
    )
    with Supervisor(tmp_path / "pids.json", stop_timeout_seconds=1.0) as supervisor:
        assert mine.stdin is not None
        mine.stdin.close()
        wait_until(lambda: mine.pid in {entry.pid for entry in zombie_children(os.getpid())})
        supervisor.reap_orphans()
    assert mine.wait() == 3


def test_a_child_that_is_never_ready_ends_with_the_deadline(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    program = "import signal; print('loading weights', flush=True); signal.pause()"
    child = supervisor.start(spec(tmp_path, program))
    wait_until(lambda: child.spec.log.read_text(), what="the child's first line")
    with pytest.raises(ChildNotReady, match=r"server is not ready after 0\.1 s; see .*server\.log"):
        supervisor.wait_ready([child], timeout_seconds=0.1)


def test_the_last_log_lines_come_with_the_deadline(supervisor: Supervisor, tmp_path: Path) -> None:
    child = supervisor.start(
        spec(tmp_path, "import signal; print('x', flush=True); signal.pause()")
    )
    wait_until(lambda: child.spec.log.read_text())
    with pytest.raises(ChildNotReady) as caught:
        supervisor.wait_ready([child], timeout_seconds=0.01)
    assert caught.value.log_tail == ["x"]


def test_another_child_that_dies_ends_the_wait(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start(spec(tmp_path, "import os; os.kill(os.getpid(), 9)", name="dying"))
    waiting = supervisor.start(spec(tmp_path, "import signal; signal.pause()"))
    with pytest.raises(ChildFailed, match="dying was killed by SIGKILL after"):
        supervisor.wait_ready([waiting], timeout_seconds=60)


def test_the_child_started_first_is_the_cause(supervisor: Supervisor, tmp_path: Path) -> None:
    first = supervisor.start(spec(tmp_path, "import sys; sys.exit(70)", name="inference"))
    second = supervisor.start(spec(tmp_path, "import sys; sys.exit(75)", name="orchestrator"))
    wait_until(lambda: first.exit_code() is not None and second.exit_code() is not None)
    with pytest.raises(ChildFailed, match="inference ended with exit code 70"):
        supervisor.check()


def test_a_child_that_ends_after_those_that_asked_it_is_still_the_cause(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    """An engine that was killed fails a call of the orchestrator before its server has ended."""
    ending = "import os, time; time.sleep(0.3); os._exit(75)"
    supervisor.start(spec(tmp_path, ending, name="inference"))
    second = supervisor.start(spec(tmp_path, "import sys; sys.exit(70)", name="orchestrator"))
    wait_until(lambda: second.exit_code() is not None)
    with pytest.raises(ChildFailed, match="inference ended with exit code 75"):
        supervisor.check()


def test_only_children_that_may_finish_end_without_an_error(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    done = replace(spec(tmp_path, READY + "say(done=True)", name="worker"), finishes=True)
    worker = supervisor.start(done)
    wait_until(lambda: worker.exit_code() == 0)
    supervisor.check()
    server = supervisor.start(spec(tmp_path, "pass"))
    wait_until(lambda: server.exit_code() == 0)
    with pytest.raises(ChildFailed, match="server ended with exit code 0"):
        supervisor.check()


def test_a_child_that_finishes_before_it_is_ready_has_failed(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    child = supervisor.start(replace(spec(tmp_path, "pass"), finishes=True))
    with pytest.raises(ChildFailed, match="server ended with exit code 0"):
        supervisor.wait_ready([child], timeout_seconds=60)


def test_a_child_that_finishes_right_after_it_was_ready_is_fine(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    child = supervisor.start(replace(spec(tmp_path, READY + "say(done=True)"), finishes=True))
    wait_until(lambda: child.exit_code() == 0)
    supervisor.wait_ready([child], timeout_seconds=60)


def test_a_child_that_is_ready_and_finishes_between_two_looks_is_fine(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = supervisor.start(replace(spec(tmp_path, READY + "say(done=True)"), finishes=True))
    wait_until(lambda: child.exit_code() == 0)
    seen = iter([None])
    monkeypatch.setattr(
        "gradus.processes.supervisor.ready_content", lambda _: next(seen, {"done": True})
    )
    supervisor.wait_ready([child], timeout_seconds=60)


def test_a_child_that_leaves_with_exit_code_0_before_its_work_is_done_has_failed(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    child = supervisor.start(replace(spec(tmp_path, READY + "say()"), finishes=True))
    wait_until(lambda: child.exit_code() == 0)
    with pytest.raises(ChildFailed, match=r"exit code 0 before .* done.*sys\.exit") as said:
        supervisor.check()
    assert said.value.exit_code == ExitCode.INTERNAL


def test_a_program_that_does_not_exist_is_named(supervisor: Supervisor, tmp_path: Path) -> None:
    missing = ProcessSpec("server", (str(tmp_path / "no-such-program"),), {}, tmp_path / "x.log")
    with pytest.raises(ProcessError, match=r"server cannot be started: No such file .*no-such"):
        supervisor.start(missing)
    assert supervisor.children == []


def test_a_log_that_cannot_be_written_is_named(supervisor: Supervisor, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file, not a folder")
    with pytest.raises(ProcessError, match="server cannot be started"):
        supervisor.start(spec(tmp_path, SERVE))


def test_the_registry_names_the_living_children(supervisor: Supervisor, tmp_path: Path) -> None:
    child = supervisor.start(spec(tmp_path, SERVE))
    (entry,) = read_json(tmp_path / "pids.json")["processes"]
    assert entry["name"] == "server"
    assert is_alive(entry["pid"], entry["start_time"])
    supervisor.wait_ready([child], timeout_seconds=60)
    supervisor.stop()
    assert read_json(tmp_path / "pids.json")["processes"] == []
    assert not is_alive(entry["pid"], entry["start_time"])


@pytest.mark.shows("SEC10")
def test_a_disk_that_takes_no_registry_ends_no_launch(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gradus.processes.supervisor.write_json", refuse)
    child = supervisor.start(spec(tmp_path, SERVE))
    supervisor.wait_ready([child], timeout_seconds=60)
    supervisor.stop()
    assert not is_alive(child.pid, child.start_time)


def test_a_child_gets_only_the_environment_it_was_given(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY_API_KEY", "secret")
    program = READY + "say(env=dict(os.environ)); import signal; signal.pause()"
    child = supervisor.start(spec(tmp_path, program, LANG="C.UTF-8"))
    supervisor.wait_ready([child], timeout_seconds=60)
    env = read_json(tmp_path / "server.ready")["env"]
    assert set(env) - {"LC_CTYPE"} == {"LANG", "GRADUS_DEATH_PIPE", "GRADUS_LAUNCH"}


@pytest.mark.shows("I7")
def test_stop_ends_children_and_grandchildren_that_ignore_term(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "pids.json", stop_timeout_seconds=0.3)
    child = supervisor.start(spec(tmp_path, FAMILY))
    supervisor.wait_ready([child], timeout_seconds=60)
    pids = family_pids(tmp_path)
    assert {entry.pid for entry in supervisor.owned()} == set(pids)
    supervisor.stop()
    assert [pid for pid in pids if read_process(pid)] == []


LEADER = """
import signal, subprocess, sys
follower = subprocess.Popen([sys.executable, "-c", FOLLOWER], stdout=subprocess.PIPE)
follower.stdout.readline()
signal.signal(signal.SIGTERM, lambda *_: None)
say(pids=[follower.pid])
signal.pause()
import select
select.select([follower.stdout], [], [], 0.5)
follower.kill()
say(told=follower.communicate()[0].decode())
"""
FOLLOWER = """
import signal
signal.signal(signal.SIGTERM, lambda *_: print("was told", flush=True))
print("runs", flush=True)
while True: signal.pause()
"""


def test_a_process_that_ends_its_children_is_the_only_one_that_is_told(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "pids.json", stop_timeout_seconds=20)
    program = READY + f"FOLLOWER = {FOLLOWER!r}" + LEADER
    leader = replace(spec(tmp_path, program), ends_its_children=True)
    supervisor.wait_ready([supervisor.start(leader)], timeout_seconds=60)
    supervisor.stop()
    assert read_json(tmp_path / "server.ready")["told"] == ""


def test_what_such_a_process_leaves_behind_is_told_after_it(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "pids.json", stop_timeout_seconds=20)
    program = READY + (
        "import subprocess; child = subprocess.Popen(['sleep', '60']); say(pids=[child.pid])\n"
        "import signal; signal.pause()"
    )
    leader = replace(spec(tmp_path, program), ends_its_children=True)
    supervisor.wait_ready([supervisor.start(leader)], timeout_seconds=60)
    before = time.monotonic()
    supervisor.stop()
    assert time.monotonic() - before < 15
    assert read_process(read_json(tmp_path / "server.ready")["pids"][0]) is None


@pytest.mark.shows("F10", "I7")
def test_stop_finds_orphans_of_a_child_that_was_killed(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "pids.json", stop_timeout_seconds=0.3)
    child = supervisor.start(spec(tmp_path, FAMILY))
    supervisor.wait_ready([child], timeout_seconds=60)
    pids = family_pids(tmp_path)
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: child.exit_code() == -signal.SIGKILL)
    supervisor.stop()
    assert [pid for pid in pids if read_process(pid)] == []


ORPHAN = (
    READY
    + """
import signal, subprocess
options = "env={}, start_new_session=True, stdout=-3, stderr=-3"
program = f"import subprocess; print(subprocess.Popen(['sleep', '600'], {options}).pid)"
command = [sys.executable, "-c", program]
said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
say(orphan=int(said.stdout))
signal.pause()
"""
)


def start_orphan(supervisor: Supervisor, tmp_path: Path, restarts: int = 0) -> int:
    """A process without a mark, in a session of its own, whose parent has ended."""
    child = supervisor.start(replace(spec(tmp_path, ORPHAN), restarts=restarts))
    supervisor.wait_ready([child], timeout_seconds=60)
    return int(read_json(tmp_path / "server.ready")["orphan"])


def test_stop_ends_an_orphan_that_nothing_but_adoption_gives_away(tmp_path: Path) -> None:
    become_subreaper()
    # A child of this process from before the launch is none of its business.
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        with Supervisor(tmp_path / "pids.json", stop_timeout_seconds=5) as supervisor:
            orphan = start_orphan(supervisor, tmp_path)
            assert read_process(orphan) is not None
        assert read_process(orphan) is None
        assert read_process(stranger.pid) is not None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.shows("F10", "F12")
def test_a_restart_ends_what_the_dead_child_left_behind(
    tmp_path: Path, quick_restarts: None
) -> None:
    become_subreaper()
    with Supervisor(tmp_path / "pids.json", stop_timeout_seconds=5) as supervisor:
        orphan = start_orphan(supervisor, tmp_path, restarts=1)
        os.kill(supervisor.children[0].pid, signal.SIGKILL)
        restart_until(supervisor, lambda: read_process(orphan) is None)


@pytest.mark.shows("F15")
def test_the_temporary_folder_of_a_launch_carries_the_run_and_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_dir = tmp_path / "my-run"
    run_dir.mkdir()
    program = READY + "say(folder=os.environ['TMPDIR']); import signal; signal.pause()"
    with Supervisor(run_dir / "pids.json", stop_timeout_seconds=5) as supervisor:
        child = supervisor.start(replace(spec(tmp_path, program), temporary_variable="TMPDIR"))
        supervisor.wait_ready([child], timeout_seconds=60)
        folder = Path(read_json(tmp_path / "server.ready")["folder"])
        assert folder.is_dir()
        assert folder.name.startswith("gradus-my-run-")
        assert read_json(run_dir / "pids.json")["temporary_folder"] == str(folder)
    assert not folder.exists()


@pytest.mark.shows("F15")
def test_the_temporary_folder_of_a_killed_launcher_is_removed(tmp_path: Path) -> None:
    left, other = tmp_path / "gradus-run-1", tmp_path / "mine"
    for folder in (left, other):
        folder.mkdir()
        content = {"launch": "999999.1", "processes": [], "temporary_folder": str(folder)}
        write_json(tmp_path / "pids.json", content)
        end_leftovers(tmp_path / "pids.json", timeout_seconds=0.05)
    assert not left.exists()
    assert other.exists()


@pytest.mark.shows("I7")
def test_stop_waits_no_longer_than_its_children_need(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "pids.json", stop_timeout_seconds=60)
    children = [supervisor.start(spec(tmp_path, SERVE, name=f"server{n}")) for n in range(3)]
    supervisor.wait_ready(children, timeout_seconds=60)
    started = time.monotonic()
    supervisor.stop()
    supervisor.stop()
    assert time.monotonic() - started < 30


@pytest.mark.shows("F70")
def test_an_urgent_stop_does_not_wait_for_a_stubborn_child(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "pids.json", stop_timeout_seconds=60)
    child = supervisor.start(spec(tmp_path, STUBBORN))
    supervisor.wait_ready([child], timeout_seconds=60)
    started = time.monotonic()
    supervisor.stop(is_urgent=lambda: True)
    assert time.monotonic() - started < 30
    assert read_process(child.pid) is None


@pytest.mark.shows("F15", "SEC17")
def test_leftovers_of_a_killed_launcher_are_ended(tmp_path: Path) -> None:
    env = {**os.environ, "GRADUS_LAUNCH": "999999.1"}
    argv = [sys.executable, "-c", FAMILY, str(tmp_path / "server.ready")]
    with subprocess.Popen(argv, env=env, start_new_session=True) as family:
        wait_until((tmp_path / "server.ready").exists)
        entry = read_process(family.pid)
        assert entry is not None
        process = {"name": "server", "pid": family.pid, "start_time": entry.start_time}
        write_json(tmp_path / "pids.json", {"launch": "999999.1", "processes": [process]})
        end_leftovers(tmp_path / "pids.json", timeout_seconds=0.05)
        assert [pid for pid in family_pids(tmp_path) if read_process(pid)] == []


@pytest.mark.shows("F15", "SEC17")
def test_a_process_with_a_recycled_pid_is_no_leftover(tmp_path: Path) -> None:
    process = {"name": "server", "pid": os.getppid(), "start_time": 1}
    write_json(tmp_path / "pids.json", {"launch": "999999.1", "processes": [process]})
    end_leftovers(tmp_path / "pids.json", timeout_seconds=0)
    assert read_process(os.getppid()) is not None


def test_no_registry_means_no_leftovers(tmp_path: Path) -> None:
    end_leftovers(tmp_path / "pids.json", timeout_seconds=0)


@pytest.mark.parametrize("content", [[], {}, {"launch": "1", "processes": [{"pid": "x"}]}, 5])
def test_a_registry_of_another_shape_is_corrupt(tmp_path: Path, content: object) -> None:
    write_json(tmp_path / "pids.json", content)
    with pytest.raises(CorruptStateError, match=r"pids\.json does not list processes"):
        end_leftovers(tmp_path / "pids.json", timeout_seconds=0)


def test_a_ready_file_that_does_not_parse_is_corrupt(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    (tmp_path / "server.ready").write_text("{")
    child = supervisor.start(spec(tmp_path, "import signal; signal.pause()"))
    with pytest.raises(CorruptStateError, match=r"server\.ready is not JSON"):
        supervisor.wait_ready([child], timeout_seconds=60)


@pytest.mark.shows("SEC36")
def test_the_log_is_readable_only_by_its_owner(supervisor: Supervisor, tmp_path: Path) -> None:
    child = supervisor.start(spec(tmp_path, SERVE))
    assert child.spec.log.stat().st_mode & 0o777 == 0o600
    assert json.loads((tmp_path / "pids.json").read_text())["launch"].startswith(f"{os.getpid()}.")


@pytest.mark.shows("F14")
@pytest.mark.parametrize("kills", [(None, None), (4, 4), (4, 5)])
def test_a_killed_child_is_told_with_its_memory_and_whether_that_ran_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: tuple[int | None, int | None]
) -> None:
    seen = iter(kills)
    monkeypatch.setattr("gradus.processes.supervisor.memory_kills", lambda: next(seen))
    hold = READY + "block = bytearray(160 << 20); say(); import signal; signal.pause()"
    with Supervisor(tmp_path / "pids.json", stop_timeout_seconds=1) as supervisor:
        child = supervisor.start(spec(tmp_path, hold))
        supervisor.wait_ready([child], timeout_seconds=60)
        supervisor.note_memory()
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(ChildFailed, match="killed by SIGKILL") as caught:
            restart_until(supervisor, lambda: False)
    assert "; it held 0.2 GiB (log: " in str(caught.value)
    has_run_out = kills == (4, 5)
    assert ("the kernel had no memory left" in str(caught.value)) == has_run_out
    assert ("or killed by a person" in str(caught.value)) != has_run_out


@pytest.fixture
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradus.processes.supervisor.RESTART_WAIT_SECONDS", 0.01)


def restart_until(supervisor: Supervisor, is_reached: Callable[[], object]) -> None:
    def look() -> object:
        supervisor.check()
        return is_reached()

    wait_until(look)


@pytest.mark.shows("F07")
@pytest.mark.usefixtures("quick_restarts")
def test_a_child_with_restarts_left_is_started_anew(tmp_path: Path) -> None:
    lines: list[str] = []
    registry = tmp_path / "pids.json"
    with Supervisor(registry, stop_timeout_seconds=0.3, on_restart=lines.append) as supervisor:
        first = supervisor.start(replace(spec(tmp_path, FAMILY), restarts=2))
        other = supervisor.start(spec(tmp_path, SERVE, "other"))
        supervisor.wait_ready([first, other], timeout_seconds=60)
        old = family_pids(tmp_path)
        os.kill(first.pid, signal.SIGKILL)
        restart_until(supervisor, lambda: supervisor.children[0] not in (first, other))
        again = supervisor.children[0]
        supervisor.wait_ready([again], timeout_seconds=60)
        assert again.spec == first.spec
        assert again.pid != first.pid
        assert set(family_pids(tmp_path)).isdisjoint(old)
        assert [entry["pid"] for entry in read_json(registry)["processes"]]
        assert was_ended_from_outside(registry, first.pid) is True
        assert was_ended_from_outside(registry, again.pid) is None
    (line,) = lines
    assert "server was killed by SIGKILL" in line
    assert line.endswith("restart 1 of 2 in 0.01 s")


def test_restarts_of_minutes_ago_count_and_make_no_wait_longer(tmp_path: Path) -> None:
    lines: list[str] = []
    with Supervisor(tmp_path / "pids.json", stop_timeout_seconds=1, on_restart=lines.append) as it:
        it._restarted_at["server"] = [time.monotonic() - 400.0] * 11
        child = it.start(replace(spec(tmp_path, "sys.exit(1)"), restarts=50))
        restart_until(it, lambda: child not in it.children)
    assert lines[0].endswith("restart 12 of 50 in 0.25 s")


def test_each_restart_waits_longer_up_to_a_minute(tmp_path: Path) -> None:
    lines: list[str] = []
    with Supervisor(tmp_path / "pids.json", stop_timeout_seconds=1, on_restart=lines.append) as it:
        for num_before in range(12):
            it._restarted_at["server"] = [time.monotonic()] * num_before
            child = it.start(replace(spec(tmp_path, "sys.exit(1)"), restarts=50))
            restart_until(it, lambda child=child: child not in it.children)
    waits = [line.rpartition(" in ")[2] for line in lines]
    # A slow machine may see one end twice.
    assert list(dict.fromkeys(waits)) == ["0.25 s", "1 s", "4 s", "16 s", "60 s"]


@pytest.mark.usefixtures("quick_restarts")
def test_restarts_of_long_ago_do_not_count(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradus.processes.supervisor.RESTART_WINDOW_SECONDS", 0.0)
    dying = READY + "say(); sys.exit(70)"
    supervisor.start(replace(spec(tmp_path, dying), restarts=1))
    seen: set[int] = set()

    def is_restarted_often() -> bool:
        seen.update(child.pid for child in supervisor.children)
        return len(seen) >= 4

    restart_until(supervisor, is_restarted_often)


@pytest.mark.shows("F13")
@pytest.mark.usefixtures("quick_restarts")
def test_after_the_last_restart_the_failure_ends_the_launch_with_its_log(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    dying = READY + "say(); print('out of boxes', flush=True); sys.exit(70)"
    child = supervisor.start(replace(spec(tmp_path, dying), restarts=2))
    assert child.spec.restarts == 2
    with pytest.raises(ChildFailed, match="ended with exit code 70") as caught:
        restart_until(supervisor, lambda: False)
    assert caught.value.log_tail == ["out of boxes"]
    assert child.spec.log.read_text().count("out of boxes") == 3


def test_a_child_that_was_never_ready_is_not_started_anew(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    child = supervisor.start(replace(spec(tmp_path, "raise SystemExit(64)"), restarts=3))
    with pytest.raises(ChildFailed, match="exit code 64"):
        supervisor.wait_ready([child], timeout_seconds=60)
