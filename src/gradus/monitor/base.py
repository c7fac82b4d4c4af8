"""A monitor is a sink of metrics; a sink that fails is muted and reported, never fatal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gradus.log import get_logger

_LOG = get_logger(__name__)


class Monitor(Protocol):
    """One sink."""

    def record(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Take one record of step `step`; keys are `<stage>/<quantity>/<reduction>`."""

    def close(self) -> None:
        """Write out what is pending and release files and connections."""


class MonitorGroup:
    """Gives every record to several sinks; a failing one gets no more and is reported once.

    >>> MonitorGroup([JsonlMonitor(path)]).record({"a/b/mean": 0.5}, step=0)  # doctest: +SKIP
    """

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self._monitors = list(monitors)
        self.muted: list[str] = []
        """Sinks that failed, by class name."""

    def record(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Give the record to every sink that still works."""
        for monitor in list(self._monitors):
            try:
                monitor.record(metrics, step=step)
            except Exception as error:  # A tracker may raise anything; training continues.
                self._mute(monitor, error)

    def close(self) -> None:
        """Close every sink that still works."""
        for monitor in list(self._monitors):
            try:
                monitor.close()
            except Exception as error:
                self._mute(monitor, error)
        self._monitors.clear()

    def _mute(self, monitor: Monitor, error: Exception) -> None:
        name = type(monitor).__name__
        self._monitors.remove(monitor)
        self.muted.append(name)
        _LOG.error("%s failed and gets no more records: %s: %s", name, type(error).__name__, error)
