"""A program on this machine: what is kept of it, and that nothing of it is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from verifiers.v1.runtimes.subprocess import SubprocessConfig, SubprocessRuntime

from gradus.processes.table import carries_mark, living_processes
from gradus_program.running import (
    LocalPlace,
    Place,
    Run,
    Start,
    Tail,
    local_folder,
    open_up,
    place_for,
    read_output,
    remove,
)


@pytest.fixture
async def runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SubprocessRuntime]:
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path / "verifiers")
    runtime = SubprocessRuntime(SubprocessConfig(), "episode")
    await runtime.start()
    yield runtime
    await runtime.stop()


@pytest.fixture
async def place(runtime: SubprocessRuntime) -> AsyncIterator[Place]:
    async with place_for(runtime) as place:
        yield place


def start(
    place: Place, *command: str, files: list[Path] | None = None, file: str | None = None
) -> Start:
    env = {"PATH": os.environ["PATH"], "HOME": place.home}
    return Start(list(command), env, files or [], b"the task", file)


async def run(place: Place, *command: str, max_bytes: int = 1000, **files: object) -> Run:
    result = Run.of(max_bytes)
    await place.run(start(place, *command, **files), result)  # type: ignore[arg-type]
    return result


def left_of(place: Place) -> list[int]:
    return [e.pid for e in living_processes() if carries_mark(e.pid, "HOME", place.home)]


async def test_a_program_hears_the_task_and_its_words_are_kept(place: Place) -> None:
    result = await run(place, "sh", "-c", "cat; echo oh no >&2; exit 3")
    assert (result.output.text, result.errors.text) == ("the task", "oh no\n")
    assert result.exit_code == 3


async def test_a_program_may_find_the_task_in_a_file(place: Place) -> None:
    result = await run(place, "sh", "-c", "cat in/task.txt -", file="in/task.txt")
    assert result.output.text == "the task"


@pytest.mark.parametrize(
    ("command", "exit_code"),
    [("exit 0", 0), ("kill -9 $$", 137), ("kill 0", 143), ("kill -9 $PPID; sleep 60", 137)],
)
async def test_an_exit_code_is_that_of_a_shell(place: Place, command: str, exit_code: int) -> None:
    result = await run(place, "sh", "-c", command)
    assert result.exit_code == exit_code
    assert left_of(place) == []


async def test_what_a_killed_guardian_left_ends_also_when_its_end_is_known_before(
    place: LocalPlace,
) -> None:
    left = subprocess.Popen(["sleep", "60"], env={"HOME": place.home})
    guardian = await asyncio.create_subprocess_exec("sleep", "60")
    guardian.kill()
    await guardian.wait()
    try:
        await place._end(guardian, 5.0)
        assert left.wait(60) == -signal.SIGKILL
    finally:
        left.kill()
        left.wait()


async def test_a_command_that_is_not_there_ends_with_127(place: Place) -> None:
    result = await run(place, "no-such-program")
    assert result.exit_code == 127
    assert "no-such-program: No such file" in result.errors.text


async def test_daemons_end_with_the_program(place: Place) -> None:
    daemon = "setsid sh -c 'setsid sleep 60 & setsid sleep 60 & wait' >/dev/null 2>&1 & echo up"
    result = await run(place, "sh", "-c", daemon)
    assert result.output.text == "up\n"
    assert left_of(place) == []


async def test_a_deadline_ends_the_program_and_its_daemons(place: Place) -> None:
    result = Run.of(1000)
    command = "setsid setsid sleep 60 & echo up; trap '' TERM; sleep 60"
    playing = asyncio.create_task(place.run(start(place, "sh", "-c", command), result))
    async with asyncio.timeout(60):
        while result.output.text != "up\n":
            await asyncio.sleep(0)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert (result.exit_code, result.output.text) == (None, "up\n")
    assert left_of(place) == []


async def test_of_a_flood_the_end_is_kept(place: Place) -> None:
    result = await run(place, "sh", "-c", "yes | head -c 3000000; echo end", max_bytes=10)
    assert result.output.text == "y\ny\ny\nend\n"
    assert result.output.num_bytes == 3_000_004


async def test_files_and_folders_are_copied(
    place: Place, runtime: SubprocessRuntime, tmp_path: Path
) -> None:
    (tmp_path / "lib/__pycache__").mkdir(parents=True)
    (tmp_path / "lib/a.txt").write_text("a")
    script = tmp_path / "agent.sh"
    script.write_text("#!/bin/sh\ncat lib/a.txt\nls lib > listed\n")
    script.chmod(0o755)
    result = await run(place, "./agent.sh", files=[script, tmp_path / "lib"])
    assert result.output.text == "a"
    assert await read_output(runtime, "listed", 100) == b"a.txt\n"


async def test_only_regular_files_of_the_working_folder_are_read(
    place: Place, runtime: SubprocessRuntime, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret")
    made = f"mkfifo pipe; ln -s {tmp_path}/secret out; ln -s . loop; mkdir d; echo 12345 > big"
    await run(place, "sh", "-c", f"{made}; echo ok > d/good")
    names = ["pipe", "out", "d", "big", "absent", "d/good", "loop/d/good"]
    read = [await read_output(runtime, name, 5) for name in names]
    assert read == [None, None, None, None, None, b"ok\n", b"ok\n"]


async def test_nothing_is_left_of_a_program_that_locks_its_folders(
    runtime: SubprocessRuntime,
) -> None:
    folder = local_folder(runtime)
    async with place_for(runtime) as place:
        await run(place, "sh", "-c", "mkdir -p a/b $HOME/c; touch a/b/x; chmod 0 a/b a $HOME/c")
        home = Path(place.home)
    assert not home.exists()
    open_up(folder)
    assert (folder / "a/b/x").exists()
    remove(folder)
    assert not folder.exists()


def test_a_tail_keeps_the_end_of_any_bytes() -> None:
    tail = Tail(4)
    for _ in range(100):
        tail.add(b"ab\xff\xf0")
    assert tail.text == "ab\ufffd\ufffd"
    assert tail.num_bytes == 400


async def test_a_container_is_asked_through_its_engine() -> None:
    async def run(argv: list[str], env: dict[str, str]) -> SimpleNamespace:
        return SimpleNamespace(exit_code=1, stdout="", stderr="")

    container = SimpleNamespace(run=run)
    assert await read_output(container, "answer.txt", 10) is None
