"""Conversations from where the config says: rows that people have, or records of episodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from gradus.config import SftDataConfig
from gradus.errors import ConfigError
from gradus.log import get_logger
from gradus.rows.reading import read_rows
from gradus.run.paths import RunDirectory
from gradus.trainer.data.conversations import READ_COLUMNS, Conversation, PlainText, parse_row
from gradus.trainer.data.episode_records import is_record, record_conversations, record_files
from gradus.trainer.data.images import DataImages, ShownImages
from gradus.trainer.data.mixture import Mixture

logger = get_logger(__name__)

Row = Conversation | PlainText
_LINE = re.compile(r":\d+$")
"""The end of a row's place in a file of text; tables of Arrow number their rows."""


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
    unread: set[str] = set()
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
            shown = ShownImages(images, keys, folder, None)
            found.append(parse_row(place, row, roles, shown, is_table=not _LINE.search(place)))
            unread |= keys.keys() - READ_COLUMNS
    if unread:
        logger.warning("%s: columns that are not read: %s", config.path, ", ".join(sorted(unread)))
    if not found:
        raise ConfigError(
            f"data set {config.path!r} has no rows to learn; look at data.min_reward if it holds "
            "episodes"
        )
    return found


def _rows(config: SftDataConfig) -> Iterator[tuple[Path | None, str, Any]]:
    """Every row with its file or folder, and its place, for errors."""
    path = Path(config.path).expanduser()
    files = record_files(path) if path.is_dir() else []
    for file in files:
        yield from ((file, place, row) for place, row in read_rows(file))
    if not files:
        base = path / "rows" if path.is_dir() else path if path.is_file() else None
        found = read_rows(config.path, split=config.split, subset=config.subset)
        yield from ((base, place, row) for place, row in found)
