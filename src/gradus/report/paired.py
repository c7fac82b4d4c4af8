"""Two evaluations of the same tasks, compared task by task: which is better, and is it noise."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from gradus.errors import ConfigError
from gradus.monitor import aligned, wrapped
from gradus.monitor.statistics import Difference, mean_of
from gradus.report.folder import RunFolder, differing, read_folder
from gradus.report.text import number
from gradus.run.episodes import RecordedEpisode, episode_files, read_episodes

OVERALL = "overall"
_SAME = 1e-9
_Rewards = Mapping[str, Mapping[str, Sequence[float]]]
"""Source → task → the reward of each episode that finished."""


@dataclass(frozen=True)
class PairedSource:
    """The tasks of one source that both evaluations played, or those of all sources."""

    name: str
    num_tasks: int
    first: float
    second: float
    """Mean over tasks of the mean reward of a task."""
    difference: Difference
    """Second minus first, with an interval over tasks."""
    better: int
    """Tasks with a higher mean reward in the second evaluation."""
    worse: int


@dataclass(frozen=True)
class PairedComparison:
    """A first evaluation and a second, from the tasks that both played."""

    folders: tuple[RunFolder, RunFolder]
    sources: Sequence[PairedSource]
    """Each source, and a last one over all where there are several."""
    only: tuple[int, int]
    """Tasks that one of them alone has a reward of."""

    @property
    def overall(self) -> PairedSource:
        return self.sources[-1]


def are_evaluations(paths: Sequence[Path]) -> bool:
    return all(read_folder(path).kind == "eval" for path in paths)


def compare_pairs(first: Path, second: Path) -> PairedComparison:
    """The second evaluation against the first; ConfigError when no task is in both."""
    if first.resolve() == second.resolve():
        raise ConfigError("one evaluation is named twice")
    folders = (read_folder(first), read_folder(second))
    a, b = (_rewards(folder) for folder in folders)
    if len(a) == len(b) == 1 and a.keys() != b.keys():
        b = {next(iter(a)): next(iter(b.values()))}
    pairs = {
        source: [(fmean(of[key]), fmean(b[source][key])) for key in of if key in b[source]]
        for source, of in a.items()
        if source in b
    }
    pairs = {source: found for source, found in pairs.items() if found}
    if not pairs:
        raise ConfigError(
            f"{first} and {second} have no task in common, so that a difference would say nothing "
            f"of the models: {first} has {_counted(a)}, {second} has {_counted(b)}. Evaluate both "
            "on the same rows"
        )
    sources = [_paired(source, [found]) for source, found in pairs.items()]
    if len(pairs) > 1:
        sources.append(_paired(OVERALL, list(pairs.values())))
    num_paired = sum(map(len, pairs.values()))
    left = (sum(map(len, it.values())) - num_paired for it in (a, b))
    return PairedComparison(folders, sources, (next(left), next(left)))


def _rewards(folder: RunFolder) -> _Rewards:
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _, path in episode_files(folder.run_dir, "eval"):
        for episode in read_episodes(path):
            if episode.reward is not None:
                found[episode.source][_task(episode)].append(episode.reward)
    return found


def _task(episode: RecordedEpisode) -> str:
    """What tells a task: its row, where it was made of one. Its key holds the reward's path too,
    which is another in each evaluation from Python."""
    row = dict(episode.row)
    return json.dumps(row, sort_keys=True) if row else episode.task


def _paired(name: str, of_sources: Sequence[Sequence[tuple[float, float]]]) -> PairedSource:
    """Each source counts the same, as in the average of an evaluation."""
    changes = [[b - a for a, b in pairs] for pairs in of_sources]
    every = [change for found in changes for change in found]
    return PairedSource(
        name,
        len(every),
        fmean(fmean(a for a, _ in pairs) for pairs in of_sources),
        fmean(fmean(b for _, b in pairs) for pairs in of_sources),
        mean_of(changes, are_changes=True),
        better=sum(change > _SAME for change in every),
        worse=sum(change < -_SAME for change in every),
    )


def _counted(rewards: _Rewards) -> str:
    return ", ".join(f"{len(of)} tasks of {name!r}" for name, of in rewards.items()) or "none"


def pair_lines(comparison: PairedComparison) -> list[str]:
    """The table, what it means, and the settings that differ."""
    head = ["source", "tasks", "A", "B", "B - A", "95 % interval", "better", "same", "worse"]
    table = [head]
    for it in comparison.sources:
        same = it.num_tasks - it.better - it.worse
        low, high = it.difference.low, it.difference.high
        shown = "unknown" if low is None or high is None else f"{low:+.3g} .. {high:+.3g}"
        numbers = [number(it.first), number(it.second), f"{it.difference.value:+.3g}", shown]
        counts = [str(it.better), str(same), str(it.worse)]
        table.append([it.name, str(it.num_tasks), *numbers, *counts])
    folders = comparison.folders
    notes = [_verdict(comparison)]
    if any(comparison.only):
        a, b = comparison.only
        notes.append(f"left out: {a} tasks that A alone has a reward of, and {b} that B has")
    rows = differing({str(it.run_dir.root): it.settings for it in folders})
    settings = [f"  {key}: {first!r:.120} -> {second!r:.120}" for key, (first, second) in rows]
    return [
        *(f"{letter}  {it.run_dir.root}" for letter, it in zip("AB", folders, strict=True)),
        "",
        *aligned(table),
        "",
        *wrapped(notes),
        "",
        "settings that differ" if settings else "no setting differs",
        *wrapped(settings),
    ]


def _verdict(comparison: PairedComparison) -> str:
    """Whether the difference of all is more than noise, in a sentence."""
    it = comparison.overall
    low, high = it.difference.low, it.difference.high
    if it.better == it.worse == 0:
        return "no difference: each task earned the same in both"
    if low is None or high is None:
        few = [source.name for source in comparison.sources if source.num_tasks == 1]
        if few:
            return (
                f"unknown: one task of {few[0]!r} says nothing about its others: evaluate more of "
                "them"
            )
        return (
            f"unknown: {it.num_tasks} tasks that changed alike say nothing about others: evaluate "
            "more of them"
        )
    reach, change = (high - low) / 2, abs(it.difference.value)
    if not it.difference.is_clear:
        return (
            f"noise: the interval holds 0. With these {it.num_tasks} tasks a difference below "
            f"{reach:.2g} cannot be told from chance; more tasks, or a larger group_size, make "
            "it smaller"
        )
    word = "better" if it.difference.value > 0 else "worse"
    return f"B is {word} than A by {change:.3g} ± {reach:.2g} (95 %), more than noise"


def pairs_as_json(comparison: PairedComparison) -> dict[str, Any]:
    return {
        "runs": [str(it.run_dir.root) for it in comparison.folders],
        "sources": [{**vars(it), "difference": vars(it.difference)} for it in comparison.sources],
        "only": list(comparison.only),
        "is_clear": comparison.overall.difference.is_clear,
    }
