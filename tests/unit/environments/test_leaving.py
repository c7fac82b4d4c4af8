"""A process that has served ends, whatever its environment left running."""

from __future__ import annotations

import subprocess
import sys

import pytest

_THREAD = """
import threading
from gradus.environments.process import leave_soon
threading.Thread(target=threading.Event().wait).start()
leave_soon(0, 0.1)
"""
_CHILD = """
import multiprocessing, os, time
from gradus.environments.process import leave_soon

def outlive():
    while os.getppid() == parent:
        time.sleep(0.05)

parent = os.getpid()
multiprocessing.get_context("fork").Process(target=outlive).start()
leave_soon(0, 0.1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [_THREAD, _CHILD], ids=["thread", "child"])
def test_nothing_that_an_environment_left_running_keeps_a_process(program: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", program])
    assert process.wait(timeout=60) == 0
