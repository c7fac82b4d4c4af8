"""The gate for plug-ins: what passes, what is blamed, and how blocking code ends."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

from gradus import gate
from gradus.errors import ConfigError, ExitCode
from gradus.gate import BlockWatch, PluginFailed, guarded, interruptible, plugin_name

LOOK_SECONDS = 0.05


def name() -> str:
    return "filter mine:Short, source 'words'"


def test_a_class_and_a_function_are_described_by_their_own_names() -> None:
    assert plugin_name("loss", "text") == "loss builtins:str"
    assert plugin_name("loss", name) == f"loss {__name__}:name"


@pytest.mark.parametrize(
    "error",
    [KeyError("x"), SystemExit(0), KeyboardInterrupt(), GeneratorExit(), StopIteration(3)],
)
def test_whatever_a_plug_in_raises_is_blamed_on_it(error: BaseException) -> None:
    said = f"mine:Short, .* {type(error).__name__}"
    with pytest.raises(PluginFailed, match=said) as failed, guarded(name):
        raise error
    assert failed.value.cause is error


def test_a_real_ctrl_c_is_not_blamed_on_the_plug_in_that_runs() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible(), guarded(name):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(PluginFailed, match="KeyboardInterrupt"), interruptible(), guarded(name):
        raise KeyboardInterrupt


def test_errors_of_gradus_pass() -> None:
    with pytest.raises(ConfigError, match="a wish"), guarded(name):
        raise ConfigError("a wish")


async def test_a_cancellation_that_was_asked_for_passes_and_one_that_is_made_up_does_not() -> None:
    async def wait() -> None:
        with guarded(name):
            await asyncio.Event().wait()

    async def make_up() -> None:
        with guarded(name):
            raise asyncio.CancelledError

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(PluginFailed, match="CancelledError: something that it awaits"):
        await make_up()


BLOCKING = """
import asyncio, time
from gradus.gate import Awaited, BlockWatch, guarded
async def judge():
    await asyncio.sleep(0)
    time.sleep(60)
async def main():
    async with BlockWatch(print, look_seconds=0.05):
        with guarded(lambda: "judge mine:Judge", seconds=0.1):
            CALL
asyncio.run(main())
"""


@pytest.mark.parametrize("call", ["time.sleep(60)", "await Awaited(judge())"])
def test_a_plug_in_that_blocks_ends_the_process_under_its_name(call: str) -> None:
    script = BLOCKING.replace("CALL", call)
    ended = subprocess.run([sys.executable, "-uc", script], capture_output=True, text=True)
    assert ended.returncode == ExitCode.CONFIG
    assert ended.stdout.startswith("judge mine:Judge has blocked the event loop")
    assert "a call may take 0.1 s" in ended.stdout


async def test_a_blocked_event_loop_is_told_with_the_plug_in_that_blocks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "TELL_SECONDS", 0.1)
    told: list[str] = []
    async with BlockWatch(told.append, look_seconds=LOOK_SECONDS):
        with guarded(name):
            threading.Event().wait(0.4)
    (line,) = told
    assert line.startswith("filter mine:Short, source 'words' has blocked the event loop for 0 s")


HONEST = BLOCKING.replace("seconds=0.1", "seconds=0.5").replace("mine:Judge", "mine:Quick")


def test_a_process_that_was_stopped_blames_no_plug_in() -> None:
    script = HONEST.replace("CALL", "print('calls'); time.sleep(0.2)").replace(
        "asyncio.run(main())", "asyncio.run(main()); print('done')"
    )
    words = [sys.executable, "-uc", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "calls\n"
        process.send_signal(signal.SIGSTOP)
        threading.Event().wait(1.5)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read() == "done\n"
    assert process.returncode == 0


def test_a_plug_in_does_not_answer_for_the_calls_before_it() -> None:
    script = BLOCKING.replace("seconds=0.1", "seconds=0.5").replace("CALL", "time.sleep(0.2)")
    script = script.replace("        with", "        for _ in range(5):\n         with")
    ended = subprocess.run([sys.executable, "-uc", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "")


async def test_a_plug_in_that_waits_and_blocks_nothing_is_left_alone() -> None:
    async with BlockWatch(print, look_seconds=LOOK_SECONDS):
        with guarded(name, seconds=LOOK_SECONDS):
            await asyncio.wait_for(asyncio.to_thread(threading.Event().wait, 0.3), 60)
