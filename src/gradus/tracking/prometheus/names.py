"""One rule turns a metric of ours into a name of Prometheus with labels (pure).

1. What the catalogue has in angle brackets (`<source>`, `<agent>`, `<part>`, ...) becomes a label;
   its own word takes its place, and all parts are joined by `_` behind `gradus_`. So a name with
   labels is never that of the number over all of them.
2. Numbers are in base units: `_gib` becomes `_bytes`, `_teraflops` becomes `_flops`.
3. A last part `sum` (in one step) is left out, because Prometheus keeps that word for histograms. A
   last part `total` makes a counter; everything else is a gauge.

A metric that is not in the catalogue becomes `gradus_metric{name="..."}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from gradus.monitor.catalogue import Kind, describe

SeriesKind = Literal["gauge", "counter"]

PREFIX = "gradus_"
UNKNOWN = f"{PREFIX}metric"
"""Holds every metric that is not in the catalogue."""

_SIGNS = {"@": "_at_", "^": "_all_"}
"""They tell `pass@<k>` and `pass^<k>` apart."""
_BASE_UNITS = {"gib": ("bytes", 2.0**30), "teraflops": ("flops", 1e12)}
_MAX_REMEMBERED = 8192


@dataclass(frozen=True)
class ExportedMetric:
    """What Prometheus calls one metric of ours."""

    name: str
    labels: Mapping[str, str]
    kind: SeriesKind
    scale: float
    """Our number times this is theirs."""
    help: str


@lru_cache(maxsize=_MAX_REMEMBERED)
def export(metric: str) -> ExportedMetric:
    """The name, labels and unit of a metric.

    >>> export("episode/words/reward/accuracy/mean").name
    'gradus_episode_source_reward_part_mean'
    >>> dict(export("episode/words/reward/accuracy/mean").labels)
    {'source': 'words', 'part': 'accuracy'}
    >>> export("throughput/peak_memory_gib").name
    'gradus_throughput_peak_memory_bytes'
    """
    found = describe(metric)
    if found is None:
        text = "A metric that is not in the catalogue."
        return ExportedMetric(UNKNOWN, {"name": metric}, "gauge", 1.0, text)
    family = found.family
    for sign, word in _SIGNS.items():
        family = family.replace(sign, word)
    words, scale = [word for word in re.split(r"[^A-Za-z0-9]+", family) if word], 1.0
    if found.kind is Kind.SUM:
        words.pop()
    for position, word in enumerate(words):
        if word in _BASE_UNITS:
            words[position], scale = _BASE_UNITS[word]
    is_counter = found.kind is Kind.TOTAL
    return ExportedMetric(
        name=PREFIX + "_".join(words),
        labels=found.labels,
        kind="counter" if is_counter else "gauge",
        scale=scale,
        help=f"{found.metric.meaning} [{found.metric.unit}; {found.metric.pattern}]",
    )
