"""Numbers and traces out of a run."""

from __future__ import annotations

from gradus.monitor.base import Monitor, MonitorGroup
from gradus.monitor.catalogue import Description, Kind, describe
from gradus.monitor.console import (
    BENCH_COLUMNS,
    RL_COLUMNS,
    SFT_COLUMNS,
    Column,
    ConsoleMonitor,
    agents_rewards,
    format_seconds,
    format_step,
)
from gradus.monitor.jsonl import RESERVED_KEYS, JsonlMonitor, read_objects, read_records
from gradus.monitor.live import LIVE_SECONDS, LiveNumbers, read_live, write_live

__all__ = [
    "BENCH_COLUMNS",
    "LIVE_SECONDS",
    "RESERVED_KEYS",
    "RL_COLUMNS",
    "SFT_COLUMNS",
    "Column",
    "ConsoleMonitor",
    "Description",
    "JsonlMonitor",
    "Kind",
    "LiveNumbers",
    "Monitor",
    "MonitorGroup",
    "agents_rewards",
    "describe",
    "format_seconds",
    "format_step",
    "read_live",
    "read_objects",
    "read_records",
    "write_live",
]
