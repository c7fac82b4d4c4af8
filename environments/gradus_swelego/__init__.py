"""Repair a repository of SWE-Lego in its container: rows of real issues with their own tests."""

from __future__ import annotations

from gradus_kit.first_use import on_first_use

__all__ = ["ShellHarness", "SweLegoTaskset"]
__getattr__ = on_first_use(__name__, taskset=["ShellHarness", "SweLegoTaskset"])
