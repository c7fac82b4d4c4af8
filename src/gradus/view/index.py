"""The episodes of a run as a table of DuckDB, which grows with the run: what a person filters."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import duckdb
import numpy as np

from gradus.errors import ConfigError, GradusError
from gradus.run.episodes import RecordedEpisode, locate_episodes
from gradus.run.json_lines import BrokenLines, RawLine
from gradus.run.lease import read_marker
from gradus.run.paths import Purpose, RunDirectory
from gradus.run.records import read_cuts
from gradus.wire.versions import VersionSpan, staleness

NUMBERS = ("step", "reward", "advantage", "tokens", "turns", "staleness")
"""Columns of numbers; null where an episode has none."""
WORDS = ("purpose", "source", "agent", "outcome", "dropped", "error", "task", "group")
"""Columns of words; empty where an episode has none."""
EXPRESSION = "where"
"""Name of the filter that is an expression of SQL; the others name a column."""
HISTOGRAMS = ("reward", "tokens", "staleness")
MAX_PARTS = 16
"""Parts of the reward with a column of their own, `part:NAME`."""
SHOWN_STEP = "(step + (purpose = 'train')::INTEGER)"
"""Steps of training count from 1 on the page, versions that were evaluated from 0."""
KEY = "purpose || '-' || step || '-' || \"offset\""
NEWEST = 'step DESC, "offset", "row"'
_TABLES = """
CREATE TABLE IF NOT EXISTS episodes ("row" INTEGER, step INTEGER, reward DOUBLE, advantage DOUBLE,
    tokens INTEGER, turns INTEGER, staleness FLOAT, purpose VARCHAR, source VARCHAR, agent VARCHAR,
    outcome VARCHAR, dropped VARCHAR, error VARCHAR, task VARCHAR, "group" VARCHAR,
    "offset" BIGINT, size INTEGER);
CREATE TABLE IF NOT EXISTS files (purpose VARCHAR, step INTEGER, read BIGINT, first BIGINT,
    digest BIGINT, PRIMARY KEY (purpose, step));
CREATE TABLE IF NOT EXISTS cuts (num INTEGER);
SET late_materialization_max_rows = 1000;
SET enable_external_access = false;
SET lock_configuration = true;
"""
_KEY = re.compile(r"(train|eval)-(\d{1,9})-(\d{1,17})")
_FORMAT = 2
_KEPT_FROM_BYTES = 32 << 20
"""Of episodes: what is smaller is read in a moment, and its table stays in memory."""
_MAX_KEPT = 40
"""Tables in the cache; the oldest goes for a new one."""
_BINS = 24
_PURPOSES: tuple[Purpose, ...] = ("train", "eval")
_MAX_NUMBER = 2**31
_MAX_CHARACTERS = 2_000


class EpisodePlace(NamedTuple):
    """Where the record of an episode begins; what an address on the page names it by."""

    purpose: Purpose
    step: int
    offset: int

    def __str__(self) -> str:
        return f"{self.purpose}-{self.step}-{self.offset}"

    @staticmethod
    def of(text: str) -> EpisodePlace:
        """ConfigError for what names no place."""
        found = _KEY.fullmatch(text)
        if found is None:
            raise ConfigError("an episode is named as train-STEP-BYTE or eval-VERSION-BYTE")
        return EpisodePlace(cast("Purpose", found[1]), int(found[2]), int(found[3]))


@dataclass
class _File:
    """A file of episodes, as far as it was read."""

    path: Path
    purpose: Purpose
    step: int
    read: int = 0
    first: int = 0
    digest: int = 0
    """Start and CRC-32 of the last line, which stands while nothing was cut."""


@dataclass
class EpisodeIndex:
    """Owns the table. `advance` reads on; everything else answers from what was read.

    >>> index = EpisodeIndex(run_dir)  # doctest: +SKIP
    >>> while index.advance(max_rows=2000): ...  # doctest: +SKIP
    >>> index.cells({"reward": ["..0.2"]}, "-tokens", count=100)  # doctest: +SKIP
    """

    run_dir: RunDirectory
    path: Path | None = None
    """Where the table is kept; None keeps it in memory."""
    num_rows: int = 0
    generation: int = 0
    """Raised when rows went away, after which a number of a row means another one."""
    broken: BrokenLines = field(default_factory=BrokenLines)
    num_parts_left_out: int = 0
    parts: list[str] = field(default_factory=list)
    """Columns of parts of the reward."""
    first_words: dict[str, list[str]] = field(default_factory=dict)
    """Two of each column, which say whether it tells anything."""
    _files: dict[tuple[Purpose, int], _File] = field(default_factory=dict)
    _num_cuts: int = 0
    _todo: list[tuple[_File, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        where = ":memory:" if self.path is None else str(self.path)
        self._table = duckdb.connect(where, config={"threads": 1})
        self._table.execute(_TABLES)
        for purpose, step, *read in self._ask("SELECT * FROM files"):
            path = self.run_dir.episodes / f"step_{step}" / f"{purpose}.jsonl"
            self._files[purpose, step] = _File(path, purpose, step, *read)
        names = [it[0] for it in self._ask("DESCRIBE episodes")]
        self.parts = [it for it in names if it.startswith("part:")]
        cuts = self._ask("SELECT num FROM cuts")
        self._num_cuts = cuts[0][0] if cuts else len(read_cuts(self.run_dir))
        self._count()
        # Of what was kept, each file is looked at once: it may have been written again meanwhile.
        self._drop([it for it in self._files.values() if not _stands(it)])

    def _count(self) -> None:
        self.num_rows = self._ask("SELECT count(*) FROM episodes")[0][0]
        self.first_words = {name: self.words(name, 2) for name in WORDS}

    def _ask(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._table.execute(sql, list(values)).fetchall()

    def words(self, name: str, count: int) -> list[str]:
        """Some of the words that occur in a column."""
        found = self._ask(f'SELECT DISTINCT "{name}" FROM episodes LIMIT {count}')
        return sorted(it for (it,) in found)

    def progress(self) -> tuple[int, int]:
        """Bytes that were read, and bytes that there are as far as is known."""
        left = sum(max(0, size - file.read) for file, size in self._todo)
        done = sum(file.read for file in self._files.values())
        return done, done + left

    def advance(self, *, max_rows: int) -> bool:
        """Read up to so many rows more; whether there is more to read now."""
        if not self._todo:
            self._look()
        rows: list[dict[str, Any]] = []
        files, num_left = [], max_rows
        while self._todo and num_left > 0:
            file, size = self._todo[-1]
            num_left -= self._read(file, num_left, rows)
            files.append(file)
            if num_left > 0 or file.read >= size:
                self._todo.pop()
        if files:
            self._insert(rows, files)
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
                self._files[purpose, step] = _File(Path(path), purpose, step)
        gone = [file for key, file in self._files.items() if key not in sizes]
        grown = [self._files[key] for key, size in sizes.items() if size != self._files[key].read]
        self._drop([*gone, *(file for file in grown if not _stands(file))])
        for file in gone:
            del self._files[file.purpose, file.step]
        # The newest steps are read first: they are what a person looks at.
        todo = [(file, sizes[key]) for key, file in self._files.items() if file.read < sizes[key]]
        self._todo = sorted(todo, key=lambda it: it[0].step)

    def _read(self, file: _File, max_rows: int, rows: list[dict[str, Any]]) -> int:
        num_lines = 0
        with contextlib.suppress(OSError):  # The next look drops its rows.
            for line, episode in locate_episodes(file.path, start=file.read, with_texts=False):
                if num_lines >= max_rows:
                    break
                num_lines += 1
                file.read, file.first = line.end, line.start
                file.digest = zlib.crc32(line.content or b"")
                row = None if episode is None else self._row(file, line, episode)
                if row is None:
                    self.broken.add(line)
                else:
                    rows.append(row)
        return num_lines

    def _row(self, file: _File, line: RawLine, episode: RecordedEpisode) -> dict[str, Any] | None:
        """The cells of an episode; None where one has a number that no column holds."""
        trace = episode.shown
        place = next((n for n, it in enumerate(episode.traces) if it is trace), -1)
        advantage = episode.advantages[place] if 0 <= place < len(episode.advantages) else None
        cells: dict[str, Any] = {
            "step": file.step,
            "reward": episode.reward,
            "advantage": advantage,
            "tokens": sum(it.num_tokens for it in episode.traces),
            "turns": sum(it.num_turns for it in episode.traces),
            "staleness": _staleness(file, episode),
            "offset": line.start,
            "size": line.end - line.start,
        }
        if max(abs(cells[it] or 0) for it in ("tokens", "turns", "staleness")) >= _MAX_NUMBER:
            return None
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
        for name, value in (trace.rewards if trace and not episode.error else {}).items():
            if column := self._part(name):
                cells[column] = value
        # JSON can hold half a character, which no table can.
        return cells | {k: it.encode("utf-8", "replace").decode() for k, it in words.items()}

    def _part(self, name: str) -> str:
        column = f"part:{name}".encode("utf-8", "replace").decode()
        if column not in self.parts:
            # Names of columns differ by more than their case.
            if len(self.parts) >= MAX_PARTS or column.lower() in map(str.lower, self.parts):
                self.num_parts_left_out += 1
                return ""
            self._table.execute(f"ALTER TABLE episodes ADD COLUMN {_quoted(column)} DOUBLE")
            self.parts.append(column)
        return column

    def _insert(self, rows: Sequence[Mapping[str, Any]], files: Sequence[_File]) -> None:
        """Rows and how far their files were read, both or none."""
        self._table.begin()
        if rows:
            kinds = {"reward": "f8", "advantage": "f8", "staleness": "f8"}
            kinds |= dict.fromkeys(WORDS, "O") | dict.fromkeys(self.parts, "f8")
            names = ("step", "tokens", "turns", "offset", "size", *kinds)
            batch = {n: np.array([it.get(n) for it in rows], kinds.get(n, "i8")) for n in names}
            batch["row"] = np.arange(self.num_rows, self.num_rows + len(rows))
            numbers = [n for n, kind in kinds.items() if kind == "f8"]
            nulls = ", ".join(
                f"CASE WHEN isfinite({_quoted(n)}) THEN {_quoted(n)} END AS {_quoted(n)}"
                for n in numbers
            )
            self._table.register("batch", batch)
            self._table.execute(
                f"INSERT INTO episodes BY NAME SELECT * REPLACE ({nulls}) FROM batch"
            )
            self.num_rows += len(rows)
        for name, known in self.first_words.items():
            known[:] = list(dict.fromkeys([*known, *(str(it[name]) for it in rows)]))[:2]
        told = ("purpose", "step", "read", "first", "digest")
        batch = {
            n: np.array([getattr(it, n) for it in files], None if n != told[0] else "O")
            for n in told
        }
        self._table.register("batch", batch)
        self._table.execute("INSERT OR REPLACE INTO files BY NAME SELECT * FROM batch")
        self._table.execute("DELETE FROM cuts")
        self._table.execute("INSERT INTO cuts VALUES (?)", [self._num_cuts])
        self._table.commit()

    def _drop(self, files: Sequence[_File]) -> None:
        """Take the rows of files out, so that the files are read again from their beginning."""
        if not files:
            return
        self._table.begin()
        for file in files:
            file.read = file.first = file.digest = 0
            own = [file.purpose, file.step]
            self._table.execute("DELETE FROM files WHERE purpose = ? AND step = ?", own)
            self._table.execute("DELETE FROM episodes WHERE purpose = ? AND step = ?", own)
        self._table.commit()
        self._table.begin()
        numbered = 'SELECT * REPLACE ((row_number() OVER (ORDER BY "row") - 1)::INTEGER AS "row")'
        self._table.execute(f"CREATE OR REPLACE TABLE episodes AS {numbered} FROM episodes")
        self._table.commit()
        self._count()
        self.generation += 1
        self._todo.clear()

    @property
    def names(self) -> list[str]:
        """Columns that a person may see."""
        return [*NUMBERS, *WORDS, *self.parts]

    def select(
        self,
        what: str,
        where: Mapping[str, Sequence[str]],
        rest: str = "",
        *,
        known: int | None = None,
        cursor: duckdb.DuckDBPyConnection | None = None,
    ) -> duckdb.DuckDBPyConnection:
        """What SQL selects of the rows that pass every filter, of the first `known` alone.

        ConfigError names a filter that is none.
        """
        condition, values = self._condition(where)
        if known is not None:
            condition += f' AND "row" < {known}'
        sql = f"SELECT {what} FROM episodes WHERE {condition} {rest}"
        try:
            return (cursor or self._table).execute(sql, values)
        except duckdb.Error as error:
            if EXPRESSION not in where:
                raise
            raise self._refusal(error) from error

    def cells(
        self,
        where: Mapping[str, Sequence[str]],
        sort: str = "",
        *,
        first: int = 0,
        count: int | None = None,
        known: int | None = None,
    ) -> list[dict[str, Any]]:
        """The cells of rows that pass, as a page shows them, each with the key of its episode, in
        the order of a column; `-` before its name turns it. Newest first without one."""
        names = [*NUMBERS, *self.parts, *WORDS]
        limit = "" if count is None else f"LIMIT {count}"
        rest = f"{self.order_of(sort)} {limit} OFFSET {first}"
        found = self.select(self._shown(names), where, rest, known=known).fetchall()
        return [dict(zip([*names, "key"], row, strict=True)) for row in found]

    def count(self, where: Mapping[str, Sequence[str]], known: int | None = None) -> int:
        ((found,),) = self.select("count(*)", where, known=known).fetchall()
        return int(found)

    def order_of(self, sort: str) -> str:
        name = sort.removeprefix("-")
        direction = "DESC" if sort.startswith("-") else "ASC"
        first = f"{self._known(name)} {direction} NULLS LAST, " if name else ""
        return f"ORDER BY {first}{NEWEST}"

    def columns(self, where: Mapping[str, Sequence[str]], sort: str) -> dict[str, Any]:
        """The same by column; masked where an episode has no number. May run beside the rest."""
        what, rest = self._shown(self.names), self.order_of(sort)
        found: dict[str, Any] = self.select(
            what, where, rest, cursor=self._table.cursor()
        ).fetchnumpy()
        return found

    def places(
        self, where: Mapping[str, Sequence[str]], sort: str = "", *, first: int = 0
    ) -> Iterator[tuple[EpisodePlace, tuple[Path, int, int]]]:
        """Where the records of rows are: the key, and file, start and end."""
        what, rest = 'purpose, step, "offset", size', f"{self.order_of(sort)} OFFSET {first}"
        found = self.select(what, where, rest, cursor=self._table.cursor())
        while rows := found.fetchmany(100):
            for *key, size in rows:
                place = EpisodePlace(*key)
                yield place, self._file_of(place, size)

    def find(self, key: EpisodePlace) -> tuple[Path, int, int] | None:
        """File, start and end of a record that was read; None for any other place."""
        sql = 'SELECT size FROM episodes WHERE purpose = ? AND step = ? AND "offset" = ?'
        found = self._ask(sql, key)
        return self._file_of(key, found[0][0]) if found else None

    def _file_of(self, key: EpisodePlace, size: int) -> tuple[Path, int, int]:
        path = self.run_dir.episodes / f"step_{key.step}" / f"{key.purpose}.jsonl"
        return path, key.offset, key.offset + size

    def cells_of(self, key: EpisodePlace) -> dict[str, Any]:
        """The cells of one episode; ConfigError where none begins."""
        own: dict[str, list[str]] = {"purpose": [key.purpose], "step": [str(key.step)]}
        found = next((it for it in self.cells(own) if it["key"] == str(key)), None)
        if found is None:
            raise ConfigError(
                "no episode begins there: it was deleted, cut off by a resume, or is not read yet"
            )
        return found

    def histogram(self, name: str, where: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Counts of a column over what passes the filters of the others."""
        others = {key: value for key, value in where.items() if key != name}
        found = self.select(f"{self._known(name)} AS x", others).fetchnumpy()["x"]
        finite = np.asarray(np.ma.compressed(found), "f8")
        missing = len(found) - len(finite)
        if not len(finite):
            return {"edges": [], "counts": [], "missing": missing}
        low, high = float(finite.min()), float(finite.max())
        is_whole = bool((finite == np.round(finite)).all()) and high - low < _BINS
        edges = np.arange(low, high + 2) if is_whole else np.linspace(low, high, _BINS + 1)
        counts, edges = np.histogram(finite, bins=edges)
        shown = {"edges": edges.tolist(), "counts": counts.tolist(), "missing": missing}
        return shown | {"whole": is_whole}

    def _shown(self, names: Sequence[str]) -> str:
        return ", ".join([*map(_quoted, names), f"{KEY} AS key"])

    def _known(self, name: str) -> str:
        if name not in self.names:
            raise ConfigError(f"no column {name[:40]!r}; there are {', '.join(self.names)}")
        return _quoted(name)

    def _condition(self, where: Mapping[str, Sequence[str]]) -> tuple[str, list[Any]]:
        """The filters as SQL, and the values that stand in it."""
        parts, values = ["true"], list[Any]()
        for name, wanted in where.items():
            if name == EXPRESSION:
                parts += [self._expression(it) for it in wanted if it]
            elif name in WORDS:
                parts.append(f"list_contains(?, {self._known(name)})")
                values.append(list(wanted))
            else:
                column = self._known(name)
                ranges = [_between(column, text) for text in wanted]
                parts.append("(" + " OR ".join(sql for sql, _ in ranges) + ")")
                values += [value for _, ends in ranges for value in ends]
        return " AND ".join(parts), values

    def _expression(self, text: str) -> str:
        """Rows that pass what a person wrote, which is one expression of SQL and no more."""
        if len(text) > _MAX_CHARACTERS:
            raise ConfigError(
                f"the filter has {len(text):,} characters; at most {_MAX_CHARACTERS:,}"
            )
        shown = f"SELECT * REPLACE ({SHOWN_STEP} AS step) FROM episodes"
        sql = f'SELECT "row" FROM ({shown}) WHERE ({text}\n)'
        try:
            is_one = len(self._table.extract_statements(sql)) == 1
        except duckdb.Error as error:
            raise self._refusal(error) from error
        if not is_one:
            raise ConfigError("the filter is more than one expression")
        return f'"row" IN ({sql})'

    def _refusal(self, error: duckdb.Error) -> ConfigError:
        why = str(error).partition("\n")[0][:200]
        return ConfigError(
            f"the filter is not understood: {why}. Write SQL, for example reward < 0.2 and "
            f"outcome != 'finished', with words in ' and names such as \"group\" in \"; columns "
            f"are {', '.join(self.names)}"
        )


def open_index(run_dir: RunDirectory, variables: Mapping[str, str] = os.environ) -> EpisodeIndex:
    """The table as far as the user's cache folder has it; one in memory where there is no cache,
    another process uses it, or the run is short."""
    path = _path_of(run_dir, variables)
    size = sum(size for *_, size in _files_of(run_dir.episodes))
    if path is None or size < _KEPT_FROM_BYTES:
        return EpisodeIndex(run_dir)
    for _ in range(2):
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            kept = sorted(path.parent.glob("*.duckdb"), key=lambda it: it.stat().st_mtime)
            for old in kept[:-_MAX_KEPT]:
                old.unlink(missing_ok=True)
            return EpisodeIndex(run_dir, path)
        except (OSError, duckdb.Error) as error:
            if isinstance(error, OSError) or "lock" in str(error):
                break
            path.unlink(missing_ok=True)  # It is damaged.
    return EpisodeIndex(run_dir)


def _path_of(run_dir: RunDirectory, variables: Mapping[str, str]) -> Path | None:
    """By the identity of the run and the place where it lies; None for a user without a home."""
    root = variables.get("XDG_CACHE_HOME", "")
    if not root.startswith("/"):
        home = variables.get("HOME", "")
        root = f"{home}/.cache" if home.startswith("/") else ""
    try:
        marker = read_marker(run_dir)
    except GradusError:
        marker = None
    if not root or marker is None:
        return None
    told = f"{_FORMAT} {marker.run_id} {run_dir.root.resolve()}"
    return Path(root, "gradus", "view", f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.duckdb")


def _files_of(episodes: Path) -> Iterator[tuple[Purpose, int, str, int]]:
    """Purpose, step, path and bytes of each file. All are looked at every second: no `Path`s."""
    with contextlib.suppress(OSError), os.scandir(episodes) as folders:
        for folder in folders:
            name, _, step = folder.name.partition("_")
            for purpose in _PURPOSES if name == "step" and step.isdecimal() else ():
                path = f"{folder.path}/{purpose}.jsonl"
                with contextlib.suppress(OSError):  # Most steps have one of the two.
                    yield purpose, int(step), path, os.stat(path).st_size


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _between(column: str, text: str) -> tuple[str, list[float]]:
    """Numbers in `LOW..HIGH`, or `LOW..<HIGH` without that end, or equal to a number, as SQL."""
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
        return f"{column} IS NULL", []
    return f"({column} >= ? AND {column} {'<' if end != high else '<='} ?)", [least, most]


def _staleness(file: _File, episode: RecordedEpisode) -> float | None:
    """Updates between the oldest version that sampled it and the one that it trained."""
    if episode.versions is None or file.purpose == "eval":
        return None
    try:
        return staleness(file.step, VersionSpan(*episode.versions))
    except ValueError:  # A record that no trainer saw.
        return None


def _stands(file: _File) -> bool:
    """Whether the last line that was read is still there."""
    try:
        with file.path.open("rb") as content:
            content.seek(file.first)
            return zlib.crc32(content.read(file.read - file.first)) == file.digest
    except OSError:
        return not file.read
