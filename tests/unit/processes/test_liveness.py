"""A person hears within a minute which process of a run is silent, the launcher which one hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
from commands import wait_until

from gradus.heartbeat import Heartbeat, Sign, beat, busy, strand
from gradus.processes.liveness import Hang, SilenceWatch, Watched, beat_with_loop
from gradus.processes.table import (
    ProcessEntry,
    descendants,
    living_processes,
    stopped_processes,
)


class Clock:
    """Moves only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def _of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests beside this one stop lies in the same session."""

    def ours() -> list[ProcessEntry]:
        stopped = stopped_processes()
        below = descendants(os.getpid(), living_processes()) if stopped else []
        return [entry for entry in stopped if entry.pid in {it.pid for it in below}]

    monkeypatch.setattr("gradus.processes.liveness.stopped_processes", ours)


@pytest.fixture
def watch(tmp_path: Path, clock: Clock) -> SilenceWatch:
    return SilenceWatch(tmp_path, hang_seconds=300.0, clock=clock)


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


@dataclass
class Seen:
    """What looks saw, in order."""

    lines: list[str] = field(default_factory=list)
    hangs: list[Hang] = field(default_factory=list)


def look_for(watch: SilenceWatch, clock: Clock, seconds: float, *watched: Watched) -> Seen:
    """Looks over `seconds`, one every four seconds, until one sees a hang."""
    seen = Seen()
    for _ in range(int(seconds / 4)):
        clock.now += 4.0
        looked = watch.look(watched)
        seen.lines += looked.lines
        seen.hangs += looked.hangs
        if looked.hangs:
            break
    return seen


OWN = os.getsid(0)
"""Stands for the pid of a child: its signs come from its session, as those of this process do."""


def write_sign(folder: Path, name: str, number: int, **more: Any) -> Watched:
    """One sign of life of a child, or of a strand beside its first."""
    path = folder / f"{name}.json"
    if "." in name:
        path = folder / "strands" / path.name
        path.parent.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.encode(Sign(**{"pid": os.getpid(), "number": number, **more})))
    return Watched(name.partition(".")[0], OWN, is_vital=True)


def test_a_stopped_process_is_named_within_a_minute_and_then_hangs(
    watch: SilenceWatch, clock: Clock, stopped: subprocess.Popen[bytes]
) -> None:
    trainer = Watched("trainer", stopped.pid, is_vital=True)
    (line,) = look_for(watch, clock, 48.0, trainer).lines
    who = f"trainer (pid {stopped.pid}) is stopped by a signal for"
    lets = f"`kill -CONT {stopped.pid}` lets it continue"
    assert line == f"{who} 20 s; {lets}; it will be ended after 300 s"
    (hang,) = look_for(watch, clock, 300.0, trainer).hangs
    assert hang == Hang(
        trainer, f"{who} 300 s; launch.hang_seconds is the limit", "is stopped by a signal"
    )


def test_a_stopped_worker_of_an_environment_is_named_and_left_to_it(
    watch: SilenceWatch, clock: Clock, stopped: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    watched = Watched("env_words", os.getpid(), is_vital=False)
    found = {entry.pid: replace(entry, session=os.getpid()) for entry in stopped_processes()}
    worker = [found[stopped.pid]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradus.processes.liveness.stopped_processes", lambda: worker)
        seen = look_for(watch, clock, 560.0, watched)
    assert seen.hangs == []
    assert seen.lines[0].startswith(f"a worker process of environment 'words' (pid {stopped.pid})")
    assert len(seen.lines) == 4


def test_a_process_that_goes_on_is_told_once(
    watch: SilenceWatch, clock: Clock, stopped: subprocess.Popen[bytes]
) -> None:
    trainer = Watched("trainer", stopped.pid, is_vital=True)
    look_for(watch, clock, 30.0, trainer)
    os.kill(stopped.pid, signal.SIGCONT)
    wait_until(lambda: stopped.pid not in [entry.pid for entry in stopped_processes()])
    (line,) = look_for(watch, clock, 60.0, trainer).lines
    assert line.startswith(f"trainer (pid {stopped.pid}) responds again after ")


def test_a_launcher_that_was_stopped_itself_blames_nobody(
    watch: SilenceWatch, clock: Clock, stopped: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    trainer = Watched("trainer", stopped.pid, is_vital=True)
    orchestrator = write_sign(tmp_path, "orchestrator", 3)
    assert look_for(watch, clock, 8.0, trainer, orchestrator) == Seen()
    clock.now += 3600.0
    looked = watch.look([trainer, orchestrator])
    assert (looked.lines, looked.hangs) == ([], [])
    seen = look_for(watch, clock, 12.0, trainer)
    assert "is stopped by a signal for 22 s" in seen.lines[0]


@pytest.mark.shows("F02", "I8")
def test_work_that_stands_still_is_told_with_what_it_did_last_and_then_hangs(
    watch: SilenceWatch, clock: Clock, tmp_path: Path
) -> None:
    trainer = write_sign(tmp_path, "trainer", 3, last="the beginning")
    assert look_for(watch, clock, 8.0, trainer) == Seen()
    write_sign(tmp_path, "trainer", 4, last="micro batch 3", step=7)
    (line,) = look_for(watch, clock, 48.0, trainer).lines
    last = "last: micro batch 3 of step 7"
    assert line == f"trainer: no sign of life for 20 s, {last}; it will be ended after 300 s"
    (hang,) = look_for(watch, clock, 300.0, trainer).hangs
    assert hang.text.startswith(f"trainer: no sign of life for 300 s, {last}; launch.hang_seconds")
    assert hang.cause == f"no sign of life, {last}"


def test_work_that_announced_itself_has_its_own_limit_and_is_named_at_half_of_it(
    watch: SilenceWatch, clock: Clock, tmp_path: Path
) -> None:
    trainer = write_sign(tmp_path, "trainer.checkpoint", 3, last="checkpoint 40", seconds=1000.0)
    assert look_for(watch, clock, 480.0, trainer) == Seen()
    (line,) = look_for(watch, clock, 60.0, trainer).lines
    assert line.startswith("trainer (checkpoint): no sign of life for 504 s, last: checkpoint 40")
    (hang,) = look_for(watch, clock, 1000.0, trainer).hangs
    assert "no sign of life for 1000 s" in hang.text
    assert "1000 s is its limit, or launch.hang_seconds if longer" in hang.text


def test_a_strand_with_nothing_to_do_is_not_silent(
    watch: SilenceWatch, clock: Clock, tmp_path: Path
) -> None:
    trainer = write_sign(tmp_path, "trainer.publish", 3, seconds=None)
    assert look_for(watch, clock, 900.0, trainer) == Seen()


def test_a_process_that_starts_has_another_deadline(
    watch: SilenceWatch, clock: Clock, tmp_path: Path
) -> None:
    ready = tmp_path / "ready.json"
    trainer = replace(write_sign(tmp_path, "trainer.rank_1", 3), ready_file=ready)
    assert look_for(watch, clock, 900.0, trainer) == Seen()
    ready.touch()
    (line,) = look_for(watch, clock, 48.0, trainer).lines
    assert line.startswith("trainer (rank 1): no sign of life for 20 s")


def test_the_longest_silence_is_blamed_for_those_who_wait(
    watch: SilenceWatch, clock: Clock, tmp_path: Path
) -> None:
    inference = write_sign(tmp_path, "inference", 1)
    look_for(watch, clock, 8.0, inference)
    trainer = write_sign(tmp_path, "trainer", 1)
    for number in range(2, 6):
        write_sign(tmp_path, "trainer", number)
        look_for(watch, clock, 4.0, trainer, inference)
    hangs = look_for(watch, clock, 320.0, trainer, inference).hangs
    assert [hang.watched.name for hang in hangs] == ["inference"]


def test_the_work_of_a_stopped_process_is_not_silent_beside_that(
    watch: SilenceWatch, clock: Clock, stopped: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    write_sign(tmp_path, "trainer", 3, pid=stopped.pid)
    trainer = Watched("trainer", stopped.pid, is_vital=True)
    (line,) = look_for(watch, clock, 48.0, trainer).lines
    assert "is stopped by a signal" in line
    os.kill(stopped.pid, signal.SIGCONT)
    wait_until(lambda: stopped.pid not in [entry.pid for entry in stopped_processes()])
    seen = look_for(watch, clock, 16.0, trainer)
    assert ["responds again" in line for line in seen.lines] == [True]


@pytest.mark.parametrize(("blocked", "limit"), [(0.0, 300.0), (200.0, 300.0), (900.0, 960.0)])
def test_a_plug_in_may_hold_its_process_for_as_long_as_it_was_given(
    blocked: float, limit: float, watch: SilenceWatch, clock: Clock, tmp_path: Path
) -> None:
    watched = replace(write_sign(tmp_path, "orchestrator", 1), blocked_seconds=blocked)
    look_for(watch, clock, 8.0, watched)
    seen = look_for(watch, clock, limit - 16.0, watched)
    assert seen.hangs == []
    assert f"will be ended after {limit:g} s" in seen.lines[0]
    assert look_for(watch, clock, 24.0, watched).hangs


def test_what_a_process_says_of_another_is_passed_on(
    watch: SilenceWatch, clock: Clock, tmp_path: Path
) -> None:
    said = {"worker 5 of environment 'words'": "has not answered"}
    seen = Seen()
    for number in range(120):
        watched = write_sign(tmp_path, "env_words", number, silent=said)
        now = look_for(watch, clock, 4.0, watched)
        seen.lines += now.lines
        seen.hangs += now.hangs
    assert seen.hangs == []
    assert seen.lines[0] == "worker 5 of environment 'words' has not answered for 20 s"


def test_what_is_usual_for_a_run_is_not_told_again(
    watch: SilenceWatch, clock: Clock, tmp_path: Path
) -> None:
    lines = []
    for number in range(0, 120, 4):
        waits = {"the run": "waits: refresh -> trainer"} if number % 40 < 32 else {}
        watched = write_sign(tmp_path, "orchestrator", number, silent=waits)
        lines += look_for(watch, clock, 4.0, watched).lines
    assert lines == [
        "the run waits: refresh -> trainer for 20 s",
        "the run responds again after 32 s",
    ]


def test_the_heartbeat_of_an_earlier_launch_says_nothing(
    watch: SilenceWatch, clock: Clock, tmp_path: Path
) -> None:
    earlier = write_sign(tmp_path, "orchestrator", 3)
    now = replace(earlier, pid=earlier.pid + 1)
    assert look_for(watch, clock, 400.0, now) == Seen()
    write_sign(tmp_path, "orchestrator", 3, pid=2**22 + 1)
    assert look_for(watch, clock, 400.0, earlier) == Seen()


@pytest.mark.shows("F02")
def test_a_rank_that_torchrun_gave_a_session_of_its_own_is_heard_and_found_stopped(
    watch: SilenceWatch, clock: Clock, stopped: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    write_sign(tmp_path, "trainer.rank_1", 3, pid=stopped.pid)
    torchrun = Watched("trainer", os.getpid(), is_vital=True)
    (hang,) = look_for(watch, clock, 400.0, torchrun).hangs
    assert "is stopped by a signal" in hang.text
    assert look_for(watch, clock, 4.0).lines == [], "what was ended does not respond again"
    os.kill(stopped.pid, signal.SIGCONT)
    wait_until(lambda: stopped.pid not in [entry.pid for entry in stopped_processes()])
    (hang,) = look_for(watch, clock, 400.0, torchrun).hangs
    assert hang.text.startswith("trainer (rank 1): no sign of life for 30")


@pytest.mark.parametrize("content", ["", "[]", "nonsense", '{"pid": 7, "number": "x"}'])
def test_a_damaged_heartbeat_is_no_error(
    watch: SilenceWatch, clock: Clock, tmp_path: Path, content: str
) -> None:
    (tmp_path / "env_words.json").write_text(content)
    assert look_for(watch, clock, 60.0, Watched("env_words", 7, is_vital=False)) == Seen()


def read(path: Path) -> Sign:
    return msgspec.json.decode(path.read_bytes(), type=Sign)


async def test_an_event_loop_beats_with_what_it_knows(tmp_path: Path) -> None:
    path = tmp_path / "alive" / "env_x.json"
    with Heartbeat(path).beating():
        beating = asyncio.create_task(beat_with_loop(lambda: {"a": "is silent"}))
        while not path.exists():
            await asyncio.sleep(0)
    assert read(path) == Sign(os.getpid(), 1, "its event loop", silent={"a": "is silent"})
    beating.cancel()


def test_announced_work_has_its_limit_until_it_is_over(tmp_path: Path) -> None:
    path = tmp_path / "trainer.json"
    with Heartbeat(path).beating():
        beat("a long name of some work", step=7)
        with busy("a save", seconds=60):
            beat("file 1")
            assert read(path) == Sign(os.getpid(), 3, "file 1", 7, 60.0)
        assert read(path) == Sign(os.getpid(), 4, "after a save", 7, 0.0)


@pytest.mark.shows("F02")
def test_another_thread_does_not_beat_for_the_one_that_hangs(tmp_path: Path) -> None:
    path = tmp_path / "trainer.json"
    with Heartbeat(path).beating():
        beat("a step")
        beside = strand("publish")
        context = copy_context()
        other = Thread(target=context.run, args=(beat, "a thread"))

        def publish() -> None:
            with beside.working("publishing", 60.0):
                beat("file 1")
                assert read(tmp_path / "strands" / "trainer.publish.json").last == "file 1"

        for thread in (other, Thread(target=publish)):
            thread.start()
            thread.join()
    assert read(path).last == "a step"
    assert read(tmp_path / "strands" / "trainer.publish.json").seconds is None


def test_a_disk_that_takes_nothing_ends_no_process(tmp_path: Path) -> None:
    (tmp_path / "alive").touch()
    with Heartbeat(tmp_path / "alive" / "trainer.json").beating():
        beat("a step")
