"""The garbage collector of a process that handles episodes: seldom, and not over what stays."""

from __future__ import annotations

import atexit
import gc

COLLECT_AFTER_ALLOCATIONS = (1_000, 5, 5_000)
"""Allocations that were not freed, then collections of the next younger generation.

An episode holds hundreds of tracked objects and leaves few cycles. With the default thresholds a
full collection, over all episodes that wait, stopped the event loop for 0.5 s every few seconds."""


def tune_collector() -> None:
    """Leave out all that was imported until now, and collect the rest seldom.

    To be called once, when a process has its parts and before it works.
    """
    # The interpreter's last collection walks every imported module and would take a second.
    atexit.register(gc.freeze)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER_ALLOCATIONS)
