r"""The 500 problems of MATH that models are compared on, or as many made alike."""

from __future__ import annotations

from gradus_math500.taskset import Math500Taskset

__all__ = ["Math500Taskset"]
