"""A sink that fails is muted and reported once; training continues."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest

from gradus.monitor import MonitorGroup


class Recorder:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.is_closed = False

    def record(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.is_closed = True


class Broken(Recorder):
    """Fails from step 1 on."""

    def record(self, metrics: Mapping[str, float], *, step: int) -> None:
        super().record(metrics, step=step)
        if step >= 1:
            raise OSError("no space left")


class FailsToClose(Recorder):
    def close(self) -> None:
        raise RuntimeError("still uploading")


def test_every_sink_gets_every_record() -> None:
    sinks = [Recorder(), Recorder()]
    group = MonitorGroup(sinks)
    for step in range(3):
        group.record({}, step=step)
    assert [sink.steps for sink in sinks] == [[0, 1, 2], [0, 1, 2]]


def test_a_failing_sink_is_muted_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    broken, healthy = Broken(), Recorder()
    group = MonitorGroup([broken, healthy])
    for step in range(4):
        group.record({}, step=step)
    assert (broken.steps, healthy.steps) == ([0, 1], [0, 1, 2, 3])
    assert group.muted == ["Broken"]
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert errors == ["Broken failed and gets no more records: OSError: no space left"]


def test_closing_reaches_every_sink() -> None:
    sinks = [FailsToClose(), Recorder()]
    group = MonitorGroup(sinks)
    group.close()
    assert sinks[1].is_closed
    assert group.muted == ["FailsToClose"]


def test_a_group_without_sinks_records_nothing() -> None:
    group = MonitorGroup([])
    group.record({"loss/total/mean": 1.0}, step=0)
    group.close()
