"""Numbers and traces out of a run."""

from __future__ import annotations

from gradus.monitor.base import Monitor, MonitorGroup
from gradus.monitor.catalogue import Description, Kind, describe_metric
from gradus.monitor.console import (
    BENCH_COLUMNS,
    LAST_STEPS,
    RL_COLUMNS,
    SFT_COLUMNS,
    Column,
    ConsoleMonitor,
    agents_rewards,
    aligned,
    first_and_last,
    format_seconds,
    format_step,
    mean,
    terminal_width,
    wrapped,
)
from gradus.monitor.goal import MAX_FAILED_SHARE, Goal, evaluated_average
from gradus.monitor.jsonl import JsonlMonitor
from gradus.monitor.live import LIVE_SECONDS, LiveNumbers, read_live, write_live
from gradus.monitor.statistics import Difference, mean_of
from gradus.monitor.verdict import LearningVerdict, alarm_states, alarms_on, verdict_on

__all__ = [
    "MAX_FAILED_SHARE",
    "Difference",
    "BENCH_COLUMNS",
    "LAST_STEPS",
    "LIVE_SECONDS",
    "RL_COLUMNS",
    "SFT_COLUMNS",
    "Column",
    "ConsoleMonitor",
    "Description",
    "Goal",
    "JsonlMonitor",
    "Kind",
    "LiveNumbers",
    "Monitor",
    "MonitorGroup",
    "LearningVerdict",
    "agents_rewards",
    "alarm_states",
    "alarms_on",
    "aligned",
    "describe_metric",
    "evaluated_average",
    "first_and_last",
    "format_seconds",
    "format_step",
    "mean",
    "mean_of",
    "read_live",
    "terminal_width",
    "verdict_on",
    "wrapped",
    "write_live",
]
