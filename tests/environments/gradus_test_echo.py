"""Repeat the prompt."""

from __future__ import annotations

from echo_tasksets import EchoTaskset

__all__ = ["EchoTaskset"]
