"""The episodes of a run as a terminal shows them: a table, or tokens in colours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradus.errors import ConfigError
from gradus.log import printable
from gradus.run.episodes import read_record
from gradus.run.paths import RunDirectory
from gradus.view.episode import TokenRecords, token_rows
from gradus.view.index import WORDS, EpisodeIndex, EpisodePlace, open_index

COLOURS = (
    *("engine", "trainer", "mismatch", "entropy", "advantage", "weight", "push", "version"),
    *("reference", "drift"),
)
"""Numbers of a token that `--tokens` takes."""
_STEPS: Mapping[str, Sequence[float]] = {
    "engine": (0.1, 0.5, 1, 2, 4),
    "trainer": (0.1, 0.5, 1, 2, 4),
    "mismatch": (0.02, 0.1, 0.3, 0.5, 1),
    "entropy": (0.1, 0.5, 1, 2, 3),
    "reference": (0.1, 0.5, 1, 2, 4),
    "drift": (0.02, 0.1, 0.5, 1, 2),
}
_SHADES = (230, 223, 216, 209, 203)
"""Backgrounds of the 256 colours, from little to much, with black on them."""
_COLUMNS = ("step", "reward", "advantage", "tokens", "turns", "staleness", "source", "outcome")
_MAX_CELL = 24
_WORST = 5
_BATCH = 5_000


def whole_index(run_dir: RunDirectory) -> EpisodeIndex:
    """The index of all that there is now."""
    index = open_index(run_dir)
    while index.advance(max_rows=_BATCH):
        pass
    return index


def records_of(
    index: EpisodeIndex, where: Mapping[str, Sequence[str]], sort: str
) -> Iterator[dict[str, Any]]:
    """The records behind rows; one that went away meanwhile is left out."""
    for _, place in index.places(where, sort):
        if (record := read_record(*place)) is not None:
            yield record


def shown_rows(
    index: EpisodeIndex, where: Mapping[str, Sequence[str]], sort: str, limit: int | None
) -> list[dict[str, Any]]:
    """The rows that pass, with steps of training from 1 on."""
    rows = index.cells(where, sort, count=limit)
    return [it | {"step": it["step"] + (it["purpose"] == "train")} for it in rows]


def table_lines(
    index: EpisodeIndex, found: Sequence[Mapping[str, Any]], passing: int
) -> Iterator[str]:
    """A line for each row below the names of the columns, then how many there are."""
    optional = [name for name in ("dropped", "error") if any(it[name] for it in found)]
    parts = index.parts if len(index.parts) > 1 else []
    names = [*_COLUMNS, *optional, *parts, "key"]
    texts = [[_cell(it[name]) for name in names] for it in found]
    titles = [printable(name.removeprefix("part:")) for name in names]
    widths = [max(map(len, column)) for column in zip(titles, *texts, strict=True)]
    is_word = [name in WORDS or name == "key" for name in names]
    for line in [titles, *texts] if texts else []:
        pairs = zip(line, widths, is_word, strict=True)
        yield "  ".join(it.ljust(n) if word else it.rjust(n) for it, n, word in pairs).rstrip()
    counted = f"{passing:,} of {index.num_rows:,}" if passing != index.num_rows else f"{passing:,}"
    more = f", {len(found):,} shown (--limit)" if len(found) < passing else ""
    yield f"{counted} episodes{more}"
    if index.broken.count:
        yield f"{index.broken.count:,} records cannot be read"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:.4g}" if isinstance(value, float) else printable(str(value))
    return text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 1]}…"


def token_lines(
    index: EpisodeIndex, rows: Sequence[Mapping[str, Any]], colour: str, *, is_coloured: bool
) -> Iterator[str]:
    """What was sampled in each episode, and its tokens that stand out most in one number.

    ConfigError for a number that tokens do not have.
    """
    if colour not in COLOURS:
        raise ConfigError(f"--tokens {colour}: choose one of {', '.join(COLOURS)}")
    reader = TokenRecords(index.run_dir)
    for cells in rows:
        place = index.find(EpisodePlace.of(cells["key"]))
        record = read_record(*place) if place else None
        found: Mapping[str, Any] = reader.of(record) if record else {"why": "the record went away"}
        yield f"{cells['key']}  reward {_cell(cells['reward'])}  tokens {cells['tokens']:,}"
        if "why" in found:
            yield f"  no tokens: {found['why']}"
            continue
        tokens = [it for it in token_rows(found) if it["sampled"]]
        known = [it for it in tokens if it[colour] is not None]
        if not known:
            needs = {"version": "versions", "reference": colour, "drift": "reference"}.get(
                colour, "trainer"
            )
            why = found["missing"].get(needs, "nobody noted it")
            yield f"  no {colour}: {why}"
            continue
        limits = _limits(colour, known)
        if is_coloured:
            yield "".join(_painted(it, colour, limits) for it in tokens)
        if colour == "version":
            continue
        worst = sorted(known, key=lambda it: -_strength(colour, it[colour]))[:_WORST]
        yield f"  {colour} of the tokens that stand out most:"
        for it in worst:
            yield f"  {it[colour]:>10.4g}  '{printable(_text(it))}'"


def _strength(colour: str, value: float) -> float:
    return -value if colour in ("engine", "trainer", "reference") else abs(value)


def _limits(colour: str, rows: Sequence[Mapping[str, Any]]) -> Sequence[float]:
    if colour == "version":
        return [version - 0.5 for version in sorted({it[colour] for it in rows})[1:6]]
    most = max((_strength(colour, it[colour]) for it in rows), default=0.0)
    return _STEPS.get(colour) or [share * most for share in (0.02, 0.2, 0.4, 0.6, 0.8)]


def _painted(row: Mapping[str, Any], colour: str, limits: Sequence[float]) -> str:
    text = "↵\n".join(map(printable, _text(row).split("\n")))
    if row[colour] is None:
        return text
    level = sum(_strength(colour, row[colour]) > limit for limit in limits)
    return f"\x1b[30;48;5;{_SHADES[level - 1]}m{text}\x1b[0m" if level else text


def _text(row: Mapping[str, Any]) -> str:
    return str(row["text"]) if row["text"] is not None else f"<{row['token']}>"
