"""When a run saves what a restart needs, and how many of those checkpoints it keeps."""

from __future__ import annotations

from pydantic import Field

from gradus.config.base import StrictConfig


class CheckpointConfig(StrictConfig):
    """Saving and keeping checkpoints."""

    interval_steps: int | None = Field(None, ge=1)
    """Steps between checkpoints. None means that steps decide nothing."""
    interval_minutes: float | None = Field(30.0, gt=0)
    """Minutes between checkpoints, at the end of the step in which they are over. None means that
    time decides nothing. With either interval the last step and a stop by SIGTERM save one too;
    with neither nothing is saved."""
    keep_last: int = Field(2, ge=2)
    """Newest checkpoints kept; two at least, so that a damaged one leaves another."""
    keep_interval_steps: int | None = Field(None, ge=1)
    """Checkpoints at multiples of this many steps are kept for ever. None means none of them."""
    asynchronous: bool = True
    """Write while training goes on; needs room in main memory for a copy of what is saved."""
    max_failed_saves: int = Field(3, ge=1)
    """Saves in a row that fail, on a full disk for example, after which the run ends."""

    @property
    def is_on(self) -> bool:
        """Whether anything is saved."""
        return self.interval_steps is not None or self.interval_minutes is not None
