"""Deadlines that several processes of a run share."""

from __future__ import annotations

APPLY_SECONDS = 600.0
"""Deadline for inference to apply a published version."""
LONGEST_WAIT_SECONDS = 86_400.0
"""How long the trainer waits for a batch, while episodes are slow or an evaluation holds new
weights back, and the orchestrator for the trainer's answer. The watchdog says sooner that a run
stands still."""
