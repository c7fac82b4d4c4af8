"""Environments by versions, with intervals over tasks, and two versions task by task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from gradus.errors import ConfigError
from gradus.monitor.statistics import Difference, mean_of, pass_all_k, pass_at_k
from gradus.run.records import Record
from gradus.view.index import KEY, EpisodeIndex

_SAME = 1e-9
_MAX_TASKS = 2_000
_MAX_VERSIONS = 200
_SHOWN = ("pass@", "pass^", "avg@")


def evaluations_page(index: EpisodeIndex, records: Sequence[Record]) -> dict[str, Any]:
    """A cell for each environment and version that it was evaluated with."""
    own: dict[int, dict[str, _Played]] = {}
    for played in _played(index, {}):
        own.setdefault(played.version, {})[played.source] = played
    told = {it.step: it.metrics for it in records}
    versions = sorted(own)[-_MAX_VERSIONS:]
    cells = [
        _cell(played, told.get(version, {}))
        for version in versions
        for _, played in sorted(own[version].items())
    ]
    return {
        "versions": versions,
        "left_out": max(0, len(own) - _MAX_VERSIONS),
        "sources": sorted({it["source"] for it in cells}),
        "cells": cells,
    }


@dataclass
class _Played:
    """What a version earned in an environment."""

    version: int
    source: str
    rewards: dict[str, list[float]] = field(default_factory=dict)
    """By task; of the episodes that have one."""
    keys: dict[str, str] = field(default_factory=dict)
    """An episode of each task."""
    num_episodes: int = 0
    num_failed: int = 0

    @property
    def means(self) -> dict[str, float]:
        return {task: fmean(values) for task, values in self.rewards.items()}


def _played(index: EpisodeIndex, where: Mapping[str, Sequence[str]]) -> list[_Played]:
    """Each environment in each version that was evaluated."""
    rows = index.select(
        f"""step, source, task, list(reward ORDER BY "row") FILTER (reward IS NOT NULL),
        first({KEY} ORDER BY "row" DESC), count(*), count(*) FILTER (reward IS NULL)""",
        {"purpose": ["eval"], **where},
        'GROUP BY step, source, task ORDER BY min("row")',
    ).fetchall()
    found: dict[tuple[int, str], _Played] = {}
    for version, source, task, rewards, key, count, failed in rows:
        one = found.setdefault((version, source), _Played(version, source))
        if rewards:
            one.rewards[task] = rewards
        one.keys[task] = key
        one.num_episodes += count
        one.num_failed += failed
    return list(found.values())


def _cell(played: _Played, told: Mapping[str, float]) -> dict[str, Any]:
    source, rewards = played.source, played.rewards
    found = mean_of([list(played.means.values())]) if rewards else Difference(math.nan)
    head = f"eval/{source}/"
    return {
        "source": source,
        "version": played.version,
        "mean": found.value if rewards else None,
        "low": found.low,
        "high": found.high,
        "tasks": len(rewards),
        "episodes": played.num_episodes,
        "failed": played.num_failed,
        "told": {
            short: [value, *_interval_of(short, rewards)]
            for name, value in told.items()
            if name.startswith(head)
            if (short := name.removeprefix(head))[:5] in _SHOWN
        },
    }


def _interval_of(name: str, rewards: Mapping[str, Sequence[float]]) -> list[float | None]:
    """Of pass@k or pass^k over the tasks with k episodes or more; it is recorded only where each
    reward is 0 or 1."""
    estimate = {"pass@": pass_at_k, "pass^": pass_all_k}.get(name[:5])
    if estimate is None or not name[5:].isdecimal():
        return [None, None]
    k = max(1, int(name[5:]))
    solved = [(len(it), sum(reward > 0.5 for reward in it)) for it in rewards.values()]
    values = [estimate(n, c, k) for n, c in solved if n >= k]
    found = mean_of([values]) if values else Difference(math.nan)
    return [found.low, found.high]


def compared_tasks(index: EpisodeIndex, source: str, first: int, second: int) -> dict[str, Any]:
    """The tasks that both versions played, those that changed most first; ConfigError where there
    is none."""
    nothing = _Played(0, source)
    sides = [
        next(iter(_played(index, {"source": [source], "step": [str(it)]})), nothing)
        for it in (first, second)
    ]
    means = [it.means for it in sides]
    tasks = [task for task in means[0] if task in means[1]]
    if not tasks:
        raise ConfigError(f"versions {first} and {second} have no task of {source!r} in common")
    found: list[dict[str, Any]] = [
        {
            "task": task,
            "first": means[0][task],
            "second": means[1][task],
            "change": means[1][task] - means[0][task],
            "keys": [it.keys[task] for it in sides],
        }
        for task in tasks
    ]
    found.sort(key=lambda it: -abs(it["change"]))
    changes = [it["change"] for it in found]
    better, worse = (sum(it > _SAME for it in changes), sum(it < -_SAME for it in changes))
    difference = mean_of([changes], are_changes=True)
    return {
        "tasks": found[:_MAX_TASKS],
        "count": len(found),
        "only": [len(it) - len(tasks) for it in means],
        "better": better,
        "worse": worse,
        "chance": sign_test(better, worse),
        "change": fmean(changes),
        "low": difference.low,
        "high": difference.high,
    }


def sign_test(better: int, worse: int) -> float:
    """How likely so uneven a split of the tasks that changed is by chance, in either direction.

    >>> sign_test(9, 1), sign_test(3, 3)
    (0.021484375, 1.0)
    """
    n, k = better + worse, min(better, worse)
    logs = (
        math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2)
        for i in range(k + 1)
    )
    return min(1.0, round(2 * sum(map(math.exp, logs)), 12))
