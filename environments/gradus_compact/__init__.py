"""The compact harness under a name that verifiers can import: `harness.id = "gradus-compact"`."""

from __future__ import annotations

from gradus_compact.harness import CompactHarness

__all__ = ["CompactHarness"]
