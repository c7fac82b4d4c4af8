"""A simulated user who asks and counts the echoes."""

from __future__ import annotations

from echo_tasksets import TalkEnv, TalkTaskset

__all__ = ["TalkEnv", "TalkTaskset"]
