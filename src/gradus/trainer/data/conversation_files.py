"""Conversations from where the config says: files, episode records, or a data set of the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from gradus.config import SftDataConfig
from gradus.errors import ConfigError
from gradus.run.paths import RunDirectory
from gradus.trainer.data.conversations import Conversation, PlainText, parse_row
from gradus.trainer.data.datasets import load_hub_rows
from gradus.trainer.data.episode_records import is_record, record_conversations, record_files
from gradus.trainer.data.images import DataImages, ShownImages
from gradus.trainer.data.mixture import Mixture

Row = Conversation | PlainText


def load_data_sets(
    config: SftDataConfig, images: DataImages | None = None
) -> tuple[list[Row], Mixture]:
    """The rows of every data set, end to end, and how they are mixed; `images` gets theirs."""
    loaded = [load_conversations(one, images) for one in config.data_sets]
    mixture = Mixture(
        sizes=tuple(len(rows) for rows in loaded),
        weights=tuple(one.weight for one in config.data_sets),
    )
    return list(chain.from_iterable(loaded)), mixture


def load_conversations(config: SftDataConfig, images: DataImages | None = None) -> list[Row]:
    """Every row of one data set; refuses an empty one and names the first row that is wrong."""
    roles = frozenset(config.train_roles)
    images = images or DataImages()
    found: list[Row] = []
    for file, place, row in _rows(config):
        folder = None if file is None else file.parent
        if is_record(row):
            # Of RUN/episodes/step_N/train.jsonl.
            above = () if file is None else file.absolute().parents[2:3]
            store = RunDirectory(above[0]).images if above else None
            shown = ShownImages(images, {}, folder, store)
            found += record_conversations(place, row, roles, config.min_reward, shown)
        else:
            keys = row if isinstance(row, Mapping) else {}
            found.append(parse_row(place, row, roles, ShownImages(images, keys, folder, None)))
    if not found:
        raise ConfigError(
            f"data set {config.path!r} has no rows to learn; look at data.min_reward if it holds "
            "episodes"
        )
    return found


def _rows(config: SftDataConfig) -> Iterator[tuple[Path | None, str, Any]]:
    """Every row with its file and its place, for errors."""
    path = Path(config.path)
    if path.is_file():
        yield from _read_lines(path)
    elif path.is_dir():
        for file in record_files(path):
            yield from _read_lines(file)
    else:
        for number, row in enumerate(load_hub_rows(config.path, config.split)):
            yield None, f"{config.path} row {number}", row


def _read_lines(path: Path) -> Iterator[tuple[Path, str, Any]]:
    # Editors of some systems begin a file with a byte order mark.
    with path.open(encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield path, f"{path}:{number}", _parse(f"{path}:{number}", line)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 ({error}); convert it") from error


def _parse(place: str, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} is not JSON: {error}") from error
