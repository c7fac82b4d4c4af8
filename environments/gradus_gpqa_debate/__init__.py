"""Multiple-choice questions that two debaters argue about before a judge."""

from __future__ import annotations

from gradus_debate import DebateEnv
from gradus_gpqa_debate.taskset import GpqaDebateTaskset

__all__ = ["DebateEnv", "GpqaDebateTaskset"]
