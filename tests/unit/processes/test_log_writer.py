"""The process that writes logs: nothing said is lost, whatever ends or is full."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import wait_until

from gradus.log import LogSettings
from gradus.processes.log_tail import find_cause, last_lines, log_end
from gradus.processes.log_writer import LogWriter
from gradus.processes.started import ChildFailed, ProcessSpec
from gradus.processes.supervisor import Supervisor
from gradus.processes.table import is_alive, read_process

JSON = LogSettings(run="demo", format="json")
TEXT = LogSettings(run="demo")
LOGGING = (
    "import os, sys\n"
    "from gradus.log import configure_logging, get_logger, note_step\n"
    "configure_logging('role')\n"
    "log = get_logger('gradus.part')\n"
)
COUNT = "import os\nfor n in range(%d): os.write(2, b'line %%05d\\n' %% n)\n"
FORGED = "2026-11-22T01:02:03.004Z ERROR demo trainer gradus.x: all is lost"


@pytest.fixture
def writers() -> Iterator[list[LogWriter]]:
    made: list[LogWriter] = []
    yield made
    for writer in made:
        writer.close()


def said(
    tmp_path: Path, writers: list[LogWriter], program: str, settings: LogSettings = JSON
) -> list[str]:
    """The lines of the log of a program that has ended."""
    writers.append(logs := LogWriter(settings))
    assert start(logs, tmp_path / "role.log", program).wait() == 0
    logs.sync()
    return lines_of(tmp_path)


def start(
    logs: LogWriter, log: Path, program: str, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    with open(logs.open(log, "role"), "wb") as output:
        return subprocess.Popen(
            (sys.executable, "-c", program),
            env={**os.environ, **logs.variables()},
            stdin=stdin,
            stdout=output,
            stderr=output,
        )


def lines_of(tmp_path: Path) -> list[str]:
    """Of the log and its full files, in the order in which they were said."""
    files = sorted(tmp_path.glob("role.log.*"), key=lambda file: -int(file.suffix[1:]))
    texts = [file.read_text() for file in (*files, tmp_path / "role.log")]
    return "".join(texts).splitlines()


def records(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]


def test_a_record_names_time_run_process_and_step(tmp_path: Path, writers: list[LogWriter]) -> None:
    (record,) = records(said(tmp_path, writers, LOGGING + "note_step(7)\nlog.info('a %s', 'b')"))
    assert record.pop("time").endswith("Z")
    assert isinstance(record.pop("pid"), int)
    assert record == {
        **{"level": "INFO", "run": "demo", "process": "role", "step": 7},
        **{"logger": "gradus.part", "message": "a b"},
    }


def test_what_no_logger_wrote_becomes_records_too(tmp_path: Path, writers: list[LogWriter]) -> None:
    program = LOGGING + "os.write(1, b'caf\\xc3\\xa9 \\xff\\x1b[2J\\r\\n\\n0%\\r9%')\nlog.info('a')"
    found = records(said(tmp_path, writers, program))
    assert [(record["level"], record["message"]) for record in found] == [
        *(("OUTPUT", "café \\xff\x1b[2J"), ("OUTPUT", "0%"), ("OUTPUT", "9%"), ("INFO", "a"))
    ]
    assert "\x1b" not in (tmp_path / "role.log").read_text()


def test_text_that_looks_like_a_record_is_told_from_one(
    tmp_path: Path, writers: list[LogWriter]
) -> None:
    program = f"{LOGGING}print({FORGED!r}, flush=True)\nlog.info('reply: a\\n' + {FORGED!r})"
    lines = said(tmp_path, writers, program, TEXT)
    assert lines[0].endswith(f"Z OUTPUT demo role: {FORGED}")
    assert lines[1].endswith("Z INFO demo role gradus.part: reply: a")
    assert lines[2] == f"  | {FORGED}"
    assert len(lines) == 3


def test_an_exception_is_one_record(tmp_path: Path, writers: list[LogWriter]) -> None:
    program = LOGGING + "try: 1 / 0\nexcept ZeroDivisionError: log.exception('bad')"
    (record,) = records(said(tmp_path, writers, program))
    assert record["message"] == "bad"
    assert record["exception"].endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    "made_up",
    ["[1]", "null", "{}", "[" * 100_000, '{"time": "t", "level": 2, "process": 3, "message": 4}'],
    ids=["list", "null", "empty", "deep", "numbers"],
)
def test_a_record_that_is_made_up_stops_no_writer(
    tmp_path: Path, writers: list[LogWriter], made_up: str
) -> None:
    program = (
        f"{LOGGING}from gradus.log import LogSettings\n"
        f"os.write(2, (LogSettings.current().mark + {made_up!r} + '\\n').encode())\n"
        "log.info('after')"
    )
    assert said(tmp_path, writers, program, TEXT)[-1].endswith("gradus.part: after")


def test_a_huge_message_keeps_its_ends(tmp_path: Path, writers: list[LogWriter]) -> None:
    program = LOGGING + "log.info('begin' + 'x' * 9_000_000 + 'end')"
    (record,) = records(said(tmp_path, writers, program))
    assert record["message"].startswith("beginxxx")
    assert record["message"].endswith("xxxend")
    assert len(record["message"]) < 40_000


def test_a_line_without_an_end_is_cut_and_not_lost(
    tmp_path: Path, writers: list[LogWriter]
) -> None:
    found = records(said(tmp_path, writers, "print('x' * 3_000_000, end='')"))
    assert sum(len(record["message"]) for record in found) == 3_000_000
    assert max(len(record["message"]) for record in found) <= 65_536


def test_the_level_holds_in_the_process(tmp_path: Path, writers: list[LogWriter]) -> None:
    program = LOGGING + "log.debug('a'); log.warning('b')"
    lines = said(tmp_path, writers, program, replace(JSON, level="debug"))
    assert [record["message"] for record in records(lines)] == ["a", "b"]


def test_a_rotation_loses_no_line(tmp_path: Path, writers: list[LogWriter]) -> None:
    settings = replace(TEXT, max_bytes=20_000, keep=99)
    lines = said(tmp_path, writers, COUNT % 5_000, settings)
    assert [line.rpartition(" ")[2] for line in lines] == [f"{n:05d}" for n in range(5_000)]
    sizes = [file.stat().st_size for file in tmp_path.glob("role.log*")]
    assert len(sizes) > 10
    assert max(sizes) <= 20_000


def test_a_talkative_process_fills_no_disk(tmp_path: Path, writers: list[LogWriter]) -> None:
    said(tmp_path, writers, COUNT % 5_000, replace(TEXT, max_bytes=20_000, keep=2))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        *("role.log", "role.log.1", "role.log.2")
    ]
    assert lines_of(tmp_path)[-1].endswith("line 04999")


def test_a_log_is_appended_to_and_counts_what_it_holds(
    tmp_path: Path, writers: list[LogWriter]
) -> None:
    (tmp_path / "role.log").write_text("x" * 900 + "\n")
    said(tmp_path, writers, COUNT % 3, replace(TEXT, max_bytes=1_000))
    assert (tmp_path / "role.log.1").read_text().startswith("xxx")
    assert len((tmp_path / "role.log").read_text().splitlines()) in {1, 2}


def test_a_full_disk_stops_nobody(tmp_path: Path, writers: list[LogWriter]) -> None:
    (tmp_path / "role.log").symlink_to("/dev/full")
    writers.append(logs := LogWriter(TEXT))
    child = start(logs, tmp_path / "role.log", "for _ in range(3_000): print('x' * 1_000)")
    assert child.wait(20) == 0


def test_a_writer_that_is_killed_is_replaced_and_nothing_is_lost(
    tmp_path: Path, writers: list[LogWriter]
) -> None:
    writers.append(logs := LogWriter(TEXT))
    program = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
    child = start(logs, tmp_path / "role.log", program, subprocess.PIPE)
    assert child.stdin is not None
    with child.stdin as words:
        words.write(b"before\n")
        words.flush()
        wait_until(lambda: "before" in (tmp_path / "role.log").read_text())
        killed = logs.pid
        os.kill(killed, signal.SIGKILL)
        words.write(b"meanwhile\n")
    assert child.wait() == 0
    wait_until(lambda: logs.look() or logs.pid != killed)
    logs.sync()
    assert [line.rpartition(" ")[2] for line in lines_of(tmp_path)] == ["before", "meanwhile"]


LAUNCHER = """
import pathlib, sys
from gradus.log import LogSettings
from gradus.processes.log_writer import LogWriter
from gradus.processes.started import ProcessSpec
from gradus.processes.supervisor import Supervisor
folder = pathlib.Path(sys.argv[1])
logs = LogWriter(LogSettings(run="demo"))
supervisor = Supervisor(folder / "pids.json", stop_timeout_seconds=5, logs=logs)
words = "import sys; sys.stdin = open(sys.argv[1]); sys.stdin.read(); print('last words')"
argv = (sys.executable, "-c", words, str(folder / "fifo"))
child = supervisor.start(ProcessSpec("role", argv, {}, folder / "role.log"))
print(logs.pid, child.pid, flush=True)
sys.stdin.read()
"""


def test_last_words_are_filed_after_the_launcher_was_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    command = (sys.executable, "-c", LAUNCHER, str(tmp_path))
    launcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    assert launcher.stdin is not None
    with launcher.stdin, launcher.stdout:
        pids = [int(word) for word in launcher.stdout.readline().split()]
        known = [(pid, entry.start_time) for pid in pids if (entry := read_process(pid))]
        launcher.kill()
        launcher.wait()
    (tmp_path / "fifo").write_text("")
    wait_until(lambda: not any(is_alive(*one) for one in known), what="the end of both")
    assert lines_of(tmp_path)[0].endswith("OUTPUT demo role: last words")


def failure(tmp_path: Path, program: str, settings: LogSettings) -> ChildFailed:
    logs = LogWriter(settings)
    with Supervisor(tmp_path / "pids.json", stop_timeout_seconds=5, logs=logs) as supervisor:
        argv = (sys.executable, "-c", program)
        child = supervisor.start(ProcessSpec("role", argv, dict(os.environ), tmp_path / "role.log"))
        wait_until(lambda: child.exit_code() is not None)
        with pytest.raises(ChildFailed) as caught:
            supervisor.check()
    return caught.value


@pytest.mark.parametrize("settings", [TEXT, JSON], ids=["text", "json"])
def test_the_cause_of_an_end_is_found_behind_a_rotation(
    tmp_path: Path, settings: LogSettings
) -> None:
    (tmp_path / "role.log").write_text("gradus role: another launch failed\n")
    program = (
        f"{LOGGING}print('gradus role: the disk is full', flush=True)\n"
        "for n in range(60): log.info('step %d', n)\n"
        "sys.exit(75)"
    )
    error = failure(tmp_path, program, replace(settings, max_bytes=1_000, keep=20))
    assert ": the disk is full (log: " in str(error)
    assert error.log_tail[-1] == "INFO gradus.part: step 59"
    assert len(error.log_tail) == 12
    assert (tmp_path / "role.log.2").exists()


def test_the_beginning_of_a_launch_is_found_in_a_renamed_file(tmp_path: Path) -> None:
    log = tmp_path / "role.log"
    log.write_text("gradus role: an earlier launch failed\n")
    since = log_end(log)
    with log.open("a") as file:
        file.write("mine\n")
    log.rename(tmp_path / "role.log.1")
    log.write_text("mine too\n")
    assert last_lines(log, since=since) == ["mine", "mine too"]
    assert find_cause(log, since=since) == "mine too"


def test_a_supervisor_leaves_no_writer_behind(tmp_path: Path) -> None:
    logs = LogWriter(TEXT)
    writer = read_process(logs.pid)
    assert writer is not None
    with Supervisor(tmp_path / "pids.json", stop_timeout_seconds=5, logs=logs) as supervisor:
        argv = (sys.executable, "-c", "import signal; signal.pause()")
        supervisor.start(ProcessSpec("role", argv, {}, tmp_path / "role.log"))
        assert logs.pid not in {entry.pid for entry in supervisor.owned()}
    assert not is_alive(writer.pid, writer.start_time)
