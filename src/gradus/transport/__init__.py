"""The spool: batches one way, events back."""

from __future__ import annotations

from gradus.transport.spool import BatchesEnded, SpoolReceiver, SpoolSender

__all__ = ["BatchesEnded", "SpoolReceiver", "SpoolSender"]
