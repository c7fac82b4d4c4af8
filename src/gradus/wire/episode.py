"""What environment processes and the orchestrator agree on about episodes, beyond verifiers."""

from __future__ import annotations

CONTEXT_FULL = "context_length"
"""Stop condition of a trace whose next prompt does not fit into the engine's context."""
