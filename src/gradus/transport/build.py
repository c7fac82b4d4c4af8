"""Both ends of the transport of a run, by registered name or `module:Class`."""

from __future__ import annotations

from typing import cast

from gradus.plugins import find_plugin
from gradus.run.paths import RunDirectory
from gradus.transport.base import BatchReceiver, BatchSender, Transport
from gradus.transport.filesystem import FilesystemTransport

TRANSPORTS: dict[str, str | type] = {"filesystem": FilesystemTransport}
"""Transports between processes, by name. Each class is built from a RunDirectory."""


def build_sender(
    run_dir: RunDirectory, term: int, *, capacity: int = 2, type: str = "filesystem"
) -> BatchSender:
    """The orchestrator's end; `send` waits while `capacity` batches are unacknowledged."""
    return _build(run_dir, type).sender(term=term, capacity=capacity)


def build_receiver(
    run_dir: RunDirectory, term: int, rank: int, *, type: str = "filesystem"
) -> BatchReceiver:
    """The end of data-parallel rank `rank`."""
    return _build(run_dir, type).receiver(term=term, rank=rank)


def _build(run_dir: RunDirectory, name: str) -> Transport:
    return cast("Transport", find_plugin("transport", name, TRANSPORTS)(run_dir))
