"""Environments by versions, with intervals over tasks, and two versions task by task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradus.errors import ConfigError
from gradus.monitor.statistics import Difference, mean_of, pass_all_k, pass_at_k
from gradus.run.records import Record
from gradus.view.index import EpisodeIndex

_SAME = 1e-9
_MAX_TASKS = 2_000
_MAX_VERSIONS = 200
_SHOWN = ("pass@", "pass^", "avg@")


def evaluations_page(index: EpisodeIndex, records: Sequence[Record]) -> dict[str, Any]:
    """A cell for each environment and version that it was evaluated with."""
    versions, sources = index.column("step"), _source_column(index)
    rows = np.flatnonzero(index.having("purpose", "eval".__eq__))
    played = sorted({int(it) for it in versions[rows]})
    told = {it.step: it.metrics for it in records}
    cells = []
    for version in played[-_MAX_VERSIONS:]:
        of_version = rows[versions[rows] == version]
        for source in sorted({sources[row] for row in of_version}):
            own = of_version[[sources[row] == source for row in of_version]]
            cells.append(_cell(index, source, version, own, told.get(version, {})))
    return {
        "versions": played[-_MAX_VERSIONS:],
        "left_out": max(0, len(played) - _MAX_VERSIONS),
        "sources": sorted({it["source"] for it in cells}),
        "cells": cells,
    }


def _cell(
    index: EpisodeIndex,
    source: str,
    version: int,
    rows: NDArray[np.int64],
    told: Mapping[str, float],
) -> dict[str, Any]:
    rewards = _rewards(index, rows)
    tasks = {task: fmean(values) for task, values in rewards.items()}
    found = mean_of([list(tasks.values())]) if tasks else Difference(math.nan)
    failed = int(np.isnan(index.column("reward")[rows]).sum())
    heads = (f"eval/{source}/", "eval/") if any(f"eval/{source}/" in it for it in told) else ()
    return {
        "source": source,
        "version": version,
        "mean": found.value if tasks else None,
        "low": found.low,
        "high": found.high,
        "tasks": len(tasks),
        "episodes": len(rows),
        "failed": failed,
        "told": {
            short: [value, *_interval_of(short, rewards)]
            for name, value in told.items()
            if heads and name.startswith(heads[0])
            if (short := name.removeprefix(heads[0]))[:5] in _SHOWN
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
    sides = [_of(index, source, version) for version in (first, second)]
    means = [_means(index, rows) for rows in sides]
    tasks = [task for task in means[0] if task in means[1]]
    if not tasks:
        raise ConfigError(f"versions {first} and {second} have no task of {source!r} in common")
    words, places = index.words("task"), index.column("task")
    examples = [
        {words[places[row]]: index.place_of(row) for row in rows.tolist()} for rows in sides
    ]
    found: list[dict[str, Any]] = [
        {
            "task": task,
            "first": means[0][task],
            "second": means[1][task],
            "change": means[1][task] - means[0][task],
            "keys": [str(of[task]) for of in examples],
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


def _of(index: EpisodeIndex, source: str, version: int) -> NDArray[np.int64]:
    mask = index.having("purpose", "eval".__eq__) & index.having("source", source.__eq__)
    return np.flatnonzero(mask & (index.column("step") == version))


def _means(index: EpisodeIndex, rows: NDArray[np.int64]) -> dict[str, float]:
    """The mean reward of each task, over the episodes that have one."""
    return {task: fmean(values) for task, values in _rewards(index, rows).items()}


def _rewards(index: EpisodeIndex, rows: NDArray[np.int64]) -> dict[str, list[float]]:
    words, places, rewards = index.words("task"), index.column("task"), index.column("reward")
    found: dict[str, list[float]] = {}
    for row in rows.tolist():
        if not math.isnan(rewards[row]):
            found.setdefault(words[places[row]], []).append(float(rewards[row]))
    return found


def _source_column(index: EpisodeIndex) -> list[str]:
    words = index.words("source")
    return [words[place] for place in index.column("source")]
