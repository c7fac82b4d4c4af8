"""What a person sees of a run."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest

from gradus.launch.console import MAX_WAITING, ConsoleProgress, unblocked
from gradus.launch.steps import Steps
from gradus.monitor import RL_COLUMNS
from gradus.run.lease import RunLease
from gradus.run.paths import RunDirectory
from gradus.run.records import Record
from gradus.run.settings import OPEN_ENDED_STEPS

STEP = Record(0, 1.0, {"episode/reward/mean": 0.5, "time/step_seconds": 1.0})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def ticking(step_seconds: float) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += step_seconds


def build_progress(stream: TextIO, *, tick_seconds: float = 1.0) -> ConsoleProgress:
    clock = ticking(tick_seconds)
    return ConsoleProgress(stream, max_steps=3, clock=lambda: next(clock))


FULL = {
    name: 0.5
    for column in RL_COLUMNS
    for name in column.keys
    if column.label not in ("failed", "dropped", "flat")
}


def test_in_a_file_each_process_gets_one_line_when_it_is_ready() -> None:
    stream = io.StringIO()
    progress = build_progress(stream)
    progress.started(["inference", "env_words"])
    progress.waiting()
    progress.ready("env_words", 3.14, "ipc:///tmp/x")
    progress.ready("inference", 14.2, "")
    assert stream.getvalue().splitlines() == [
        "env_words         starting … ready in 3.1 s  ipc:///tmp/x",
        "inference         starting … ready in 14.2 s",
    ]


def test_on_a_terminal_the_lines_of_starting_processes_are_redrawn() -> None:
    stream = Terminal()
    progress = build_progress(stream)
    progress.started(["inference", "env_words"])
    progress.waiting()
    progress.ready("inference", 2.0, "http://127.0.0.1:1")
    last = stream.getvalue().split("\x1b[2A")[-1]
    assert last.replace("\x1b[2K", "").splitlines() == [
        "inference         starting … ready in 2.0 s  http://127.0.0.1:1",
        "env_words         starting … 4 s",
    ]


def test_what_is_said_while_processes_start_stays_above_their_lines() -> None:
    stream = Terminal()
    progress = build_progress(stream)
    progress.started(["inference", "env_words"])
    progress.line("the disk is full")
    before, after = stream.getvalue().split("\x1b[2A\x1b[J")
    assert before.count("\n") == 2
    said, *starting = after.replace("\x1b[2K", "").splitlines()
    assert said == "the disk is full"
    assert [line.split()[0] for line in starting] == ["inference", "env_words"]
    assert progress._height == 2, "so many rows up is the next first line"


def test_a_line_that_is_wider_than_the_terminal_takes_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Terminal()
    progress = build_progress(stream)
    monkeypatch.setattr(progress, "_width", lambda: 40)
    progress.started(["inference", "env_words"])
    progress.ready("inference", 2.0, "http://127.0.0.1:12345")
    progress.ready("env_words", 3.0, "")
    assert stream.getvalue().endswith("ready in 3.0 s\n")
    assert [part[:1] for part in stream.getvalue().split("\x1b[")[1:] if "A" in part[:2]] == [
        "2",
        "3",
    ]


def test_nothing_is_redrawn_once_all_are_ready() -> None:
    stream = Terminal()
    progress = build_progress(stream)
    progress.started(["inference"])
    progress.ready("inference", 2.0, "")
    before = stream.getvalue()
    progress.waiting()
    assert stream.getvalue() == before


def test_steps_in_a_file_are_plain_lines() -> None:
    stream = io.StringIO()
    progress = build_progress(stream)
    progress.step(STEP)
    progress.end_steps()
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("step 1/3  reward  0.500")
    assert "\x1b" not in line


def test_a_run_without_an_end_has_no_steps_left() -> None:
    stream = io.StringIO()
    clock = ticking(1.0)
    progress = ConsoleProgress(
        stream, max_steps=OPEN_ENDED_STEPS, log_every=1, clock=lambda: next(clock)
    )
    for number in range(3):
        progress.step(replace(STEP, step=number))
    assert [line.split()[:2] for line in stream.getvalue().splitlines()][-1] == ["step", "3"]
    assert "left" not in stream.getvalue()


def test_from_the_second_step_on_the_line_says_how_long_the_rest_takes() -> None:
    stream = io.StringIO()
    times = iter([0.0, 100.0, 150.0, 200.0])
    progress = ConsoleProgress(stream, max_steps=3, clock=lambda: next(times))
    for step in range(3):
        progress.step(Record(step, 1.0, STEP.metrics))
    first, second, last = stream.getvalue().splitlines()
    assert second.endswith("  left 50 s")
    assert "left" not in first
    assert "left" not in last


def test_a_terminal_shows_the_newest_step_on_one_line() -> None:
    stream = Terminal()
    progress = build_progress(stream)
    progress.step(STEP)
    progress.step(Record(1, 1.0, {}))
    assert "step 1/3  reward  0.500" in stream.getvalue()
    assert "\n" not in stream.getvalue()
    progress.end_steps()
    progress.line("done")
    assert stream.getvalue().endswith("done\n")


@pytest.mark.parametrize(
    ("step_seconds", "num_lines"), [(0.1, 1 + 22), (61.0, 220)], ids=["quick", "slow"]
)
def test_a_long_run_in_a_file_has_a_line_for_every_tenth_step_and_one_a_minute(
    step_seconds: float, num_lines: int
) -> None:
    stream = io.StringIO()
    clock = ticking(step_seconds)
    progress = ConsoleProgress(stream, max_steps=220, clock=lambda: next(clock))
    for step in range(220):
        progress.step(Record(step, 1.0, STEP.metrics))
    assert len(stream.getvalue().splitlines()) == num_lines


def test_an_evaluated_version_is_a_line_of_its_own() -> None:
    stream = io.StringIO()
    progress = ConsoleProgress(stream, max_steps=3)
    found = {"eval/version": 2.0, "eval/words/avg@4": 0.5, "eval/words/pass@4": 0.75}
    progress.evaluation(Record(2, 1.0, {**found, "eval/avg@4": 0.5, "eval/seconds": 9.0}))
    expected = "evaluation of version 2  words/avg@4 0.500  words/pass@4 0.750\n"
    assert stream.getvalue() == expected


def test_an_evaluation_of_a_game_shows_the_reward_of_each_agent() -> None:
    stream = io.StringIO()
    agents = {f"eval/go/agent/{it}/reward/mean": 0.25 for it in ("black", "white")}
    parts = {"eval/go/agent/black/reward/chips/mean": 1.0, "eval/words/agent/x/reward/mean": 1.0}
    found = {"eval/version": 2.0, "eval/words/avg@4": 0.5, **agents, **parts}
    ConsoleProgress(stream, max_steps=3).evaluation(Record(2, 1.0, found))
    assert stream.getvalue() == (
        "evaluation of version 2  words/avg@4 0.500  go/agent/black/reward 0.250  "
        "go/agent/white/reward 0.250\n"
    )


@pytest.mark.parametrize("columns", [80, 100, 300])
def test_the_line_of_a_step_fits_into_the_terminal(columns: int) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    with os.fdopen(master, "rb", buffering=0) as screen, os.fdopen(slave, "w") as stream:
        progress = build_progress(stream)
        for step in range(2):
            progress.step(replace(STEP, step=step, metrics=FULL))
        progress.end_steps()
        stream.close()
        shown = b""
        with contextlib.suppress(OSError):  # The end of what was written.
            while part := screen.read(4096):
                shown += part
    lines = [line for line in re.split(r"[\r\n]+", shown.decode()) if "step " in line]
    assert len(lines) == 2
    assert max(map(len, lines)) <= columns
    for label in ("reward  0.500", "entropy 0.500", "truncated 50.0%"):
        assert label in lines[0]
    assert "left " in lines[1]
    assert ("stale 0" in lines[0]) is (columns == 300)


@contextlib.contextmanager
def full_pipe() -> Iterator[tuple[int, TextIO]]:
    """Its reading end, and a stream that would block whoever writes a line."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * 4095 + b"\n")
    with os.fdopen(writer, "w") as stream:
        yield reader, stream
    os.close(reader)


def test_lines_that_find_no_room_are_counted_and_the_writer_never_waits() -> None:
    """Else a launcher behind a pager that nobody reads would neither heal nor hear SIGTERM."""
    with full_pipe() as (reader, stream):
        with unblocked(stream) as output:
            for number in range(MAX_WAITING + 50):
                output.write(f"{number}\n")
            read = b""
            while f"\n{MAX_WAITING - 1}\n".encode() not in read:
                read += os.read(reader, 1 << 16)
            output.write("on\n")
        read += os.read(reader, 1 << 16)
    assert re.search(
        r"(999|1000)\n\((49|50) lines were not shown: nobody read them\)\non\n$", read.decode()
    )


def test_at_the_end_a_pipe_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradus.launch.console.FLUSH_SECONDS", 0.05)
    with full_pipe() as (reader, stream):
        with unblocked(stream) as output:
            output.write("lost\n")
        os.read(reader, 4096)
        for thread in threading.enumerate():
            if thread.name == "console":
                thread.join()


def test_a_reader_that_has_gone_is_no_end_of_the_run() -> None:
    with full_pipe() as (reader, stream), unblocked(stream) as output:
        os.dup2(os.open(os.devnull, os.O_RDONLY), reader)
        output.write("lost\n" * 5)


@pytest.mark.parametrize(("every", "shown"), [(1, [1, 2, 3, 4, 5]), (2, [1, 2, 4, 5]), (9, [1, 5])])
def test_one_of_so_many_steps_has_a_line_and_so_have_the_first_and_the_last(
    every: int, shown: list[int], tmp_path: Path
) -> None:
    lease = RunLease.take(RunDirectory(tmp_path))
    stream = io.StringIO()
    view = Steps("rl", 5, RL_COLUMNS, log_every=every).view(stream, lease)
    lines = [
        json.dumps({"step": step, "time": 1.0, "episode/reward/mean": 0.5}) for step in range(5)
    ]
    RunDirectory(tmp_path).metrics.write_text("".join(f"{line}\n" for line in lines))
    view.show()
    lease.release()
    assert [int(number) for number in re.findall(r"step (\d)/5", stream.getvalue())] == shown
