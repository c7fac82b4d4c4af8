"""Several runs side by side: chosen metrics, how far they differ, and the settings that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from gradus.errors import ConfigError
from gradus.monitor import aligned, terminal_width, wrapped
from gradus.monitor.statistics import MIN_STEPS, Difference, over_runs, over_steps
from gradus.report.choice import direction, shown_first, unit_of
from gradus.report.folder import RunFolder, differing, read_folder
from gradus.report.series import Axis, RunSeries, read_series
from gradus.report.text import number, signed

MAX_LAST = 50
"""Steps at the end that are averaged, unless another number is given."""
MAX_METRICS = 40
_ROWS_OVER_SEEDS = 3


@dataclass(frozen=True)
class ComparedRun:
    """One run."""

    label: str
    """Its name; its path where two runs share the name."""
    folder: RunFolder
    series: RunSeries
    setting: int
    """0 for the runs that others are compared with."""


@dataclass(frozen=True)
class Cell:
    """One metric of one run; None where the run has no number of it."""

    first: float | None
    last: float | None
    best: float | None
    """None also where neither more nor less is better."""
    mean_last: float | None
    """Over the last steps."""
    num_last: int
    """How many of the last steps have a number."""


@dataclass(frozen=True)
class Row:
    """One metric of all runs."""

    name: str
    unit: str
    cells: Sequence[Cell]
    differences: Mapping[int, Difference]
    """Place of a run, or of a setting, against the first one."""


@dataclass(frozen=True)
class RunComparison:
    """All that a table shows."""

    runs: Sequence[ComparedRun]
    rows: Sequence[Row]
    settings: Sequence[tuple[str, Sequence[Any]]]
    """Key and value in each run, where they differ."""
    num_last: int
    at: str
    """Where the runs are compared, for a person."""
    is_over_runs: bool
    """Whether settings with several runs are compared, instead of single runs."""
    num_left_out: int = 0
    """Metrics that match and are too many to show."""


def compare(
    first: Sequence[Path],
    second: Sequence[Path] = (),
    *,
    patterns: Sequence[str] = (),
    last: int | None = None,
    at: Axis | None = "steps",
) -> RunComparison:
    """The runs of `first` one by one; with `second`, both as settings with a run for each seed.

    They are compared at the last place on the axis `at` that all of them reached; None compares
    each at its own end.
    """
    runs = _read(first, second)
    wanted = list(patterns) or list(shown_first([run.folder.kind for run in runs]))
    found = [sorted({n for run in runs for n in run.series.matching([p])}) for p in wanted]
    names = list(dict.fromkeys(name for matching in found for name in matching))
    if patterns and not names:
        near = [n for n in runs[0].series.names if any(p.strip("*") in n for p in patterns)]
        known = ", ".join((near or list(runs[0].series.names))[:8]) or "none at all"
        asked = " or ".join(map(repr, patterns))
        raise ConfigError(f"no metric matches {asked}; {runs[0].label} has {known}, ...")
    if not patterns:
        names = _of_one_source_once(names, runs)
    reached, told = _at_one_place(runs, at)
    num_last = last if last is not None else _default_last(reached)
    rows = [_row(name, reached, num_last) for name in names[:MAX_METRICS]]
    return RunComparison(
        runs,
        rows,
        differing({run.label: run.folder.settings for run in runs}),
        num_last,
        told,
        is_over_runs=bool(second),
        num_left_out=max(0, len(names) - MAX_METRICS),
    )


def _read(first: Sequence[Path], second: Sequence[Path]) -> list[ComparedRun]:
    paths = [*first, *second]
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError("a run is named twice")
    folders = [read_folder(path) for path in paths]
    names = [folder.name for folder in folders]
    return [
        ComparedRun(
            folder.name if names.count(folder.name) == 1 else str(path),
            folder,
            read_series(folder.run_dir.metrics),
            setting=0 if place < len(first) else 1,
        )
        for place, (path, folder) in enumerate(zip(paths, folders, strict=True))
    ]


def _of_one_source_once(names: list[str], runs: Sequence[ComparedRun]) -> list[str]:
    """Without the reward of the only source, which is the reward of all."""
    parts = [
        name for name in names if name.startswith(("episode/", "eval/")) and name.count("/") > 2
    ]
    parts += [name for name in names if name.startswith("eval/") and name.count("/") == 2]
    kept = list(names)
    for part in parts:
        stage, _, rest = part.split("/", 2)
        whole = f"{stage}/{rest}"
        if whole in names and all(_same(run.series, part, whole) for run in runs):
            kept.remove(part)
    return kept


def _same(series: RunSeries, part: str, whole: str) -> bool:
    one, all_of_them = series.values(part), series.values(whole)
    return [value for _, value in one] == [value for _, value in all_of_them]


def _at_one_place(
    runs: Sequence[ComparedRun], at: Axis | None
) -> tuple[Sequence[ComparedRun], str]:
    """The runs up to where all of them came, and the words for it."""
    if at is None:
        return runs, "each run at its own end"
    ends = {run.label: run.series.end(at) for run in runs if run.series.steps}
    if lost := [label for label, end in ends.items() if end is None]:
        raise ConfigError(f"--at {at}: {lost[0]} counts none; use --at steps")
    known = [end for end in ends.values() if end is not None]
    if len(known) < 2 or min(known) == max(known):
        return runs, ""
    end = min(known)
    cut = [replace(run, series=run.series.until(end, at)) for run in runs]
    unit = "trained tokens" if at == "tokens" else at
    shown = f"step {end:,.0f}" if at == "steps" else f"{end:,.6g} {unit}"
    return cut, f"compared at {shown}, the last that all runs reached; --at end takes their ends"


def _default_last(runs: Sequence[ComparedRun]) -> int:
    shortest = min((len(run.series.steps) for run in runs if run.series.steps), default=1)
    return max(1, min(MAX_LAST, shortest // 2))


def _row(name: str, runs: Sequence[ComparedRun], num_last: int) -> Row:
    better = direction(name)
    values = [[value for _, value in run.series.values(name)] for run in runs]
    # The last steps of the run, also where the metric has no number in some of them.
    versions = _versions(name, runs)
    ends = [_end(run.series, name, num_last, versions) for run in runs]
    cells = [
        Cell(
            first=of_run[0] if of_run else None,
            last=of_run[-1] if of_run else None,
            best=(max(of_run) if better > 0 else min(of_run)) if of_run and better else None,
            mean_last=fmean(end) if end else None,
            num_last=len(end),
        )
        for of_run, end in zip(values, ends, strict=True)
    ]
    return Row(name, unit_of(name), cells, _differences(runs, cells, ends))


def _versions(name: str, runs: Sequence[ComparedRun]) -> set[int]:
    """Versions of which every run that has evaluations measured it."""
    found = [
        {point.step for point, _ in run.series.values(name)}
        for run in runs
        if run.series.evaluations and run.series.of(name) is run.series.evaluations
    ]
    return set.intersection(*measured) if (measured := [it for it in found if it]) else set()


def _end(series: RunSeries, name: str, num_last: int, versions: set[int]) -> list[float]:
    """The last steps; of evaluations, which are few and of other models each, the last alone, of
    the same version in all runs where there is one."""
    if series.evaluations and series.of(name) is series.evaluations:
        points = [it for it, _ in series.values(name)]
        return [it.metrics[name] for it in points if not versions or it.step == max(versions)][-1:]
    points = list(series.of(name)[-num_last:])
    return [point.metrics[name] for point in points if name in point.metrics]


def _differences(
    runs: Sequence[ComparedRun], cells: Sequence[Cell], ends: Sequence[Sequence[float]]
) -> dict[int, Difference]:
    if any(run.setting for run in runs):
        groups = [
            [c.mean_last for r, c in zip(runs, cells, strict=True) if r.setting == s]
            for s in (0, 1)
        ]
        known = [[value for value in group if value is not None] for group in groups]
        return {1: over_runs(*known)} if all(known) else {}
    return {
        place: over_steps(ends[0], end)
        for place, end in enumerate(ends)
        if place and end and ends[0]
    }


_EXTRA_COLUMNS = (4, 2, 3)
"""Best, first and last number: left out, in this order, of a table that is too wide."""


def as_lines(comparison: RunComparison, *, width: int | None = None) -> list[str]:
    head = ["metric", "run", "first", "last", "best", f"last {comparison.num_last}"]
    head += ["difference", "95 % interval"]
    table = [head]
    for row in comparison.rows:
        unit = f" ({row.unit})" if row.unit else ""
        table += [
            [f"{row.name}{unit}" if place == 0 else "", *cells]
            for place, cells in enumerate(_cells(row, comparison))
        ]
    most, left_out, lines = width or terminal_width(), list[int](), aligned(table, num_left=2)
    needed = max(map(len, lines))
    for column in _EXTRA_COLUMNS:
        if max(map(len, lines)) > most:
            left_out.append(column)
            cut = [[it for n, it in enumerate(row) if n not in left_out] for row in table]
            lines = aligned(cut, num_left=2)
            if max(map(len, lines)) > most:
                lines = _stacked(cut)
    notes = [*_notes(comparison), *_setting_lines(comparison)]
    if left_out:
        names = ", ".join(head[column] for column in sorted(left_out))
        notes.insert(0, f"left out: {names}; {needed} columns show them (COLUMNS={needed})")
    return [
        *wrapped(_run_lines(comparison), width=most),
        "",
        *lines,
        "",
        *_seed_lines(comparison),
        *wrapped(notes, width=most),
    ]


def _seed_lines(comparison: RunComparison) -> list[str]:
    """The first rows once for each setting, where runs differ in their seeds as well."""
    others = [values for key, values in comparison.settings if key != "seed"]
    names = [key for key, _ in comparison.settings if key != "seed"]
    groups: dict[tuple[str, ...], list[int]] = {}
    for place in range(len(comparison.runs)):
        chosen = (f"{k} = {it[place]!r}" for k, it in zip(names, others, strict=True))
        groups.setdefault(tuple(chosen), []).append(place)
    has_seeds = len(names) < len(comparison.settings)
    if comparison.is_over_runs or not names or not has_seeds or len(groups) == len(comparison.runs):
        return []
    table = [["metric", "over seeds", "runs", "mean", "least", "most"]]
    for row in comparison.rows[:_ROWS_OVER_SEEDS]:
        for nth, (settings, places) in enumerate(groups.items()):
            means = [it for place in places if (it := row.cells[place].mean_last) is not None]
            told = (fmean(means), min(means), max(means)) if means else (None, None, None)
            setting = ", ".join(
                it if len(it) <= 60 else f"{it[:28]} … {it[-28:]}" for it in settings
            )
            table.append(["" if nth else row.name, setting, str(len(means)), *map(number, told)])
    return [*aligned(table, num_left=2), ""]


def _stacked(table: Sequence[Sequence[str]]) -> list[str]:
    """The table with each metric above its rows instead of in front of them."""
    lines = aligned([row[1:] for row in table])
    names = ["", *(row[0] for row in table[1:])]
    shown = (([name] if name else [], line) for name, line in zip(names, lines, strict=True))
    return [it for above, line in shown for it in (*above, f"  {line}")]


def _run_lines(comparison: RunComparison) -> list[str]:
    width = max(len(run.label) for run in comparison.runs)
    return [
        f"{_side(run, comparison)}{run.label:<{width}}  {run.folder.kind or 'run'}, "
        f"{run.folder.outcome}, {len(run.series.steps):,} "
        f"{'sampled records' if run.series.is_sampled else 'steps'}"
        for run in comparison.runs
    ]


def _side(run: ComparedRun, comparison: RunComparison) -> str:
    return f"{'AB'[run.setting]}  " if comparison.is_over_runs else ""


def _cells(row: Row, comparison: RunComparison) -> list[list[str]]:
    found = []
    for place, (run, cell) in enumerate(zip(comparison.runs, row.cells, strict=True)):
        numbers = (cell.first, cell.last, cell.best, cell.mean_last)
        difference = None if comparison.is_over_runs else row.differences.get(place)
        cells = [_side(run, comparison) + run.label, *map(number, numbers)]
        found.append([*cells, *_difference(difference)])
    if comparison.is_over_runs:
        found.append(["B minus A", "", "", "", "", *_difference(row.differences.get(1))])
    return found


def _difference(difference: Difference | None) -> list[str]:
    if difference is None:
        return ["", ""]
    if difference.low is None or difference.high is None:
        return [signed(difference.value), "unknown"]
    mark = " *" if difference.is_clear else "  "
    return [
        signed(difference.value),
        f"{signed(difference.low)} .. {signed(difference.high)}{mark}",
    ]


def _notes(comparison: RunComparison) -> list[str]:
    last = f"{comparison.num_last} steps" if comparison.num_last > 1 else "step"
    if any(run.series.is_sampled for run in comparison.runs):
        last = f"{comparison.num_last} records (sampled ones, where the file is long)"
    ways = {d.way for row in comparison.rows for d in row.differences.values()}
    lines = [comparison.at] if comparison.at else []
    if any(row.name.startswith("eval/") for row in comparison.rows):
        lines.append("of an evaluation only the last version counts, the same of all runs if any")
    if comparison.is_over_runs:
        lines.append(
            f"difference: mean over the runs of B minus that of A, of their last {last}; "
            "interval: Welch, over runs"
        )
        if "runs" not in ways:
            lines.append("no interval: that takes two runs or more on each side, not all alike")
    else:
        lines.append(
            f"difference: to {comparison.runs[0].label}, of the mean of the last {last}; "
            "interval: Welch, over 5 blocks of these steps"
        )
        lines.append("it covers the noise of steps within these runs, not that of another seed")
        if "steps" not in ways:
            lines.append(f"no interval: that takes {MIN_STEPS} steps or more; see --last")
    if any(d.is_clear for row in comparison.rows for d in row.differences.values()):
        chance = f"of {len(comparison.rows)} metrics without any difference, one in 20 gets one too"
        lines.append(f"*: the interval does not hold 0; {chance}")
    if comparison.num_left_out:
        lines.append(f"{comparison.num_left_out} more metrics match; choose with --metric")
    return lines


def _setting_lines(comparison: RunComparison) -> list[str]:
    notes = [
        f"{run.label}: {run.folder.settings.note}"
        for run in comparison.runs
        if run.folder.settings.note
    ]
    if not comparison.settings:
        return ["", "no setting differs", *notes]
    lines = ["", "settings that differ", *notes]
    for key, values in comparison.settings:
        shown = "  |  ".join("-" if value is None else repr(value)[:60] for value in values)
        lines.append(f"  {key}  {shown}")
    return lines


def as_json(comparison: RunComparison) -> dict[str, Any]:
    return {
        "runs": [
            {
                "name": run.label,
                "folder": str(run.folder.run_dir.root),
                "kind": run.folder.kind,
                "outcome": run.folder.outcome,
                "steps": len(run.series.steps),
                "is_sampled": run.series.is_sampled,
                "setting": run.setting,
            }
            for run in comparison.runs
        ],
        "num_last": comparison.num_last,
        "at": comparison.at,
        "metrics": [
            {
                "name": row.name,
                "unit": row.unit,
                "runs": [vars(cell) for cell in row.cells],
                "differences": {str(place): vars(d) for place, d in row.differences.items()},
            }
            for row in comparison.rows
        ],
        "settings": {key: list(values) for key, values in comparison.settings},
    }
