"""The thread that writes logs: nothing said is lost, whatever ends or is full."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import wait_until

from gradus.log import LogSettings
from gradus.processes import log_writer
from gradus.processes.log_tail import log_end
from gradus.processes.log_writer import MAX_LINE_BYTES, LogWriter
from gradus.processes.started import ChildFailed, ProcessSpec
from gradus.processes.supervisor import Supervisor
from gradus.processes.table import is_alive, read_process, signal_process
from gradus.redact import REMOVED

JSON = LogSettings(run="demo", format="json")
TEXT = LogSettings(run="demo")
LOGGING = (
    "import os, sys\n"
    "from gradus.log import configure_logging, get_logger, note_step\n"
    "configure_logging('role')\n"
    "log = get_logger('gradus.part')\n"
)
COUNT = "import os\nfor n in range(%d): os.write(2, b'line %%05d\\n' %% n)\n"
SECRET = 'of "the" house/é'
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
    descriptor, variables = logs.open(log, "role", {"SITE_API_KEY": SECRET})
    with open(descriptor, "wb") as output:
        return subprocess.Popen(
            (sys.executable, "-c", program),
            env={**os.environ, **variables},
            stdin=stdin,
            stdout=output,
            stderr=output,
        )


def say_at_once(logs: LogWriter, log: Path, line: str) -> None:
    program = f"import os; os.write(1, {line!r}.encode() + b'\\n')"
    assert start(logs, log, program).wait() == 0
    logs.sync()


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


@pytest.mark.shows("I9", "SEC12")
@pytest.mark.parametrize("settings", [JSON, TEXT])
@pytest.mark.parametrize(
    "secret",
    [
        *(SECRET, "hf_abcdefghijklmnopqrst", "Bearer abcdefgh1234"),
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_no_secret_stands_in_a_log_whoever_says_it(
    settings: LogSettings, secret: str, tmp_path: Path, writers: list[LogWriter]
) -> None:
    padding = "." * (MAX_LINE_BYTES - 5)
    program = (
        f"{LOGGING}secret = {secret!r}\n"
        "log.info('asked with %s, got 12 tokens', secret)\n"
        "try:\n    raise ValueError(secret)\nexcept ValueError:\n    log.exception('failed')\n"
        "import logging, json; logging.warning(json.dumps({'header': secret}))\n"
        f"os.write(1, ({padding!r} + secret + ' and so on\\n').encode())"
    )
    text = "\n".join(said(tmp_path, writers, program, settings))
    assert text.count("asked with (removed), got 12 tokens") == 1
    assert text.count(REMOVED) >= 3
    for part in re.findall(r"\w{5,}", secret):
        assert part[-8:] not in text
        assert json.dumps(part)[1:-1] not in text
    assert " and so on" in text.splitlines()[-1]


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


@pytest.mark.shows("SEC35")
def test_a_record_that_is_made_up_drives_no_terminal(
    tmp_path: Path, writers: list[LogWriter]
) -> None:
    program = (
        f"{LOGGING}from gradus.log import LogSettings\n"
        "os.write(2, LogSettings.current().mark.encode() + b'\\x1b[2J\\xff\\n')\n"
        "log.info('after')"
    )
    made_up, after = said(tmp_path, writers, program, TEXT)
    assert made_up == "\\x1b[2J\\xff"
    assert after.endswith("gradus.part: after")


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


@pytest.mark.shows("F24")
def test_a_full_disk_stops_nobody(tmp_path: Path, writers: list[LogWriter]) -> None:
    writers.append(logs := LogWriter(TEXT))
    child = start(logs, Path("/dev/full"), "for _ in range(3_000): print('x' * 1_000)")
    assert child.wait(60) == 0


def test_lines_that_found_no_room_are_counted_where_they_are_missing(small_disk: Path) -> None:
    log, filler = small_disk / "role.log", small_disk / "filler"
    log.write_text("x" * 4_000 + "\n")  # The page of memory that it has takes 95 bytes more.
    with contextlib.suppress(OSError):
        filler.write_bytes(bytes(8 << 20))
    logs = LogWriter(TEXT)
    for _ in range(2):
        say_at_once(logs, log, "y" * 200)
    filler.unlink()
    say_at_once(logs, log, "kept")
    logs.close()
    _, torn, note, kept = log.read_text().splitlines()
    assert torn.endswith("yyy")
    assert note.endswith("Z OUTPUT demo role: 2 lines could not be written here")
    assert kept.endswith("Z OUTPUT demo role: kept")


def test_a_record_that_comes_in_two_pieces_is_one(tmp_path: Path, writers: list[LogWriter]) -> None:
    settings = replace(TEXT, mark="\x1esecret ")
    begun, program = tmp_path / "begun", "import os, pathlib, sys\n"
    program += f"os.write(2, b'{settings.mark}one ')\npathlib.Path({str(begun)!r}).touch()\n"
    program += "sys.stdin.read()\nos.write(2, b'record\\n')"
    writers.append(logs := LogWriter(settings))
    read_end, write_end = os.pipe()
    child = start(logs, tmp_path / "role.log", program, stdin=read_end)
    wait_until(begun.exists)
    logs.sync()
    os.close(read_end)
    os.close(write_end)
    assert child.wait(60) == 0
    logs.sync()
    assert lines_of(tmp_path) == ["one record"]


def test_a_mistake_of_ours_costs_lines_and_not_those_that_follow(
    tmp_path: Path,
    writers: list[LogWriter],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_: float) -> str:
        monkeypatch.undo()
        raise ValueError("no such time")

    monkeypatch.setattr(log_writer, "stamp", fail)
    writers.append(logs := LogWriter(TEXT))
    for word in ("lost", "kept"):
        say_at_once(logs, tmp_path / "role.log", word)
    assert [line.rpartition(" ")[2] for line in lines_of(tmp_path)] == ["kept"]
    assert "some lines of the logs are lost" in caplog.text


def test_a_program_that_never_stops_talking_delays_nobody(
    tmp_path: Path, writers: list[LogWriter]
) -> None:
    writers.append(logs := LogWriter(TEXT))
    flood = start(logs, tmp_path / "flood.log", "while True: print(('x' * 200 + '\\n') * 999)")
    try:
        wait_until(lambda: log_end(tmp_path / "flood.log") > 1 << 20)
        assert start(logs, tmp_path / "role.log", "print('heard')").wait() == 0
        wait_until(lambda: "heard" in (tmp_path / "role.log").read_text())
    finally:
        flood.kill()
        flood.wait()


LAUNCHER = """
import pathlib, sys
from gradus.log import LogSettings
from gradus.processes.log_writer import MAX_LINE_BYTES, LogWriter
from gradus.processes.started import ProcessSpec
from gradus.processes.supervisor import Supervisor
folder = pathlib.Path(sys.argv[1])
supervisor = Supervisor(
    folder / "pids.json", stop_timeout_seconds=5, logs=LogWriter(LogSettings(run="demo"))
)
argv = (sys.executable, "-c", sys.argv[2], str(folder / "fifo"))
print(supervisor.start(ProcessSpec("role", argv, {}, folder / "role.log")).pid, flush=True)
sys.stdin.read()
"""
WATCHED = (
    "import os, signal, subprocess, sys, time\n"
    "from gradus.log import configure_logging, get_logger\n"
    "from gradus.processes.child import watch_death_pipe\n"
    "configure_logging('role')\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit('word ' * 40_000 + 'last words'))\n"
    "watch_death_pipe()\n"
)
PAUSE = "while True: signal.pause()"
WAIT_FOR_FIFO = "open(sys.argv[1]).read()\n"


@contextlib.contextmanager
def launched(tmp_path: Path, program: str) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher in another process; its child has ended at the end."""
    os.mkfifo(tmp_path / "fifo")
    command = (sys.executable, "-c", LAUNCHER, str(tmp_path), program)
    launcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    assert launcher.stdin is not None
    with launcher.stdin, launcher.stdout:
        child = read_process(int(launcher.stdout.readline()))
        assert child is not None
        try:
            yield launcher
            kill(launcher)
            lives = partial(is_alive, child.pid, child.start_time)
            wait_until(lambda: not lives(), what="the end of the child")
        finally:
            signal_process(child.pid, signal.SIGKILL)


def kill(launcher: subprocess.Popen[bytes]) -> None:
    launcher.kill()
    launcher.wait()


def test_last_words_are_filed_after_the_launcher_was_killed(tmp_path: Path) -> None:
    slow = "from gradus.processes import log_writer; log_writer._READ_BYTES = 32\n"
    program = f"{WATCHED}{slow}print('ready', flush=True)\n{PAUSE}"
    with launched(tmp_path, program) as launcher:
        wait_until(lambda: "ready" in (tmp_path / "role.log").read_text())
        kill(launcher)
    _, ending, *words = lines_of(tmp_path)
    assert "WARNING demo role gradus.processes.child: the process that started" in ending
    assert words[-1].endswith(" last words")
    assert sum(line.count("word") for line in words) > 39_990  # some are cut by a line's end


def test_a_process_leaves_its_output_to_a_launcher_that_is_only_stopped(tmp_path: Path) -> None:
    program = (
        "import os, sys, time; from pathlib import Path\n"
        f"from gradus.processes.log_writer import LogWriter\n{WAIT_FOR_FIFO}"
        "file = LogWriter.take_over()\nos.write(1, b'unheard\\n')\n"
        "for _ in range(20): file(), time.sleep(0.02)\n"
        "Path(sys.argv[1]).with_name('tried').touch()"
    )
    with launched(tmp_path, program) as launcher:
        launcher.send_signal(signal.SIGSTOP)
        (tmp_path / "fifo").write_text("")
        wait_until((tmp_path / "tried").exists)
        assert lines_of(tmp_path) == []
        launcher.send_signal(signal.SIGCONT)
        wait_until(lambda: [line.rpartition(" ")[2] for line in lines_of(tmp_path)] == ["unheard"])


def test_what_was_said_when_nobody_read_is_filed_first(tmp_path: Path) -> None:
    program = f"import sys\n{WAIT_FOR_FIFO}print('unheard', flush=True)\n{WATCHED}{PAUSE}"
    with launched(tmp_path, program) as launcher:
        kill(launcher)
        (tmp_path / "fifo").write_text("")
    assert lines_of(tmp_path)[0].endswith("OUTPUT demo role: unheard")


def test_a_program_outlives_the_reader_of_its_output(tmp_path: Path) -> None:
    """Not only ours: SIGPIPE, which Python ignores, would end it."""
    program = (
        "import signal, sys; from pathlib import Path\n"
        f"signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n{WAIT_FOR_FIFO}"
        "print('words', flush=True)\nPath(sys.argv[1]).with_name('alive').touch()"
    )
    with launched(tmp_path, program) as launcher:
        kill(launcher)
        (tmp_path / "fifo").write_text("")
    assert (tmp_path / "alive").exists()


@pytest.mark.slow
def test_one_of_several_processes_reads_and_another_when_that_is_killed(tmp_path: Path) -> None:
    """As for ranks below torchrun, which is none of our programs."""
    rank = f"{WATCHED}signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\n{PAUSE}"
    program = (
        "import signal, subprocess, sys\n"
        f"ranks = [subprocess.Popen([sys.executable, '-uc', {rank!r}]) for _ in range(2)]\n"
        f"{WAIT_FOR_FIFO}{COUNT % 20_000}{WAIT_FOR_FIFO}"
        "ranks[0].kill(); ranks[0].wait(); print('one is gone', flush=True)\n"
        "ranks[1].wait()"
    )
    with launched(tmp_path, program) as launcher:
        wait_until(lambda: (tmp_path / "role.log").read_text().count("ready") == 2)
        kill(launcher)
        wait_until(lambda: (tmp_path / "role.log").read_text().count("WARNING") == 2)
        (tmp_path / "fifo").write_text("")
        wait_until(lambda: "line 19999" in (tmp_path / "role.log").read_text())
        (tmp_path / "fifo").write_text("")
    counted = [line.rpartition(" ")[2] for line in lines_of(tmp_path) if "line" in line]
    assert counted == [f"{n:05d}" for n in range(20_000)]
    assert lines_of(tmp_path)[-1].endswith("one is gone")


def test_children_of_a_launcher_that_is_stopped_wait_and_lose_nothing(tmp_path: Path) -> None:
    program = f"import sys\n{WAIT_FOR_FIFO}print(('x' * 999 + '\\n') * 5_000, end='')"
    with launched(tmp_path, program) as launcher:
        launcher.send_signal(signal.SIGSTOP)
        (tmp_path / "fifo").write_text("")
        launcher.send_signal(signal.SIGCONT)
        wait_until(lambda: len(lines_of(tmp_path)) == 5_000)


def test_nobody_else_reads_while_the_launcher_lives(
    tmp_path: Path, writers: list[LogWriter]
) -> None:
    writers.append(logs := LogWriter(TEXT))
    output, _ = logs.open(tmp_path / "role.log", "role", {})
    with (
        open(output, "wb"),
        open(f"/proc/self/fd/{output}", "rb") as pipe,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(pipe, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
def test_the_cause_of_an_end_is_found_behind_an_earlier_launch(
    tmp_path: Path, settings: LogSettings
) -> None:
    (tmp_path / "role.log").write_text("gradus role: another launch failed\n")
    program = (
        f"{LOGGING}print('gradus role: the disk is full', flush=True)\n"
        "for n in range(60): log.info('step %d', n)\n"
        "sys.exit(75)"
    )
    error = failure(tmp_path, program, settings)
    assert ": the disk is full (log: " in str(error)
    assert error.log_tail[-1] == "INFO gradus.part: step 59"
    assert len(error.log_tail) == 12


def test_a_supervisor_leaves_no_thread_and_no_descriptor_behind(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    logs = LogWriter(TEXT)
    with Supervisor(tmp_path / "pids.json", stop_timeout_seconds=5, logs=logs) as supervisor:
        argv = (sys.executable, "-c", "print('a')")
        supervisor.start(ProcessSpec("role", argv, {}, tmp_path / "role.log"))
    assert "logs" not in {thread.name for thread in threading.enumerate()}
    assert len(os.listdir("/proc/self/fd")) == before
