"""Conversations from where the config says: files, episode records, or a data set of the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from gradus.config import SftDataConfig
from gradus.errors import ConfigError
from gradus.trainer.data.conversations import Conversation, PlainText, parse_row
from gradus.trainer.data.datasets import load_hub_rows
from gradus.trainer.data.episode_records import is_record, record_conversations, record_files
from gradus.trainer.data.mixture import Mixture

Row = Conversation | PlainText


def load_data_sets(config: SftDataConfig) -> tuple[list[Row], Mixture]:
    """The rows of every data set, end to end, and how they are mixed."""
    loaded = [load_conversations(one) for one in config.data_sets]
    mixture = Mixture(
        sizes=tuple(len(rows) for rows in loaded),
        weights=tuple(one.weight for one in config.data_sets),
    )
    return list(chain.from_iterable(loaded)), mixture


def load_conversations(config: SftDataConfig) -> list[Row]:
    """Every row of one data set; refuses an empty one and names the first row that is wrong."""
    roles = frozenset(config.train_roles)
    found: list[Row] = []
    for place, row in _rows(config):
        if is_record(row):
            found += record_conversations(place, row, roles, config.min_reward)
        else:
            found.append(parse_row(place, row, roles))
    if not found:
        raise ConfigError(
            f"data set {config.path!r} has no rows to learn; look at data.min_reward if it holds "
            "episodes"
        )
    return found


def _rows(config: SftDataConfig) -> Iterator[tuple[str, Any]]:
    """Every row with its place, for errors."""
    path = Path(config.path)
    if path.is_file():
        yield from _read_lines(path)
    elif path.is_dir():
        for file in record_files(path):
            yield from _read_lines(file)
    else:
        for number, row in enumerate(load_hub_rows(config.path, config.split)):
            yield f"{config.path} row {number}", row


def _read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    # Editors of some systems begin a file with a byte order mark.
    with path.open(encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _parse(f"{path}:{number}", line)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 ({error}); convert it") from error


def _parse(place: str, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} is not JSON: {error}") from error
