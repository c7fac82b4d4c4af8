"""The chat harness under a name that verifiers can import: `harness.id = "gradus-chat"`."""

from __future__ import annotations

from gradus_chat.chat import ChatHarness

__all__ = ["ChatHarness"]
