"""Freed memory is used again without asking the system for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch

PROGRAM = """
import resource, sys
import numpy as np

def keep() -> bool:
    from gradus.trainer.distributed import keep_freed_memory
    return keep_freed_memory()

def fill() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.ones(1 << 18) for _ in range(32)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

is_kept = sys.argv[1] == "keep" and keep()
fill()
fill()
print(is_kept, fill())
"""
"""64 MiB in pieces of 2 MiB, three times over; page faults of the third."""


def page_faults(choice: str) -> tuple[bool, int]:
    command = [sys.executable, "-c", PROGRAM, choice]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    is_kept, faults = done.stdout.split()
    return is_kept == "True", int(faults)


def test_memory_of_a_step_serves_the_next_step() -> None:
    is_kept, faults = page_faults("keep")
    if not is_kept:
        pytest.skip("this C library has no mallopt")
    assert faults < 1000
    _, usual = page_faults("usual")
    assert usual > 10_000
