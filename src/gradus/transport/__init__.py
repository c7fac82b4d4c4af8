"""The spool: batches one way, events back."""

from __future__ import annotations

from gradus.transport.base import BatchesEnded, BatchReceiver, BatchSender
from gradus.transport.spool import SpoolReceiver, SpoolSender

__all__ = ["BatchReceiver", "BatchSender", "BatchesEnded", "SpoolReceiver", "SpoolSender"]
