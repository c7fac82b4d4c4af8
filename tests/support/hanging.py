"""A role that gives two signs of life and then hangs in a way that its first argument names."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from gradus.heartbeat import Heartbeat, beat
from gradus.processes.child import show_stacks
from gradus.processes.liveness import beat_with_loop


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_interpreter() -> None:
    """As compiled code does that never returns: `PyDLL` keeps the lock of the interpreter."""
    ctypes.PyDLL(None).sleep(600)


def spin() -> None:
    while True:
        pass


def sleep_beside_a_living_thread() -> None:
    threading.Thread(target=live_on, daemon=True).start()
    threading.Event().wait(600)


def live_on() -> None:
    while True:
        beat("a thread that lives on")
        threading.Event().wait(0.01)


def block_the_loop() -> None:
    async def serve() -> None:
        beating = asyncio.create_task(beat_with_loop())
        await asyncio.sleep(0)
        spin()
        await beating

    asyncio.run(serve())


HANGS: dict[str, Callable[[], None]] = {
    it.__name__: it
    for it in (
        *(stop, hold_the_interpreter, spin),
        *(sleep_beside_a_living_thread, block_the_loop),
    )
}


def main(how: str, file: str) -> None:
    show_stacks()
    # Neither knows the signal that asks for stacks, and each is as deaf as the role.
    sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", sleeper])
    with Heartbeat(Path(file)).beating():
        beat("micro batch 2", step=7)
        beat("micro batch 3")
        Path(file).with_name("ready").touch()
        HANGS[how]()


if __name__ == "__main__":
    main(*sys.argv[1:])
