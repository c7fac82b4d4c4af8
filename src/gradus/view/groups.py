"""All replies to one task side by side, and what the same task earned over the whole run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradus.errors import ConfigError
from gradus.run.episodes import RecordedEpisode, locate_episodes
from gradus.view.index import EpisodeIndex, EpisodePlace

MAX_REPLIES = 32
"""In one answer; the others come when they are asked for."""
MAX_CHARACTERS = 6_000
"""Of all that one reply says; the episode itself has the rest."""
_MAX_RECORD_BYTES = 24 << 20
"""Read for one answer; what lies behind has its numbers and no text."""
_MAX_ASKED = 4_000
_MAX_KEYS = 1_000
_MAX_STEPS = 4_000
_SEARCH_SECONDS = 0.4
"""Of one answer; others may ask between two."""
_BARS = ("reward", "advantage", "tokens")
SUMMED_BY: Mapping[str, Sequence[str]] = {
    "group": ("group",),
    "task": ("purpose", "source", "task"),
}
"""The columns that episodes of one row have in common."""
SUMS = ("episodes", "reward", "least", "most", "advantage", "tokens", "first step", "last step")
"""Columns of episodes that are taken together: their number, means, extremes and steps."""


def group_page(
    index: EpisodeIndex,
    key: EpisodePlace,
    *,
    sort: str = "",
    first: int = 0,
    with_texts: bool = True,
) -> dict[str, Any]:
    """The group of an episode; ConfigError when no episode begins there.

    Without groups, and in an evaluation, those of the same task in that step or version.
    """
    own = index.rows_of(key)
    if not len(own):
        raise ConfigError(
            "no episode begins there: it was deleted, cut off by a resume, or is not read yet"
        )
    about = next(index.cells(own))
    task = {name: [about[name]] for name in ("purpose", "source", "task")}
    # In an evaluation groups have the names of tasks, the same ones for every version.
    is_named = about["group"] and about["purpose"] == "train"
    common = {it: [str(about[it])] for it in (("group",) if is_named else ("group", "step"))}
    rows = index.order(task | common, sort or "-reward")
    shown = rows[first : first + MAX_REPLIES] if with_texts else rows[:0]
    replies, asked, left = [], None, _MAX_RECORD_BYTES
    for row, cells in zip(shown.tolist(), index.cells(shown), strict=True):
        place = index.find(index.place_of(row))
        left -= place[2] - place[1] if place else 0
        episode = read_place(place) if place and left > 0 else None
        asked = asked or episode
        replies.append(cells | _said(episode))
    columns = {name: index.column(name)[rows] for name in _BARS}
    return {
        **{name: about[name] for name in ("group", "source", "task", "purpose", "step", "key")},
        "asked": _asked(asked)[-_MAX_ASKED:],
        "answer": asked.answer[:_MAX_ASKED] if asked else "",
        "title": asked.title[:200] if asked else "",
        "count": len(rows),
        "from": first,
        "ranges": {name: _range(values) for name, values in columns.items()},
        "mean": _finite(columns["reward"], np.mean),
        "spread": _finite(columns["reward"], _spread),
        "keys": [str(index.place_of(row)) for row in rows[:_MAX_KEYS].tolist()],
        "replies": replies,
        "over_run": _over_run(index, index.order(task, "step")) if about["task"] else [],
    }


def summed_rows(
    index: EpisodeIndex, by: str, where: Mapping[str, Sequence[str]], sort: str, *, known: int
) -> dict[str, Any]:
    """A table with a row for each group, or each task of a source in training or evaluation, of
    the episodes that pass among those `known` first: columns by their names, in the order of one;
    newest first without."""
    if by not in SUMMED_BY:
        raise ConfigError(f"by: {by[:40]!r} is none of {', '.join(SUMMED_BY)}")
    names = dict.fromkeys((*SUMMED_BY[by], "task", *SUMS))
    if (name := sort.removeprefix("-")) and name not in names:
        raise ConfigError(f"no column {name[:40]!r}; there are {', '.join(names)}")
    passing = index.order(where)
    passing = passing[passing < known]
    return index.remembered(
        ("sums", by, sort, str(known)), where, lambda: _sums(index, by, passing, sort)
    )


def _sums(index: EpisodeIndex, by: str, passing: NDArray[np.int64], sort: str) -> dict[str, Any]:
    rows = passing[index.having(by, bool)[passing]]
    kinds = np.zeros(len(rows), "i8")
    for name in SUMMED_BY[by]:
        kinds = kinds * len(index.words(name)) + index.column(name)[rows]
    steps = index.shown_steps[rows].astype("f8")
    if by == "group":  # As on the page of a group.
        is_evaluation = index.having("purpose", "eval".__eq__)[rows]
        versions = np.where(is_evaluation, steps.astype("i8") + 1, 0)
        kinds = kinds * (versions.max(initial=0) + 1) + versions
    _, newest, which = np.unique(kinds, return_index=True, return_inverse=True)
    rewards = index.column("reward")[rows]
    first = rows[newest]
    words = {name: np.array(index.words(name), object) for name in (*SUMMED_BY[by], "task")}
    sums: dict[str, Any] = {
        **{name: known[index.column(name)[first]] for name, known in words.items()},
        "episodes": np.bincount(which).astype("f8"),
        "least": _folded(which, rewards, np.fmin),
        "most": _folded(which, rewards, np.fmax),
        "first step": _folded(which, steps, np.fmin),
        "last step": _folded(which, steps, np.fmax),
        **{it: _means(which, np.asarray(index.column(it)[rows], "f8")) for it in _BARS},
    }
    name = sort.removeprefix("-") or "last step"
    values = sums[name]
    if values.dtype == object:
        values = np.unique(values, return_inverse=True)[1].astype("f8")
    is_down = sort.startswith("-") or not sort
    order = np.lexsort((newest, np.nan_to_num(-values if is_down else values), np.isnan(values)))
    table = {column: cells[order] for column, cells in sums.items()}
    return {"columns": table, "rows": first[order], "of": len(rows), "passes": len(passing)}


def _means(which: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    """The mean of the finite values of each; NaN where there is none."""
    is_finite = np.isfinite(values)
    counts = np.bincount(which, weights=is_finite)
    totals = np.bincount(which, weights=np.where(is_finite, values, 0.0))
    return np.where(counts > 0, totals / np.maximum(counts, 1), np.nan)


def _folded(which: NDArray[Any], values: NDArray[Any], fold: np.ufunc) -> NDArray[Any]:
    found = np.full(int(which.max(initial=-1)) + 1, np.nan)
    fold.at(found, which, values)
    return found


def summed_cells(
    index: EpisodeIndex, sums: Mapping[str, Any], first: int, count: int
) -> list[dict[str, Any]]:
    """Some rows of such a table, each with the key of the newest episode in it."""
    names = list(sums["columns"])
    parts = [sums["columns"][name][first : first + count].tolist() for name in names]
    rows = [dict(zip(names, cells, strict=True)) for cells in zip(*parts, strict=True)]
    places = sums["rows"][first : first + count].tolist()
    return [
        {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in cells.items()}
        | {"key": str(index.place_of(row))}
        for cells, row in zip(rows, places, strict=True)
    ]


def read_place(place: tuple[Any, int, int]) -> RecordedEpisode | None:
    """The episode whose record lies in a file from a byte on."""
    path, start, _ = place
    try:
        return next((it for _, it in locate_episodes(path, start=start, stop=start + 1)), None)
    except OSError:  # It went since the index was read.
        return None


def search_texts(
    index: EpisodeIndex, rows: NDArray[np.int64], text: str, first: int
) -> tuple[NDArray[np.int64], int]:
    """Those of the rows from `first` on that have a text in a prompt or a reply, as far as a share
    of a second reaches; and where the next search begins."""
    wanted, until, found = text.lower(), time.monotonic() + _SEARCH_SECONDS, []
    for row in rows[first:].tolist():
        first += 1
        episode = read_place(index.find_row(row))
        messages = (it for trace in (episode.traces if episode else ()) for it in trace.messages)
        if any(wanted in it.text.lower() for it in messages):
            found.append(row)
        if time.monotonic() > until:
            break
    return np.array(found, "i8"), first


def _said(episode: RecordedEpisode | None) -> dict[str, Any]:
    """What was sampled, turn by turn."""
    trace = episode.shown if episode else None
    if episode is None or trace is None:
        return {"said": None}
    left, said = MAX_CHARACTERS, []
    texts = [it.text for it in trace.messages if it.is_sampled]
    for text in texts:
        if left <= 0:
            break
        said.append(text[:left])
        left -= len(text)
    return {
        "said": said,
        "trace": next(place for place, it in enumerate(episode.traces) if it is trace),
        "is_cut": sum(map(len, texts)) > MAX_CHARACTERS,
        "why": f"{episode.error}: {episode.error_message[:400]}" if episode.error else "",
    }


def _asked(episode: RecordedEpisode | None) -> str:
    """What came before the first reply."""
    trace = episode.shown if episode else None
    found = []
    for message in trace.messages if trace else []:
        if message.is_sampled:
            break
        found.append(message.text)
    return "\n".join(found)


def _over_run(index: EpisodeIndex, rows: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Mean, least and most reward in each step that played the task, with one of its episodes."""
    steps = index.column("step")[rows]
    firsts = np.flatnonzero(np.diff(steps, prepend=-1))
    found = []
    for begin, end in list(zip(firsts, [*firsts[1:], len(rows)], strict=True))[-_MAX_STEPS:]:
        rewards = index.column("reward")[rows[begin:end]]
        low, high = _range(rewards)
        found.append(
            {
                "step": int(steps[begin]),
                "mean": _finite(rewards, np.mean),
                "low": low,
                "high": high,
                "count": int(end - begin),
                "key": str(index.place_of(int(rows[begin]))),
            }
        )
    return found


def _range(values: NDArray[Any]) -> tuple[float | None, float | None]:
    return _finite(values, np.min), _finite(values, np.max)


def _spread(values: NDArray[Any]) -> float:
    """The standard deviation; exactly 0 for equal values, whose mean may be off by a rounding."""
    return float(values.std()) if values.min() < values.max() else 0.0


def _finite(values: NDArray[Any], fold: Any) -> float | None:
    finite = values[np.isfinite(np.asarray(values, "f8"))]
    return float(fold(finite)) if len(finite) else None
