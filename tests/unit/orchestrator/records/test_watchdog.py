"""A run that stands still says who waits for whom, and ends or continues as configured."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from scripted_peers import ScriptedEnvironment, ScriptedPolicy, ScriptedTrainer

from gradus.errors import ExitCode, StallError
from gradus.orchestrator.records.watchdog import (
    Wait,
    WaitBoard,
    WaitFor,
    Watchdog,
    chain_of,
    describe_chain,
    stack_of,
)

STALL_SECONDS = 0.1


class Clock:
    """Moves only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def waits(**targets: str) -> list[Wait]:
    return [Wait(loop, WaitFor(f"a {on}", on), 7.0) for loop, on in targets.items()]


def test_a_chain_goes_from_loop_to_loop_and_ends_outside() -> None:
    found = waits(refresh="trainer", schedule="refresh", collect="schedule", ship="collect")
    by_loop = {wait.loop: wait for wait in found}
    chain = chain_of(by_loop, "ship")
    assert [wait.loop for wait in chain] == ["ship", "collect", "schedule", "refresh"]
    assert describe_chain(found).endswith("refresh (for a trainer) -> trainer")


def test_loops_that_wait_for_each_other_are_a_circle() -> None:
    text = describe_chain(waits(ship="collect", collect="ship"))
    assert text.endswith("-> ship: they wait for each other")


def test_without_a_known_wait_the_stacks_are_named() -> None:
    assert "see the stacks" in describe_chain([])


def test_the_board_knows_what_is_waited_for_and_since_when() -> None:
    clock = Clock()
    board = WaitBoard(clock=clock)
    with board.waiting("ship", WaitFor("a full batch", on="collect")):
        clock.now = 5.0
        (wait,) = board.waits()
        assert wait.text == "ship waits 5 s for a full batch (collect)"
        assert board.quiet_seconds == 5.0
    assert board.waits() == []
    assert board.quiet_seconds == 0.0


def test_a_wait_that_is_no_progress_does_not_count_as_movement() -> None:
    clock = Clock()
    board = WaitBoard(clock=clock)
    with board.waiting("schedule", WaitFor("room", on="collect"), is_progress=False):
        clock.now = 5.0
    assert board.quiet_seconds == 5.0
    board.moved()
    assert board.quiet_seconds == 0.0


def test_a_target_that_depends_on_the_moment_is_asked_for_each_report() -> None:
    board = WaitBoard(clock=Clock())
    names = iter(["schedule", "environment 'words'"])
    with board.waiting("collect", lambda: WaitFor("an end", on=next(names))):
        assert [board.waits()[0].target.on for _ in range(2)] == [
            "schedule",
            "environment 'words'",
        ]


def build_dog(clock: Clock, slept: list[float]) -> tuple[WaitBoard, Watchdog]:
    """A watchdog whose sleep moves the clock, and gives up after five times."""
    board = WaitBoard(clock=clock)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds
        if len(slept) == 5:
            raise asyncio.CancelledError

    return board, Watchdog(board, 10.0, oldest=lambda: ["g0.0: 9 s"], sleep=sleep)


async def test_it_sleeps_until_the_earliest_moment_of_a_stall() -> None:
    clock, slept = Clock(), []  # type: ignore[var-annotated]
    board, dog = build_dog(clock, slept)
    clock.now = 4.0
    with pytest.raises(StallError, match="nothing moved for 10 s"):
        await dog.run()
    assert slept == [6.0]
    assert board.waits() == []


async def test_movement_puts_the_stall_off() -> None:
    clock, slept = Clock(), []  # type: ignore[var-annotated]
    board, dog = build_dog(clock, slept)
    sleep = dog.sleep

    async def sleep_and_move(seconds: float) -> None:
        await sleep(seconds)
        if len(slept) == 1:
            clock.now -= 3.0
            board.moved()
            clock.now += 3.0

    dog.sleep = sleep_and_move
    with pytest.raises(StallError):
        await dog.run()
    assert slept == [10.0, 7.0]


async def test_a_time_in_which_the_process_did_not_run_is_no_stall() -> None:
    """A frozen container, a laptop that slept: on waking up, nobody had time to move."""
    clock, slept = Clock(), []  # type: ignore[var-annotated]
    _, dog = build_dog(clock, slept)
    sleep = dog.sleep

    async def sleep_and_freeze(seconds: float) -> None:
        await sleep(seconds)
        clock.now += 4_000.0 if len(slept) == 1 else 0.0

    dog.sleep = sleep_and_freeze
    with pytest.raises(StallError, match="nothing moved for 10 s"):
        await dog.run()
    assert slept == [10.0]


async def test_a_stack_names_every_suspended_frame() -> None:
    async def inner() -> None:
        await asyncio.Event().wait()

    async def outer() -> None:
        await inner()

    task = asyncio.create_task(outer())
    await asyncio.sleep(0)
    names = [line.rpartition(" in ")[2] for line in stack_of(task)]
    assert names[:3] == ["outer", "inner", "wait"]
    task.cancel()
    await asyncio.wait([task])
    assert stack_of(task) == ["ended"]


async def forever(_: int) -> None:
    await asyncio.Event().wait()


class StuckTransport(ScriptedTrainer):
    """There is never room."""

    async def send(self, batch: Any) -> None:
        await forever(batch.step)


class StuckTasks(ScriptedEnvironment):
    """Never gives a task."""

    async def task(self, index: int) -> Any:
        await forever(index)


STUCK = {
    "trainer": (
        {"trainer": ScriptedTrainer(max_steps=3, wait=forever)},
        "ship (for a full batch) -> collect (for an episode to start) -> schedule (for a free "
        "slot) -> refresh (for the trainer's next word) -> trainer",
    ),
    "apply": (
        {"policy": ScriptedPolicy(wait=forever)},
        "refresh (for version 1 to be served) -> inference",
    ),
    "environment": (
        {"environment": ScriptedEnvironment(wait=forever)},
        "ship (for a full batch) -> collect (for an episode to end) -> environment 'words'",
    ),
    "tasks": (
        {"environment": StuckTasks()},
        "collect (for an episode to start) -> schedule (for task 30) -> environment 'words'",
    ),
    "transport": (
        {"trainer": StuckTransport(max_steps=3)},
        "ship (for room on the disk) -> disk",
    ),
}


@pytest.mark.parametrize("where", list(STUCK))
async def test_a_part_that_hangs_is_at_the_end_of_the_chain(
    build_rig: Any, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    parts, chain = STUCK[where]
    rig = build_rig(stall_seconds=STALL_SECONDS, **parts)
    rig.clock = time.monotonic
    with pytest.raises(StallError) as caught:
        await rig.play()
    assert chain in str(caught.value)
    assert caught.value.exit_code is ExitCode.TRY_AGAIN
    assert f"chain: {describe(caught.value)}" in caplog.text
    assert " in refresh" in caplog.text


def describe(error: StallError) -> str:
    return str(error).partition(": ")[2].partition(";")[0]


async def test_the_report_names_the_oldest_episodes(
    build_rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rig = build_rig(
        stall_seconds=STALL_SECONDS,
        environment=ScriptedEnvironment(wait=forever),
    )
    rig.clock = time.monotonic
    with pytest.raises(StallError):
        await rig.play()
    assert "episodes in flight: 8, the oldest:" in caplog.text
    assert "g000000.0: 0 s, source 'words', task 30, version 0, retry 0" in caplog.text
    assert "g000003.0" not in caplog.text


async def test_tokens_of_the_engine_are_movement(build_rig: Any) -> None:
    rig = build_rig()
    orchestrator, journal = rig.build()
    before = orchestrator.board._moved_at
    rig.policy.load = {"generated_tokens": 5}
    with journal:
        await orchestrator.engine.poll()
    assert orchestrator.board._moved_at > before
