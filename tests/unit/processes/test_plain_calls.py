"""Functions without `async` run beside one another and beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import signal
import sqlite3
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from commands import wait_until_async

from gradus.processes import plain_calls
from gradus.processes.plain_calls import PlainCalls, call, use_plain_calls


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == "plain-call":
            thread.join(60)


class Gate:
    """A plain function that blocks its thread until it is opened, and counts who is inside."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.inside = 0
        self.most = 0
        self._lock = threading.Lock()

    def __call__(self) -> str:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        assert self.opened.wait(60)
        with self._lock:
            self.inside -= 1
        return "through"

    async def wait_for(self, number: int) -> None:
        await wait_until_async(lambda: self.inside == number)


async def test_as_many_run_at_once_as_there_are_places_and_the_loop_goes_on() -> None:
    gate, calls = Gate(), PlainCalls(4)
    running = [asyncio.create_task(calls.run(gate, "gate")) for _ in range(10)]
    await gate.wait_for(4)
    gate.opened.set()
    assert await asyncio.gather(*running) == ["through"] * 10
    assert gate.most == 4


async def test_a_call_that_is_given_up_leaves_its_place_to_the_next() -> None:
    stuck, calls = Gate(), PlainCalls(1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await calls.run(stuck, "stuck")
    assert await calls.run(lambda: 3, "three") == 3
    stuck.opened.set()


async def test_one_that_waits_for_a_place_can_be_given_up_too() -> None:
    gate, calls, began = Gate(), PlainCalls(1), []
    first = asyncio.create_task(calls.run(gate, "gate"))
    await gate.wait_for(1)
    second = asyncio.create_task(calls.run(lambda: began.append(2), "second"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    gate.opened.set()
    assert await first == "through"
    assert await calls.run(lambda: 5, "five") == 5
    assert began == []


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), StopIteration(7)])
async def test_what_it_raises_reaches_who_asked(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)):
        await PlainCalls(1).run(fail, "fail")
    assert await PlainCalls(1).run(lambda: 1, "one") == 1


def sets_a_signal() -> str:
    try:
        before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    except Exception:
        return "swallowed"
    signal.signal(signal.SIGUSR2, before)
    return threading.current_thread().name


CONNECTION = sqlite3.connect(":memory:")


def asks_a_database() -> str:
    CONNECTION.execute("select 1")
    return threading.current_thread().name


@pytest.mark.parametrize("function", [sets_a_signal, asks_a_database])
async def test_what_only_works_in_the_main_thread_runs_there(
    function: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(signal, "signal", signal.signal)
    calls = PlainCalls(2)
    use_plain_calls(calls)
    with caplog.at_level(logging.WARNING):
        assert [await calls.run(function, "f") for _ in range(2)] == ["MainThread"] * 2
    assert len(caplog.records) == 1


async def test_each_kind_of_function_runs_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", signal.signal)

    def plain() -> str:
        return threading.current_thread().name

    async def waiting() -> str:
        return threading.current_thread().name

    class Waiting:
        async def __call__(self) -> str:
            return threading.current_thread().name

    functions: list[Any] = [plain, waiting, Waiting(), lambda: waiting()]
    without = [await call(it, it, "f") for it in functions]
    use_plain_calls(PlainCalls())
    assert [await call(it, it, "f") for it in functions] == ["plain-call", *without[1:]]
    assert without == ["MainThread"] * 4


async def test_a_slow_call_is_told_once_with_its_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plain_calls, "SLOW_SECONDS", 0.0)
    calls = PlainCalls(1)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            await calls.run(lambda: threading.Event().wait(0.05), "reward 'judge'")
    assert len([it for it in caplog.records if "reward 'judge'" in it.getMessage()]) == 1
