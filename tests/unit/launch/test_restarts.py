"""What follows a failure of a process: another attempt of the launch, or its end."""

from __future__ import annotations

import signal
from dataclasses import dataclass

import pytest

from gradus.config import LaunchConfig
from gradus.errors import CorruptStateError, ExitCode, FencedError, GradusError
from gradus.launch.restarts import Restarts, RestartsUsedUp
from gradus.processes.started import SIGNALS_FROM_OUTSIDE, Fault, ProcessFailed, class_of_exit


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def failed(code: int, cause: str = "", process: str = "trainer") -> ProcessFailed:
    """What the supervisor raises for an exit code; a negative one is a signal."""
    error = ProcessFailed(f"{process} ended with {code}: {cause}")
    error.exit_code = class_of_exit(code)
    error.fault = Fault(process, "exit" if code >= 0 else "signal", abs(code), cause)
    return error


def restarts_of(number: int = 5, clock: Clock | None = None) -> Restarts:
    return Restarts(LaunchConfig(restarts=number), clock=clock or Clock())


def wait_after(
    restarts: Restarts, error: GradusError, *, step: int = 7, was_ready: bool = True
) -> float | None:
    return restarts.after(error, began_at=0, step=step, was_ready=was_ready).wait_seconds


EVERY_END = [*range(256), *range(-signal.NSIG + 1, 0)]


def test_every_end_after_a_step_is_a_fault_but_those_that_repeat() -> None:
    no_faults = [code for code in EVERY_END if wait_after(restarts_of(), failed(code)) is None]
    repeats = [ExitCode.CONFIG, ExitCode.UNFIT, ExitCode.UNWRITABLE, ExitCode.CORRUPT_STATE]
    assert no_faults == repeats


def test_before_the_first_step_only_what_came_from_outside_is_a_fault() -> None:
    faults = {code for code in EVERY_END if wait_after(restarts_of(), failed(code), step=0)}
    assert faults == {ExitCode.TRY_AGAIN, *(-number for number in SIGNALS_FROM_OUTSIDE)}


def test_nothing_restarts_before_all_were_ready_once() -> None:
    restarts = restarts_of()
    assert wait_after(restarts, failed(-9), was_ready=False) is None
    assert wait_after(restarts, failed(-9), step=3) == 1.0
    assert wait_after(restarts, failed(-9), step=3, was_ready=False) == 2.0


def test_a_kill_from_outside_while_a_resumed_run_starts_is_followed_by_another_start() -> None:
    """Nothing else is: with changed settings it may be unable to start."""
    for error, waits in ((failed(-9), 1.0), (failed(75), None), (failed(-11), None)):
        restarts = Restarts(LaunchConfig(), is_resumed=True)
        assert wait_after(restarts, error, step=3, was_ready=False) == waits


def test_no_restart_follows_what_the_launcher_itself_found() -> None:
    for error in (FencedError("taken over"), CorruptStateError("damaged"), GradusError("late")):
        assert wait_after(restarts_of(), error) is None


@pytest.mark.parametrize("is_allowed", [True, False])
def test_without_restarts_the_first_failure_is_the_end(is_allowed: bool) -> None:
    config = LaunchConfig(restarts=0 if is_allowed else 5)
    restarts = Restarts(config, is_allowed=is_allowed)
    assert wait_after(restarts, failed(-9)) is None


def test_the_same_failure_at_the_same_step_is_a_bug_whatever_its_numbers() -> None:
    restarts = restarts_of()
    assert wait_after(restarts, failed(70, "ValueError: no 3 at 0x7F1A")) == 1.0
    assert wait_after(restarts, failed(70, "ValueError: no 3 at 0x7F1A"), step=8) == 1.0
    decision = restarts.after(
        failed(70, "ValueError: no 4 at 0x8bb0"), began_at=5, step=7, was_ready=True
    )
    assert decision.wait_seconds is None
    assert "no restart would help" in decision.told


def test_two_kills_from_outside_at_the_same_step_are_two_faults() -> None:
    restarts = restarts_of()
    assert wait_after(restarts, failed(-9, "lost")) == 1.0
    assert wait_after(restarts, failed(-9, "lost")) == 2.0
    assert wait_after(restarts, failed(-11, "lost")) == 4.0
    assert wait_after(restarts, failed(-11, "lost")) is None


def test_what_says_that_something_else_ended_may_end_so_twice_at_the_same_step() -> None:
    """As a server does whose engine was killed."""
    for code in set(EVERY_END) - {ExitCode.UNWRITABLE}:
        restarts = restarts_of()
        by_itself = failed(code).exit_code is not ExitCode.TRY_AGAIN
        again = [wait_after(restarts, failed(code, "its engine (17) was killed")) for _ in range(2)]
        assert (again[1] is None) == by_itself, code


@pytest.mark.parametrize(
    "other",
    [failed(71, "lost"), failed(70, "found"), failed(-9, "lost"), failed(70, "lost", "inference")],
)
def test_another_failure_at_the_same_step_is_a_fault(other: ProcessFailed) -> None:
    restarts = restarts_of()
    wait_after(restarts, failed(70, "lost"))
    assert wait_after(restarts, other) == 2.0


@pytest.mark.shows("F13")
def test_the_wait_doubles_up_to_a_minute_until_a_step_is_finished() -> None:
    restarts = restarts_of(number=12)
    steps = (1, 1, 1, 1, 1, 1, 1, 1, 2, 3, 3)
    waits = [wait_after(restarts, failed(-9), step=step) for step in steps]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 1, 1, 2]


@pytest.mark.shows("F13")
def test_used_up_restarts_end_the_launch_with_the_causes_of_all() -> None:
    restarts = restarts_of(number=2)
    for step, cause in enumerate(("first", "second"), 1):
        wait_after(restarts, failed(-9, cause), step=step)
    restarts.begin()
    with pytest.raises(RestartsUsedUp) as caught:
        wait_after(restarts, failed(70, "third"), step=3)
    assert caught.value.exit_code is ExitCode.TRY_AGAIN
    assert [word in str(caught.value) for word in ("first", "second", "third")] == [True] * 3
    assert len(restarts.causes) == 1, "only one began"


def test_restarts_older_than_the_window_do_not_count() -> None:
    clock = Clock()
    restarts = restarts_of(number=1, clock=clock)
    assert wait_after(restarts, failed(-9), step=1) == 1.0
    clock.now += 3601.0
    assert wait_after(restarts, failed(-9), step=2) == 1.0
    clock.now += 3599.0
    with pytest.raises(RestartsUsedUp):
        wait_after(restarts, failed(-9), step=3)


@pytest.mark.shows("F13")
def test_restarts_that_come_no_further_are_used_up_however_slowly() -> None:
    clock = Clock()
    restarts = restarts_of(number=3, clock=clock)
    for step in (20, 31, 29, 28, 32, 30, 27):
        assert wait_after(restarts, failed(-9), step=step) == 1.0
        clock.now += 3601.0
    with pytest.raises(RestartsUsedUp, match="no further") as caught:
        wait_after(restarts, failed(-9), step=26)
    assert str(caught.value).count("ended with -9") == 4


@pytest.mark.shows("F09")
def test_each_replica_has_restarts_of_its_own_and_stays_out_when_they_are_used_up() -> None:
    clock = Clock()
    restarts = restarts_of(number=2, clock=clock)
    ends = [failed(-9, process="inference_1") for _ in range(3)]
    found = [restarts.after_replica(it, num_replicas=3) for it in ends]
    assert [it.wait_seconds for it in found if it] == [1.0, 2.0, None]
    assert found[2] is not None
    assert found[2].told == (
        "inference_1 stays out, because launch.restarts allows 2 in an hour; the run continues "
        "with 2 of 3 replicas"
    )
    assert restarts.left_out == {"inference_1"}
    another = restarts.after_replica(failed(-9, process="inference_2"), num_replicas=3)
    assert another is not None
    assert another.told == "restart 1 of 2 in 1 s, of inference_2 alone"
    # They count for nothing else.
    assert wait_after(restarts, failed(-9)) == 1.0
    assert [cause.split()[0] for cause in restarts.causes] == ["inference_1"] * 3 + ["inference_2"]


def test_a_replica_s_restarts_come_back_with_time() -> None:
    clock = Clock()
    restarts = restarts_of(number=1, clock=clock)
    for _ in range(3):
        found = restarts.after_replica(failed(1, process="inference_0"), num_replicas=2)
        assert found is not None
        assert found.wait_seconds == 1.0
        clock.now += 3601


@pytest.mark.parametrize("code", [ExitCode.CONFIG, ExitCode.CORRUPT_STATE])
def test_a_replica_that_would_end_so_again_stays_out_at_once(code: ExitCode) -> None:
    found = restarts_of().after_replica(failed(code, process="inference_0"), num_replicas=2)
    assert found is not None
    assert (found.wait_seconds, "it would end so again" in found.told) == (None, True)


def test_without_restarts_a_replica_is_no_exception() -> None:
    restarts = restarts_of(number=0)
    assert restarts.after_replica(failed(1, process="inference_0"), num_replicas=2) is None
