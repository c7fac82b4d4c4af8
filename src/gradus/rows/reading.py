"""Rows that people have: a file by its suffix and content, a folder, or a data set of the hub.

Text is read here, so that every row knows its file and line; tables of Arrow and the hub are read
by the optional package `datasets`.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import IO, Any

from gradus.errors import ConfigError
from gradus.rows.tables import (
    files_of_folder,
    load_data_set,
    one_line,
    rows_of_data_set,
    rows_of_table,
)

_TEXT = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
_PACKED: Mapping[str, Callable[..., IO[Any]]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
_ARROW = {".parquet": "parquet", ".arrow": "arrow"}
_DELIMITERS = {".csv": ",;\t|", ".tsv": "\t"}
_LARGEST_CELL = 1 << 30


def is_file_name(path: str) -> bool:
    """Tell whether a text names a file or a folder, and no data set of the hub.

    >>> is_file_name("rows.csv.gz"), is_file_name("openai/gsm8k")
    (True, False)
    """
    return path.startswith((".", "/", "~")) or _suffix(Path(path)) in (*_TEXT, *_ARROW)


def read_rows(
    path: str | Path, *, split: str = "train", subset: str | None = None
) -> Iterator[tuple[str, Any]]:
    """Each row with its place, for errors; `split` and `subset` are of folders and the hub.

    ConfigError for what cannot be read, with file and line where it has them; a row is whatever
    stands there, an object or not. HubError where the hub was not reached.
    """
    there = Path(path).expanduser()
    try:
        if there.is_file():
            return _of_file(there)
        files = files_of_folder(there, split, subset) if there.is_dir() else []
        if files and all(_suffix(file) in _TEXT for file in files):
            return chain.from_iterable(map(_of_file, files))
        if there.exists() or not is_file_name(str(path)):
            return rows_of_data_set(load_data_set(str(path), split=split, subset=subset), str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    raise ConfigError(f"{path}: there is no such file (seen from {Path.cwd()})")


def _of_file(path: Path) -> Iterator[tuple[str, Any]]:
    suffix, unpack = _suffix(path), _PACKED.get(path.suffix.lower())
    if suffix in _ARROW:
        if unpack:
            raise ConfigError(f"{path} is a packed table; unpack it")
        return rows_of_table(path, _ARROW[suffix])
    return _of_text(path, suffix, unpack or open)


def _suffix(path: Path) -> str:
    """The suffix below that of a packed file."""
    bare = path.with_suffix("") if path.suffix.lower() in _PACKED else path
    return bare.suffix.lower()


def _of_text(path: Path, suffix: str, unpack: Callable[..., IO[Any]]) -> Iterator[tuple[str, Any]]:
    try:
        # Editors of some systems begin a file with a byte order mark.
        with unpack(path, "rt", encoding="utf-8-sig", newline="") as file:
            if suffix in _DELIMITERS:
                yield from _of_cells(path, file, _DELIMITERS[suffix])
            else:
                yield from _of_json(path, file)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 ({error.reason}, byte {error.start}); convert it, or give it the "
            "suffix of what it is"
        ) from error
    except (EOFError, lzma.LZMAError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {one_line(error)}") from error


def _of_json(path: Path, file: IO[str]) -> Iterator[tuple[str, Any]]:
    """Objects of a line each; or one array, or objects over several lines."""
    lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
    first = next(lines, None)
    if first is None:
        return
    number, line = first
    if line.lstrip()[0] == "[" or line.strip() == "{":
        yield from _of_values(path, "\n" * (number - 1) + line + file.read())
        return
    for place, text in chain([first], lines):
        where = f"{path}:{place}"
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} is not JSON: {error}") from error
        yield where, value


def _of_values(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """The members of an array, or values one after the other, with the line that each begins in."""
    decoder, at, line = json.JSONDecoder(), 0, 1
    is_array = text.lstrip()[0] == "["
    at = text.index("[") + 1 if is_array else 0
    line += text.count("\n", 0, at)
    while True:
        start = at
        while at < len(text) and (text[at].isspace() or (is_array and text[at] == ",")):
            at += 1
        line += text.count("\n", start, at)
        if at == len(text) or (is_array and text[at] == "]"):
            break
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{line} is not JSON: {error}") from error
        yield f"{path}:{line}", value
        line += text.count("\n", at, end)
        at = end
    if is_array and (at == len(text) or text[at + 1 :].strip()):
        what = "is cut: its array has no end" if at == len(text) else "goes on behind its array"
        raise ConfigError(f"{path}:{line} {what}")


def _of_cells(path: Path, file: IO[str], delimiters: str) -> Iterator[tuple[str, Any]]:
    """Rows under a header, by the delimiter that it has most; an empty cell is None."""
    header = file.readline()
    delimiter = max(delimiters, key=header.count)
    csv.field_size_limit(min(_LARGEST_CELL, sys.maxsize))
    names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
    if len(set(names)) < len(names):
        raise ConfigError(f"{path}:1 names a column twice: {', '.join(names)}")
    reader = csv.reader(file, delimiter=delimiter)
    end = 1
    try:
        for cells in reader:
            place, end = f"{path}:{end + 1}", reader.line_num + 1
            if len(cells) > len(names):
                raise ConfigError(
                    f"{place} has {len(cells)} cells, and the header names {len(names)}; quote "
                    f"cells that hold {delimiter!r}"
                )
            if cells:
                yield (
                    place,
                    dict.fromkeys(names)
                    | {name: cell or None for name, cell in zip(names, cells, strict=False)},
                )
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num + 1} is no row: {error}") from error
