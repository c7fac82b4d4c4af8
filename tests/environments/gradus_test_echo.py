"""Repeat the prompt."""

from __future__ import annotations

from gradus.testing.environment import EchoTaskset

__all__ = ["EchoTaskset"]
