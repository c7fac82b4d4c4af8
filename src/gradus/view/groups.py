"""All replies to one task side by side, and what the same task earned over the whole run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from gradus.errors import ConfigError
from gradus.run.episodes import RecordedEpisode, locate_episodes
from gradus.view.index import KEY, NEWEST, SHOWN_STEP, EpisodeIndex, EpisodePlace

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
    about = index.cells_of(key)
    task = {name: [about[name]] for name in ("purpose", "source", "task")}
    # In an evaluation groups have the names of tasks, the same ones for every version.
    is_named = about["group"] and about["purpose"] == "train"
    common = {it: [str(about[it])] for it in (("group",) if is_named else ("group", "step"))}
    rows = index.cells(task | common, sort or "-reward")
    replies, asked, left = [], None, _MAX_RECORD_BYTES
    shown = index.places(task | common, sort or "-reward", first=first)
    for cells in rows[first : first + MAX_REPLIES] if with_texts else []:
        _, place = next(shown)
        left -= place[2] - place[1]
        episode = read_place(place) if left > 0 else None
        asked = asked or episode
        replies.append(cells | _said(episode))
    columns = {name: [it[name] for it in rows if it[name] is not None] for name in _BARS}
    return {
        **{name: about[name] for name in ("group", "source", "task", "purpose", "step", "key")},
        "asked": _asked(asked)[-_MAX_ASKED:],
        "answer": asked.answer[:_MAX_ASKED] if asked else "",
        "title": asked.title[:200] if asked else "",
        "count": len(rows),
        "from": first,
        "ranges": {
            name: (min(values, default=None), max(values, default=None))
            for name, values in columns.items()
        },
        "mean": fmean(columns["reward"]) if columns["reward"] else None,
        "spread": pstdev(columns["reward"]) if columns["reward"] else None,
        "keys": [it["key"] for it in rows[:_MAX_KEYS]],
        "replies": replies,
        "over_run": _over_run(index, task) if about["task"] else [],
    }


def summed_rows(
    index: EpisodeIndex,
    by: str,
    where: Mapping[str, Sequence[str]],
    sort: str,
    *,
    known: int,
    first: int = 0,
    count: int = 1_000,
) -> dict[str, Any]:
    """Rows of a table with one for each group, or each task of a source in training or evaluation,
    of the episodes that pass among those `known` first, in the order of a column; newest first
    without. Each has the key of the newest episode in it."""
    if by not in SUMMED_BY:
        raise ConfigError(f"by: {by[:40]!r} is none of {', '.join(SUMMED_BY)}")
    names = dict.fromkeys((*SUMMED_BY[by], "task", *SUMS))
    name = sort.removeprefix("-")
    if name and name not in names:
        raise ConfigError(f"no column {name[:40]!r}; there are {', '.join(names)}")
    # A group of an evaluation is of one version, as on the page of a group.
    version = "CASE WHEN purpose = 'eval' THEN step END"
    common = f'"group", {version}' if by == "group" else "purpose, source, task"
    has_one = f"AND \"{by}\" <> ''"
    of = index.select(f"count(DISTINCT ({common})), count(*)", where, has_one, known=known)
    ((passing, num_of),) = of.fetchall()
    direction = "DESC" if sort.startswith("-") or not sort else "ASC"
    found = index.select(
        f"""{", ".join(f'any_value("{it}") AS "{it}"' for it in SUMMED_BY[by][:2])},
        first(task ORDER BY {NEWEST}) AS task, count(*) AS episodes, avg(reward) AS reward,
        min(reward) AS least, max(reward) AS most, avg(advantage) AS advantage,
        avg(tokens) AS tokens, min({SHOWN_STEP}) AS "first step", max({SHOWN_STEP}) AS "last step",
        first({KEY} ORDER BY {NEWEST}) AS key""",
        where,
        f"""{has_one} GROUP BY {common} ORDER BY "{name or "last step"}" {direction} NULLS LAST,
        max(step) DESC, first("offset" ORDER BY {NEWEST}), min("row")
        LIMIT {count} OFFSET {first}""",
        known=known,
    )
    columns = list(dict.fromkeys([*names, "key"]))
    rows = [dict(zip(columns, it, strict=True)) for it in found.fetchall()]
    passes = index.count(where, known)
    return {"rows": rows, "passing": passing, "of": num_of, "passes": passes}


def read_place(place: tuple[Any, int, int]) -> RecordedEpisode | None:
    """The episode whose record lies in a file from a byte on."""
    path, start, _ = place
    try:
        return next((it for _, it in locate_episodes(path, start=start, stop=start + 1)), None)
    except OSError:  # It went since the index was read.
        return None


def search_texts(
    index: EpisodeIndex, where: Mapping[str, Sequence[str]], sort: str, text: str, first: int
) -> tuple[list[dict[str, Any]], int]:
    """The rows from `first` on that have a text in a prompt or a reply, as far as a share of a
    second reaches; and where the next search begins."""
    wanted, until, found = text.lower(), time.monotonic() + _SEARCH_SECONDS, []
    for key, place in index.places(where, sort, first=first):
        first += 1
        episode = read_place(place)
        messages = (it for trace in (episode.traces if episode else ()) for it in trace.messages)
        if any(wanted in it.text.lower() for it in messages):
            found.append(index.cells_of(key))
        if time.monotonic() > until:
            break
    return found, first


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


def _over_run(index: EpisodeIndex, task: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Mean, least and most reward in each step that played the task, with one of its episodes."""
    found = index.select(
        f"step, avg(reward), min(reward), max(reward), count(*), first({KEY} ORDER BY {NEWEST})",
        task,
        f"GROUP BY step ORDER BY step DESC LIMIT {_MAX_STEPS}",
    ).fetchall()
    names = ("step", "mean", "low", "high", "count", "key")
    return [dict(zip(names, it, strict=True)) for it in reversed(found)]
