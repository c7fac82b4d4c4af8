"""The episodes of a run as columns of numbers, which grow with the run: what the table filters."""

from __future__ import annotations

import contextlib
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from gradus.errors import ConfigError
from gradus.run.episodes import RecordedEpisode, locate_episodes
from gradus.run.json_lines import BrokenLines, RawLine
from gradus.run.paths import Purpose, RunDirectory
from gradus.run.records import read_cuts
from gradus.view.filters import passing
from gradus.wire.versions import VersionSpan, staleness

T = TypeVar("T")
NUMBERS: Mapping[str, str] = {
    "step": "i4",
    "reward": "f8",
    "advantage": "f8",
    "tokens": "i4",
    "turns": "i4",
    "staleness": "f4",
}
"""Columns of numbers; NaN where an episode has none."""
WORDS: Mapping[str, str] = {
    "purpose": "i1",
    "source": "i4",
    "agent": "i4",
    "outcome": "i1",
    "dropped": "i4",
    "error": "i4",
    "task": "i4",
    "group": "i4",
}
"""Columns of words: each cell is the place of its word in a list."""
_PLACES: Mapping[str, str] = {"file": "i4", "offset": "i8", "size": "i4"}
EXPRESSION = "where"
"""Name of the filter that is written out, see `filters`; the others name a column."""
HISTOGRAMS = ("reward", "tokens", "staleness")
MAX_PARTS = 16
"""Parts of the reward with a column of their own, `part:NAME`."""
_BINS = 24
_PURPOSES: tuple[Purpose, ...] = ("train", "eval")
_MAX_FOUND, _MAX_FOUND_ROWS = 16, 6_000_000
"""Filtered, sorted and summed tables that are remembered, and rows of all of them together."""
_FIRST_ROWS = 1024


class EpisodePlace(NamedTuple):
    """Where the record of an episode begins; what an address on the page names it by."""

    purpose: Purpose
    step: int
    offset: int

    def __str__(self) -> str:
        return f"{self.purpose}-{self.step}-{self.offset}"


@dataclass
class _File:
    """A file of episodes, as far as it was read."""

    path: Path
    purpose: Purpose
    step: int
    place: int
    """In the list of files, which a row notes."""
    read: int = 0
    last: tuple[int, int, int] | None = None
    """Start, end and CRC-32 of the last line, which stands while nothing was cut."""


@dataclass
class EpisodeIndex:
    """Owns the columns. `advance` reads on; everything else answers from what was read.

    >>> index = EpisodeIndex(run_dir)  # doctest: +SKIP
    >>> while index.advance(max_rows=2000): ...  # doctest: +SKIP
    >>> index.order({"reward": ["..0.2"]}, "-tokens")[:100]  # doctest: +SKIP
    """

    run_dir: RunDirectory
    num_rows: int = 0
    generation: int = 0
    """Raised when rows went away, after which a number of a row means another one."""
    broken: BrokenLines = field(default_factory=BrokenLines)
    num_parts_left_out: int = 0
    _columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    _words: dict[str, dict[str, int]] = field(default_factory=dict)
    _files: dict[tuple[Purpose, int], _File] = field(default_factory=dict)
    _by_place: list[_File] = field(default_factory=list)
    _num_cuts: int = 0
    _is_checked: bool = True
    _todo: list[tuple[_File, int]] = field(default_factory=list)
    _found: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = {**NUMBERS, **WORDS, **_PLACES}
        self._columns = {name: np.zeros(_FIRST_ROWS, kind) for name, kind in kinds.items()}
        self._words = {name: {} for name in WORDS}
        self._num_cuts = len(read_cuts(self.run_dir))

    @property
    def parts(self) -> list[str]:
        """Columns of parts of the reward."""
        return [name for name in self._columns if name.startswith("part:")]

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """All that was read, as arrays and as what JSON holds."""
        files = [
            [it.path.parent.name, it.purpose, it.step, it.read, it.last] for it in self._by_place
        ]
        words = {name: list(known) for name, known in self._words.items()}
        about = {"files": files, "words": words, "cuts": self._num_cuts}
        return {name: self.column(name) for name in self._columns}, about

    def restore(self, columns: Mapping[str, NDArray[Any]], about: Mapping[str, Any]) -> None:
        """Begin from a state; what of the files changed since is found by the next `advance`.

        Raises what Python does when it is no state, and is as it was then.
        """
        rows = len(columns["step"])
        kinds = {**NUMBERS, **WORDS, **_PLACES}
        parts = {name: "f8" for name in columns if name.startswith("part:")}
        checked = {name: np.asarray(columns[name], kind) for name, kind in (kinds | parts).items()}
        words = {
            name: {str(word): place for place, word in enumerate(about["words"][name])}
            for name in WORDS
        }
        files = [
            _File(
                self.run_dir.episodes / re.fullmatch(r"step_\d+", folder)[0] / f"{purpose}.jsonl",  # type: ignore[index]
                *("train" if purpose == "train" else "eval", int(step), place, int(read)),
                tuple(map(int, last)) if last else None,  # type: ignore[arg-type]
            )
            for place, (folder, purpose, step, read, last) in enumerate(about["files"])
        ]
        limits = {name: len(of) for name, of in words.items()} | {"file": len(files)}
        for name, column in checked.items():
            if column.shape != (rows,) or (
                rows and name in limits and not 0 <= column.min() <= column.max() < limits[name]
            ):
                raise ValueError(f"column {name} is damaged")
        self._columns, self._words, self._by_place = checked, words, files
        # The last of a step is the one that is read on; those before it were dropped.
        self._files = {(it.purpose, it.step): it for it in files}
        self.num_rows, self._num_cuts = rows, int(about["cuts"])
        self._is_checked = False

    def column(self, name: str) -> NDArray[Any]:
        """One column, without the room that is kept for more rows."""
        return self._columns[name][: self.num_rows]

    def words(self, name: str) -> list[str]:
        """The words that occur in a column."""
        return list(self._words[name])

    @property
    def first_words(self) -> dict[str, list[str]]:
        """Two of each column, which say whether it tells anything."""
        return {name: list(islice(known, 2)) for name, known in self._words.items()}

    def progress(self) -> tuple[int, int]:
        """Bytes that were read, and bytes that there are as far as is known."""
        left = sum(max(0, size - file.read) for file, size in self._todo)
        done = sum(file.read for file in self._files.values())
        return done, done + left

    def advance(self, *, max_rows: int) -> bool:
        """Read up to so many rows more; whether there is more to read now."""
        if not self._todo:
            self._look()
        num_left = max_rows
        while self._todo and num_left > 0:
            file, size = self._todo[-1]
            num_left -= self._read(file, num_left)
            if num_left > 0 or file.read >= size:
                self._todo.pop()
        return bool(self._todo)

    def newest_files(self, count: int) -> list[tuple[Purpose, int, Path, int]]:
        """The files of the newest steps of each purpose, with the bytes that were read of them."""
        found = sorted(self._files.values(), key=lambda it: it.step, reverse=True)
        of = {purpose: [it for it in found if it.purpose == purpose] for purpose in _PURPOSES}
        return [
            (it.purpose, it.step, it.path, it.read) for all_ in of.values() for it in all_[:count]
        ]

    def _look(self) -> None:
        """Find what grew, and drop what a resume, or the limit of the disk, took away."""
        cuts = read_cuts(self.run_dir)
        if len(cuts) != self._num_cuts:
            first = min((cut.step for cut in cuts[self._num_cuts :]), default=0)
            self._drop([it for it in self._files.values() if it.step >= first])
            self._num_cuts = len(cuts)
        sizes: dict[tuple[Purpose, int], int] = {}
        for purpose, step, path, size in sorted(_files_of(self.run_dir.episodes)):
            sizes[purpose, step] = size
            if (purpose, step) not in self._files:
                file = _File(Path(path), purpose, step, len(self._by_place))
                self._files[purpose, step] = file
                self._by_place.append(file)
        gone = [file for key, file in self._files.items() if key not in sizes]
        grown = [self._files[key] for key, size in sizes.items() if size != self._files[key].read]
        # Of what was kept, each file is looked at once: it may have been written again meanwhile.
        known = [it for key, it in self._files.items() if key in sizes and it.read]
        changed = [file for file in (grown if self._is_checked else known) if not _stands(file)]
        self._is_checked = True
        self._drop([*gone, *changed])
        for file in gone:
            del self._files[file.purpose, file.step]
        # The newest steps are read first: they are what a person looks at.
        todo = [(file, sizes[key]) for key, file in self._files.items() if file.read < sizes[key]]
        self._todo = sorted(todo, key=lambda it: it[0].step)

    def _read(self, file: _File, max_rows: int) -> int:
        num_rows = 0
        try:
            for line, episode in locate_episodes(file.path, start=file.read, with_texts=False):
                if num_rows >= max_rows:
                    break
                file.read = line.end
                file.last = (line.start, line.end, zlib.crc32(line.content or b""))
                num_rows += 1
                try:
                    if episode is None:
                        self.broken.add(line)
                    else:
                        self._append(file, line, episode)
                except OverflowError:  # A number that no column holds.
                    self.broken.add(line)
        except OSError:  # The next look drops its rows.
            return num_rows
        return num_rows

    def _append(self, file: _File, line: RawLine, episode: RecordedEpisode) -> None:
        row = self.num_rows
        if row >= len(self._columns["step"]):
            self._columns = {name: _doubled(it) for name, it in self._columns.items()}
        trace = episode.shown
        place = next((n for n, it in enumerate(episode.traces) if it is trace), -1)
        advantage = episode.advantages[place] if 0 <= place < len(episode.advantages) else None
        cells: dict[str, Any] = {
            "step": file.step,
            "reward": _or_nan(episode.reward),
            "advantage": _or_nan(advantage),
            "tokens": sum(it.num_tokens for it in episode.traces),
            "turns": sum(it.num_turns for it in episode.traces),
            "staleness": _staleness(file, episode),
            "file": file.place,
            "offset": line.start,
            "size": line.end - line.start,
        }
        words = {
            "purpose": file.purpose,
            "source": episode.source,
            "agent": trace.agent if trace else "",
            "outcome": episode.outcome,
            "dropped": episode.dropped,
            "error": episode.error,
            "task": episode.task,
            "group": episode.group,
        }
        for name, word in words.items():
            known = self._words[name]
            cells[name] = known.setdefault(word, len(known))
        for name, value in (trace.rewards if trace and not episode.error else {}).items():
            if column := self._part(name):
                cells[column] = value
        for name, value in cells.items():
            self._columns[name][row] = value
        self.num_rows += 1

    def _part(self, name: str) -> str:
        column = f"part:{name}"
        if column not in self._columns:
            if len(self.parts) >= MAX_PARTS:
                self.num_parts_left_out += 1
                return ""
            self._columns[column] = np.full(len(self._columns["step"]), math.nan)
        return column

    def _drop(self, files: Sequence[_File]) -> None:
        """Take the rows of files out, so that the files are read again from their beginning."""
        if not files:
            return
        for file in files:
            file.read, file.last = 0, None
        stays = ~np.isin(self.column("file"), [file.place for file in files])
        for name, column in self._columns.items():
            kept = column[: self.num_rows][stays]
            column[: len(kept)] = kept
            if name.startswith("part:"):
                column[len(kept) :] = math.nan
        self.num_rows = int(stays.sum())
        self.generation += 1
        self._todo.clear()

    def order(self, where: Mapping[str, Sequence[str]], sort: str = "") -> NDArray[np.int64]:
        """Rows that pass every filter, in the order of a column; `-` before its name turns it.

        Without one, newest first. ConfigError names a filter or a column that is none.
        """
        return self.remembered(("order", sort), where, lambda: self._order(where, sort))

    def remembered(
        self, name: tuple[str, ...], where: Mapping[str, Sequence[str]], find: Callable[[], T]
    ) -> T:
        """What was found for filters while the index stood as it does now, else found."""
        filters = tuple((name, tuple(values)) for name, values in sorted(where.items()))
        key = (self.generation, self.num_rows, filters, name)
        if key not in self._found:
            while len(self._found) >= max(
                2, min(_MAX_FOUND, _MAX_FOUND_ROWS // max(1, self.num_rows))
            ):
                self._found.pop(next(iter(self._found)))
            self._found[key] = find()
        return cast("T", self._found[key])

    def _order(self, where: Mapping[str, Sequence[str]], sort: str) -> NDArray[np.int64]:
        # Sorting keeps this order among equal rows; it is found once for all filters.
        newest = self.remembered(("newest",), {}, self._newest_first)
        rows = newest[self._passing(where)[newest]]
        if not (name := sort.removeprefix("-")):
            return rows
        values = self._known(name)[rows]
        if name in WORDS:
            words = self.words(name)
            ranks = np.empty(len(words), "i4")
            ranks[np.argsort(np.array(words, dtype=object), kind="stable")] = np.arange(len(words))
            values = ranks[values] if len(words) else values
        first = np.asarray(values, "f8") * (-1.0 if sort.startswith("-") else 1.0)
        return rows[np.argsort(first, kind="stable")]  # What has no number comes last.

    def _newest_first(self) -> NDArray[np.int64]:
        return np.asarray(np.lexsort((self.column("offset"), -self.column("step"))))

    def histogram(self, name: str, where: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Counts of a column over what passes the filters of the others."""
        others = {key: value for key, value in where.items() if key != name}
        values = np.asarray(self._known(name), "f8")[self._passing(others)]
        finite = values[np.isfinite(values)]
        missing = len(values) - len(finite)
        if not len(finite):
            return {"edges": [], "counts": [], "missing": missing}
        low, high = float(finite.min()), float(finite.max())
        is_whole = bool((finite == np.round(finite)).all()) and high - low < _BINS
        edges = np.arange(low, high + 2) if is_whole else np.linspace(low, high, _BINS + 1)
        counts, edges = np.histogram(finite, bins=edges)
        shown = {"edges": edges.tolist(), "counts": counts.tolist(), "missing": missing}
        return shown | {"whole": is_whole}

    def _known(self, name: str) -> NDArray[Any]:
        if name not in self._columns or name in _PLACES:
            raise ConfigError(f"no column {name!r}; there are {', '.join(self.names)}")
        return self.column(name)

    @property
    def names(self) -> list[str]:
        """Columns that a person may see."""
        return [*NUMBERS, *WORDS, *self.parts]

    def _passing(self, where: Mapping[str, Sequence[str]]) -> NDArray[np.bool_]:
        mask = np.ones(self.num_rows, bool)
        for name, wanted in where.items():
            if name == EXPRESSION:
                mask &= np.logical_and.reduce([mask, *(passing(it, self) for it in wanted if it)])
            elif name in WORDS:
                mask &= self.having(name, set(wanted).__contains__)
            else:
                column = self._known(name)
                mask &= np.logical_or.reduce([_between(column, text) for text in wanted])
        return mask

    def numbers(self, name: str) -> NDArray[Any] | None:
        """A column of numbers as a person sees it; None for one of words."""
        if name in WORDS:
            return None
        return self.shown_steps if name == "step" else self.column(name)

    @property
    def shown_steps(self) -> NDArray[Any]:
        """Steps of training count from 1, versions that were evaluated from 0."""
        is_trained = self.column("purpose") == self._words["purpose"].get("train", -1)
        return np.asarray(self.column("step") + is_trained)

    def having(self, name: str, accepts: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Rows whose word is accepted."""
        found = [place for word, place in self._words[name].items() if accepts(word)]
        return np.isin(self._known(name), found)

    def cells(self, rows: NDArray[np.int64]) -> Iterator[dict[str, Any]]:
        """The cells of rows as a page shows them, each with the key of its episode."""
        words = {name: self.words(name) for name in WORDS}
        for row in rows.tolist():
            cells: dict[str, Any] = {}
            for name in (*NUMBERS, *self.parts):
                value = self._columns[name][row].item()
                cells[name] = None if isinstance(value, float) and math.isnan(value) else value
            for name, known in words.items():
                cells[name] = known[self._columns[name][row]]
            yield cells | {"key": str(self.place_of(row))}

    def columns(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The same by column, as copies; NaN where an episode has no number."""
        found = {name: self._columns[name][rows] for name in self.names}
        starts = [f"{file.purpose}-{file.step}-" for file in self._by_place]
        for name, known in {**{it: self.words(it) for it in WORDS}, "key": starts}.items():
            codes = found[name] if name in WORDS else self._columns["file"][rows]
            # Objects, so that rows share the text of a word.
            found[name] = np.array(known, object)[codes]
        found["key"] += self._columns["offset"][rows].astype(str).astype(object)
        return found

    def place_of(self, row: int) -> EpisodePlace:
        """Where the record of a row begins."""
        file = self._by_place[self._columns["file"][row]]
        return EpisodePlace(file.purpose, file.step, int(self._columns["offset"][row]))

    def find(self, key: EpisodePlace) -> tuple[Path, int, int] | None:
        """File, start and end of a record that was read; None for any other place."""
        file = self._files.get((key.purpose, key.step))
        rows = self.rows_of(key)
        if file is None or not len(rows):
            return None
        return file.path, key.offset, key.offset + int(self._columns["size"][rows[0]])

    def find_row(self, row: int) -> tuple[Path, int, int]:
        """File, start and end of the record of a row."""
        start = int(self._columns["offset"][row])
        file = self._by_place[self._columns["file"][row]]
        return file.path, start, start + int(self._columns["size"][row])

    def rows_of(self, key: EpisodePlace) -> NDArray[np.int64]:
        """The row of an episode; none for what was not read."""
        file = self._files.get((key.purpose, key.step))
        place = -1 if file is None else file.place
        return np.flatnonzero(
            (self.column("file") == place) & (self.column("offset") == key.offset)
        )


def _files_of(episodes: Path) -> Iterator[tuple[Purpose, int, str, int]]:
    """Purpose, step, path and bytes of each file. All are looked at every second: no `Path`s."""
    with contextlib.suppress(OSError), os.scandir(episodes) as folders:
        for folder in folders:
            name, _, step = folder.name.partition("_")
            for purpose in _PURPOSES if name == "step" and step.isdecimal() else ():
                path = f"{folder.path}/{purpose}.jsonl"
                with contextlib.suppress(OSError):  # Most steps have one of the two.
                    yield purpose, int(step), path, os.stat(path).st_size


def _between(column: NDArray[Any], text: str) -> NDArray[np.bool_]:
    """Whether numbers lie in `LOW..HIGH`, or `LOW..<HIGH` without that end, or equal a number."""
    low, dots, high = text.partition("..")
    end = high.removeprefix("<")
    try:
        least = float(low) if low else -math.inf
        most = (float(end) if high else math.inf) if dots else least
    except ValueError:
        raise ConfigError(
            f"{text!r} is no range; write 0.2, 0..0.2, 0..<0.2, ..0.2 or 0.2.."
        ) from None
    if not text.strip("."):
        return np.asarray(np.isnan(np.asarray(column, "f8")))
    is_below = column < most if end != high else column <= most
    return np.asarray((column >= least) & is_below)


def _doubled(column: NDArray[Any]) -> NDArray[Any]:
    fill = math.nan if column.dtype.kind == "f" else 0
    rest = np.full(max(len(column), _FIRST_ROWS), fill, column.dtype)
    return np.concatenate([column, rest])


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _staleness(file: _File, episode: RecordedEpisode) -> float:
    """Updates between the oldest version that sampled it and the one that it trained."""
    if episode.versions is None or file.purpose == "eval":
        return math.nan
    try:
        return staleness(file.step, VersionSpan(*episode.versions))
    except ValueError:  # A record that no trainer saw.
        return math.nan


def _stands(file: _File) -> bool:
    """Whether the last line that was read is still there."""
    if file.last is None:
        return True
    start, end, digest = file.last
    try:
        with file.path.open("rb") as content:
            content.seek(start)
            return zlib.crc32(content.read(end - start)) == digest
    except OSError:
        return False
