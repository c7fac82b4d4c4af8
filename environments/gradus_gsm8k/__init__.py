"""Word problems of grade school, with the answer after `####`."""

from __future__ import annotations

from gradus_gsm8k.taskset import Gsm8kTaskset

__all__ = ["Gsm8kTaskset"]
