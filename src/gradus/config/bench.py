"""Measuring the trainer by itself, on made-up samples."""

from __future__ import annotations

from pydantic import Field

from gradus.config.base import StrictConfig


class BenchConfig(StrictConfig):
    """What `gradus bench-trainer` trains on; a run itself does not use it."""

    steps: int = Field(5, ge=1)
    """Measured steps."""
    warmup_steps: int = Field(2, ge=0)
    """Steps before them, which compile, allocate and are not counted."""
    samples_per_step: int = Field(16, ge=1)
    """Samples of one batch, over all ranks."""
    sample_tokens: int | None = Field(None, ge=2)
    """Tokens of the longest sample. None means model.max_length_tokens."""
    ragged: bool = True
    """Draw lengths evenly between a quarter of the longest and the longest; off, all are alike."""
