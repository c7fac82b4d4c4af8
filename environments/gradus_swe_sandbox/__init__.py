"""Repair a small repository in a container: a bug report, a shell, and checks of the repair."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["ShellHarness", "SweSandboxTaskset"]
__getattr__ = on_first_use(__name__, shell=["ShellHarness"], taskset=["SweSandboxTaskset"])
