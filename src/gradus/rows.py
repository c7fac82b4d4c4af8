"""Rows that people have: a file by its suffix and content, a folder, or a data set of the hub.

Text is read here, so that every row knows its file and line; tables of Arrow and the hub are read
by the optional package `datasets`.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import importlib
import json
import lzma
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from gradus.errors import ConfigError, HubError

_TEXT = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
_PACKED: Mapping[str, Callable[..., IO[Any]]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
_ARROW = {".parquet": "parquet", ".arrow": "arrow"}
_DELIMITERS = {".csv": ",;\t|", ".tsv": "\t"}
_SAVED = ("dataset_dict.json", "state.json")
"""What `save_to_disk` writes beside its tables."""
_LARGEST_CELL = 1 << 30


def is_file_name(path: str) -> bool:
    """Whether a text names a file or a folder, and no data set of the hub.

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
        if there.is_dir() and (files := _files_of_text(there, split, subset)):
            return chain.from_iterable(map(_of_file, files))
        if there.exists() or not is_file_name(str(path)):
            return _of_data_set(load_data_set(str(path), split=split, subset=subset), str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    raise ConfigError(f"{path}: there is no such file (seen from {Path.cwd()})")


def load_data_set(name: str, *, split: str, subset: str | None = None) -> Any:
    """A data set of the hub or of a folder, by the package `datasets`, its images as their bytes.

    ConfigError for what to change or install, HubError when the hub was not reached.
    """
    datasets = _datasets(name)
    folder = Path(name).expanduser()
    with _refusals(datasets, name, split, subset):
        if _is_saved(folder):
            return _undecoded(datasets, _of_split(datasets.load_from_disk(str(folder)), split))
        found = datasets.load_dataset(str(folder) if folder.exists() else name, subset, split=split)
        return _undecoded(datasets, found)


@contextmanager
def _refusals(datasets: ModuleType, name: str, split: str, subset: str | None) -> Iterator[None]:
    where = f"data set {name!r}" + (f", subset {subset!r}" if subset else "")
    try:
        yield
    except datasets.exceptions.DatasetNotFoundError as error:
        raise _not_found(where, error) from error
    # Before OSError, of which it is one.
    except ConnectionError as error:
        raise HubError(
            f"{where} was not reached ({error}). Check the network, or fetch it once elsewhere and "
            "set HF_HUB_OFFLINE=1 with the same HF_HOME"
        ) from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"{where}, split {split!r} cannot be read: {_one_line(error)}. Correct the name, or "
            "set `subset` and `split`"
        ) from error


def _is_saved(folder: Path) -> bool:
    return any((folder / file).is_file() for file in _SAVED)


def _files_of_text(folder: Path, split: str, subset: str | None) -> list[Path]:
    """The files of a split where all are text, whose lines can be named; else none."""
    if _is_saved(folder):
        return []
    datasets = _datasets(str(folder))
    with _refusals(datasets, str(folder), split, subset):
        named = datasets.load_dataset_builder(str(folder), subset).config.data_files or {}
        files = [Path(file) for file in named.get(split, ())]
        return [] if any(_suffix(file) not in _TEXT for file in files) else files


def without_nulls(value: Any) -> Any:
    """A value without the keys that a table filled up: in a column all objects have the same."""
    if isinstance(value, Mapping):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _of_file(path: Path) -> Iterator[tuple[str, Any]]:
    suffix, unpack = _suffix(path), _PACKED.get(path.suffix.lower())
    if suffix in _ARROW:
        if unpack:
            raise ConfigError(f"{path} is a packed table; unpack it")
        return _of_table(path, _ARROW[suffix])
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
        raise ConfigError(f"{path} cannot be read: {_one_line(error)}") from error


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


def _of_table(path: Path, kind: str) -> Iterator[tuple[str, Any]]:
    datasets = _datasets(str(path))
    try:
        found = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        rows = _of_data_set(found.decode(False), str(path))
        yield from rows
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"{path} is no table of {kind}: {_one_line(error)}") from error


def _of_data_set(rows: Any, name: str) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows):
        yield f"{name} row {number}", {key: _plain(value) for key, value in row.items()}


def _plain(value: Any) -> Any:
    """A cell as JSON has it: nothing for a number that is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return without_nulls(value)


def _of_split(found: Any, split: str) -> Any:
    """A saved data set, or one split of several."""
    if not isinstance(found, Mapping):
        return found
    if split not in found:
        raise ValueError(f"it has the splits {', '.join(found)}")
    return found[split]


def _undecoded(datasets: ModuleType, rows: Any) -> Any:
    """With the bytes of images as they are, which are decoded where they train."""
    for name, feature in getattr(rows, "features", {}).items():
        of_each = getattr(feature, "feature", None)
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(name, datasets.Image(decode=False))
        elif isinstance(of_each, datasets.Image):
            rows = rows.cast_column(name, datasets.List(datasets.Image(decode=False)))
    return rows


def _not_found(where: str, error: Exception) -> ConfigError:
    if "gated" in str(error):
        return ConfigError(
            f"{where} is gated: accept its terms on its page on the hub, then set HF_TOKEN to a "
            'token of that account and name it for the source: pass_env = ["HF_TOKEN"]'
        )
    return ConfigError(
        f"{where} was not found, neither on the hub nor as a local folder. Correct the name; a "
        'private one needs HF_TOKEN, and pass_env = ["HF_TOKEN"] of the source'
    )


def _datasets(name: str) -> ModuleType:
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name!r} needs the package `datasets`; install gradus with its extra: "
            "pip install 'gradus-rl[data]'"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
