"""Calls in helper processes: values come back, and what hangs or fills the memory is ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from gradus_kit.sandbox import CallFailed, HelperCalls

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def calls() -> Iterator[HelperCalls]:
    helpers = HelperCalls(memory_bytes=1 << 30)
    yield helpers
    helpers.close()


async def test_values_come_back_from_the_same_helper(calls: HelperCalls) -> None:
    first = await calls.call("os:getpid", seconds=60.0)
    assert await calls.call("os:getpid", seconds=60.0) == first
    assert await calls.call("math:factorial", 5, seconds=60.0) == 120


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        ("math:factorial", [10**8], "deadline"),
        ("operator:mul", ["x" * 1000, 10**8], "memory"),
        ("os:abort", [], "died"),
        ("math:sqrt", [-1.0], "ValueError"),
        ("math:nothing", [], "AttributeError"),
        ("no_such_module:f", [], "ModuleNotFoundError"),
        ("builtins:object", [], "TypeError"),
        ("math:sqrt", ["\ud800"], "UnicodeEncodeError"),
    ],
)
async def test_a_call_without_a_value_says_why_and_the_next_one_works(
    calls: HelperCalls, function: str, arguments: list[object], reason: str
) -> None:
    with pytest.raises(CallFailed) as failed:
        await calls.call(function, *arguments, seconds=0.3 if reason == "deadline" else 60.0)
    assert failed.value.reason == reason
    could_not_import = {"AttributeError", "ModuleNotFoundError"}
    assert failed.value.is_broken is (reason in {"died", *could_not_import})
    assert await calls.call("math:factorial", 3, seconds=60.0) == 6


async def test_a_helper_that_waits_for_its_core_meets_no_deadline(calls: HelperCalls) -> None:
    assert await calls.call("time:sleep", 0.3, seconds=0.1) is None


async def test_a_cancelled_call_kills_its_helper(calls: HelperCalls) -> None:
    helper = await calls.call("os:getpid", seconds=60.0)
    task = asyncio.create_task(calls.call("math:factorial", 10**8, seconds=60.0))
    while not task.done() and calls._idle:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await calls.call("os:getpid", seconds=60.0) != helper
