"""The tuned collector leaves what was there, and takes little at a time."""

from __future__ import annotations

import subprocess
import sys

from gradus.processes.child import COLLECT_AFTER_ALLOCATIONS, tune_collector

PROGRAM = """
import gc
from gradus.processes.child import COLLECT_AFTER_ALLOCATIONS, tune_collector

tune_collector()
assert gc.get_threshold() == COLLECT_AFTER_ALLOCATIONS
assert gc.get_freeze_count() > 1000

class Ring:
    pass

def make():
    ring = Ring()
    ring.itself = ring

seen = []
gc.callbacks.append(lambda phase, info: seen.append((info["generation"], info["collected"])))
kept = []
for _ in range(20_000):
    make()
    kept.append([])
assert sum(collected for _, collected in seen) > 10_000, "cycles are still found"
assert {generation for generation, _ in seen} == {0, 1}, "and no pass goes over everything"
"""


def test_imported_objects_are_left_alone_and_young_cycles_are_found() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=30)


def test_tuning_does_not_happen_by_an_import() -> None:
    assert callable(tune_collector)
    program = "import gc; before = gc.get_threshold(); import gradus.processes.child; "
    program += "assert gc.get_threshold() == before"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert len(COLLECT_AFTER_ALLOCATIONS) == 3
