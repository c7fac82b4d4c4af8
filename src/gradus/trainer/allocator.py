"""Memory that a step frees stays with the process, for the next step to use; on CPUs."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MAP_THRESHOLD = -1, -3
"""What `mallopt` of the GNU C library calls M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""
_NEVER = 2**31 - 1
_LARGEST_KEPT_BYTES = 32 * 2**20
"""The highest that the library allows; larger tensors always come from the system."""


def keep_freed_memory() -> bool:
    """Ask the C library not to give freed tensors back to the system; whether it knows how to.

    By default it returns the activations of every step and gets them again page by page, zeroed:
    thousands of page faults a step. What the process needs at most does not change. torch does
    the same on GPUs. It holds for the whole process and cannot be undone.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is None:
        return False
    return bool(change(_MAP_THRESHOLD, _LARGEST_KEPT_BYTES) and change(_TRIM_THRESHOLD, _NEVER))
