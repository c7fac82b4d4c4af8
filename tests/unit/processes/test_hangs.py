"""A role that hangs shows where each thread stood, and is killed with all that it started."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from commands import wait_until

from gradus.errors import ExitCode
from gradus.processes import supervisor as supervising
from gradus.processes.liveness import Hang, SilenceWatch, Watched
from gradus.processes.started import Child, ChildSilent, Fault, ProcessSpec
from gradus.processes.supervisor import Supervisor
from gradus.processes.table import living_processes

PROGRAM = Path(__file__).parents[2] / "support" / "hanging.py"
HANG_SECONDS = 300.0


@dataclass
class Launch:
    """A supervisor and its watch, on a clock that moves as fast as the test likes."""

    folder: Path
    supervisor: Supervisor
    now: float = 0.0
    lines: list[str] = field(default_factory=list)

    def start(self, how: str, *, restarts: int = 0) -> Child:
        alive = self.folder / "alive"
        spec = ProcessSpec(
            "trainer",
            (sys.executable, str(PROGRAM), how, str(alive / "trainer.json")),
            {"PYTHONPATH": str(PROGRAM.parent)},
            self.folder / "trainer.log",
            restarts=restarts,
        )
        child = self.supervisor.start(spec)
        wait_until(lambda: (alive / "ready").exists())
        (alive / "ready").unlink()
        return child

    def look_until_one_hangs(self, child: Child) -> Hang:
        watch = SilenceWatch(
            self.folder / "alive", hang_seconds=HANG_SECONDS, clock=lambda: self.now
        )
        watched = Watched(child.spec.name, child.pid, is_vital=child.spec.restarts == 0)
        for _ in range(int(HANG_SECONDS)):
            self.now += 8.0
            looked = watch.look([watched])
            self.lines += looked.lines
            if looked.hangs:
                return looked.hangs[0]
        raise AssertionError(f"nothing hangs: {self.lines}")


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    monkeypatch.setattr(supervising, "_STACK_SECONDS", 0.5)
    monkeypatch.setattr(supervising, "RESTART_WAIT_SECONDS", 0.05)
    with Supervisor(tmp_path / "pids.json", stop_timeout_seconds=1.0) as supervisor:
        yield Launch(tmp_path, supervisor)


WAYS = {
    # How → what the line names, and what stands in the log.
    "stop": ("is stopped by a signal", ""),
    "hold_the_interpreter": ("last: micro batch 3 of step 7", "in hold_the_interpreter"),
    "spin": ("last: micro batch 3 of step 7", "in spin"),
    "sleep_beside_a_living_thread": ("last: micro batch 3 of step 7", "in live_on"),
    "block_the_loop": ("last: its event loop of step 7", "in serve"),
}


@pytest.mark.shows("F02", "I8")
@pytest.mark.parametrize("how", WAYS)
def test_a_role_that_hangs_is_named_shown_and_killed_with_its_session(
    launch: Launch, how: str
) -> None:
    last, stack = WAYS[how]
    child = launch.start(how)
    hang = launch.look_until_one_hangs(child)
    assert last in hang.text
    assert last in launch.lines[0]
    assert len([it for it in living_processes() if it.session == child.pid]) == 2
    launch.supervisor.end_hung(hang)
    wait_until(lambda: not [it for it in living_processes() if it.session == child.pid])
    with pytest.raises(ChildSilent) as caught:
        launch.supervisor.check()
    assert caught.value.exit_code is ExitCode.TRY_AGAIN
    assert caught.value.fault == Fault("trainer", "silence", cause=hang.cause)
    assert stack in child.spec.log.read_text()
    assert ("stacks of its threads" in str(caught.value)) is bool(stack)


def test_one_that_may_be_restarted_is(launch: Launch) -> None:
    child = launch.start("spin", restarts=1)
    launch.supervisor.end_hung(launch.look_until_one_hangs(child))
    launch.supervisor.check()
    wait_until(lambda: launch.supervisor.check() or bool(launch.supervisor.children))
    assert launch.supervisor.children[0].pid != child.pid


def test_who_waits_for_one_that_hung_is_not_blamed(launch: Launch) -> None:
    spec = ProcessSpec("inference", ("false",), {}, launch.folder / "inference.log")
    waits = launch.supervisor.start(spec)
    child = launch.start("spin")
    hang = launch.look_until_one_hangs(child)
    wait_until(lambda: waits.exit_code() is not None)
    launch.supervisor.end_hung(hang)
    with pytest.raises(ChildSilent):
        launch.supervisor.check()


def test_one_that_ended_meanwhile_keeps_its_own_reason(launch: Launch) -> None:
    child = launch.supervisor.start(
        ProcessSpec("trainer", ("true",), {}, launch.folder / "trainer.log")
    )
    wait_until(lambda: child.exit_code() is not None)
    launch.supervisor.end_hung(Hang(Watched("trainer", child.pid, True), "trainer: silent", ""))
    with pytest.raises(Exception, match="exit code 0"):
        launch.supervisor.check()
