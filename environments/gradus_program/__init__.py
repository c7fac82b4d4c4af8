"""Existing agents as they are: a command for each task, its model calls recorded and trained."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["ProgramHarness", "ProgramTaskset"]
__getattr__ = on_first_use(__name__, harness=["ProgramHarness"], taskset=["ProgramTaskset"])
