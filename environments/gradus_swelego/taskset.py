"""The taskset `swelego`: `swe-sandbox` over the rows of SWE-Lego."""

from __future__ import annotations

from typing import Literal

import verifiers.v1 as vf

from gradus_swe_sandbox.shell import ShellHarness
from gradus_swe_sandbox.taskset import (
    RepairConfig,
    RepairTask,
    SweSandboxConfig,
    SweSandboxTaskset,
)

__all__ = ["ShellHarness", "SweLegoConfig", "SweLegoTaskset"]


class SweLegoConfig(SweSandboxConfig):
    """Which repairs."""

    source: Literal["ledger", "hub"] = "hub"
    """`hub`: rows of `dataset`. `ledger`: the repository of `swe-sandbox`."""
    dataset: str = "PrimeIntellect/SWE-Lego-Real-Data"
    """Data set with the columns of SWE-Gym and each row's image and command of the tests."""
    dataset_split: str = "resolved"
    """Split of that data set."""
    task: RepairConfig = RepairConfig(seconds=1800)
    """How a repair is judged."""


class SweLegoTaskset(SweSandboxTaskset, vf.Taskset[RepairTask, SweLegoConfig]):
    """The repairs in the order of the data set."""
