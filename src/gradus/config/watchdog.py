"""What happens when a run stands still."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gradus.config.base import StrictConfig


class WatchdogConfig(StrictConfig):
    """Reports who waits for whom when nothing moved for a while."""

    stall_seconds: float = Field(1800.0, gt=0)
    """How long no episode, token, batch or version may come before the run counts as stalled."""
    action: Literal["warn", "end"] = "end"
    """`end` ends the run with exit code 75 and the chain of waits as its cause; `warn` reports and
    goes on, and reports again after the same time."""
