"""A person hears within a minute which process of a run is silent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import wait_until

from gradus.errors import ExitCode
from gradus.processes.liveness import SilenceWatch, Watched, beat
from gradus.processes.started import ChildSilent, Fault
from gradus.processes.table import stopped_processes


class Clock:
    """Moves only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(tmp_path: Path, clock: Clock) -> SilenceWatch:
    return SilenceWatch(tmp_path, limit_seconds=300.0, clock=clock)


@pytest.fixture
def stopped() -> Iterator[subprocess.Popen[bytes]]:
    """A real process that is stopped, in a session of its own as every child of a launch."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: process.pid in [entry.pid for entry in stopped_processes()])
        yield process
    finally:
        process.kill()
        process.wait()


def look_for(watch: SilenceWatch, clock: Clock, seconds: float, *watched: Watched) -> list[str]:
    """All lines of looks over `seconds`, one every four seconds."""
    lines = []
    for _ in range(int(seconds / 4)):
        clock.now += 4.0
        lines += watch.look(watched)
    return lines


def write_beat(folder: Path, name: str, number: int, **silent: str) -> Watched:
    content = {"number": number, "pid": 7, "silent": silent}
    (folder / f"{name}.json").write_text(json.dumps(content))
    return Watched(name, 7, is_vital=name == "orchestrator")


def test_a_stopped_process_is_named_within_a_minute_and_then_ends_the_run(
    watch: SilenceWatch, clock: Clock, stopped: subprocess.Popen[bytes]
) -> None:
    trainer = Watched("trainer", stopped.pid, is_vital=True)
    (line,) = look_for(watch, clock, 48.0, trainer)
    assert line.startswith(f"trainer (pid {stopped.pid}) is stopped by a signal for 20 s")
    assert f"kill -CONT {stopped.pid}" in line
    with pytest.raises(ChildSilent, match=rf"trainer \(pid {stopped.pid}\) is stopped by a signal"):
        look_for(watch, clock, 300.0, trainer)


def test_a_stopped_environment_is_named_and_left_to_the_orchestrator(
    watch: SilenceWatch, clock: Clock, stopped: subprocess.Popen[bytes]
) -> None:
    lines = look_for(watch, clock, 560.0, Watched("env_words", stopped.pid, is_vital=False))
    assert lines[0].startswith(f"environment 'words' (pid {stopped.pid}) is stopped by a signal")
    assert len(lines) == 4


def test_a_process_that_goes_on_is_told_once(
    watch: SilenceWatch, clock: Clock, stopped: subprocess.Popen[bytes]
) -> None:
    trainer = Watched("trainer", stopped.pid, is_vital=True)
    look_for(watch, clock, 30.0, trainer)
    os.kill(stopped.pid, signal.SIGCONT)
    wait_until(lambda: stopped.pid not in [entry.pid for entry in stopped_processes()])
    (line,) = look_for(watch, clock, 60.0, trainer)
    assert line.startswith(f"trainer (pid {stopped.pid}) responds again after ")


def test_a_launcher_that_was_stopped_itself_blames_nobody(
    watch: SilenceWatch, clock: Clock, stopped: subprocess.Popen[bytes]
) -> None:
    clock.now += 3600.0
    assert watch.look([Watched("trainer", stopped.pid, is_vital=True)]) == []


def test_time_in_which_the_launcher_was_stopped_is_no_silence_of_others(
    watch: SilenceWatch, clock: Clock, stopped: subprocess.Popen[bytes]
) -> None:
    trainer = Watched("trainer", stopped.pid, is_vital=True)
    assert look_for(watch, clock, 8.0, trainer) == []
    clock.now += 3600.0
    assert watch.look([trainer]) == []
    (line,) = look_for(watch, clock, 12.0, trainer)
    assert "is stopped by a signal for 22 s" in line


def test_an_event_loop_that_stands_still_is_told_and_ends_the_run(
    watch: SilenceWatch, clock: Clock, tmp_path: Path
) -> None:
    orchestrator = write_beat(tmp_path, "orchestrator", 3)
    assert look_for(watch, clock, 8.0, orchestrator) == []
    write_beat(tmp_path, "orchestrator", 4)
    (line,) = look_for(watch, clock, 60.0, orchestrator)
    assert line.startswith("orchestrator does nothing for 20 s")
    with pytest.raises(ChildSilent, match="orchestrator does nothing") as caught:
        look_for(watch, clock, 300.0, orchestrator)
    assert caught.value.fault == Fault("orchestrator", "silence")
    assert caught.value.exit_code is ExitCode.TRY_AGAIN


def test_what_a_process_says_of_another_is_passed_on(
    watch: SilenceWatch, clock: Clock, tmp_path: Path
) -> None:
    said = {"worker 5 of environment 'words'": "has not answered"}
    lines = []
    for number in range(15):
        watched = write_beat(tmp_path, "env_words", number, **said)
        lines += look_for(watch, clock, 4.0, watched)
    (line,) = lines
    assert line == "worker 5 of environment 'words' has not answered for 20 s"


def test_what_is_usual_for_a_run_is_not_told_again(
    watch: SilenceWatch, clock: Clock, tmp_path: Path
) -> None:
    lines = []
    for number in range(0, 120, 4):
        waits = {"the run": "waits: refresh -> trainer"} if number % 40 < 32 else {}
        watched = write_beat(tmp_path, "orchestrator", number, **waits)
        lines += look_for(watch, clock, 4.0, watched)
    assert lines == [
        "the run waits: refresh -> trainer for 20 s",
        "the run responds again after 32 s",
    ]


def test_the_heartbeat_of_an_earlier_launch_says_nothing(
    watch: SilenceWatch, clock: Clock, tmp_path: Path
) -> None:
    write_beat(tmp_path, "orchestrator", 3)
    assert look_for(watch, clock, 400.0, Watched("orchestrator", 8, is_vital=True)) == []


@pytest.mark.parametrize("content", ["", "[]", "nonsense", '{"pid": 7, "number": "x"}'])
def test_a_damaged_heartbeat_is_no_error(
    watch: SilenceWatch, clock: Clock, tmp_path: Path, content: str
) -> None:
    (tmp_path / "env_words.json").write_text(content)
    look_for(watch, clock, 60.0, Watched("env_words", 7, is_vital=False))


async def test_an_event_loop_beats_with_what_it_knows(tmp_path: Path) -> None:
    beating = asyncio.create_task(beat(tmp_path / "alive", "env_x", lambda: {"a": "is silent"}))
    while not (tmp_path / "alive" / "env_x.json").exists():
        await asyncio.sleep(0)
    content = json.loads((tmp_path / "alive" / "env_x.json").read_text())
    assert content == {"number": 0, "pid": os.getpid(), "silent": {"a": "is silent"}}
    beating.cancel()
