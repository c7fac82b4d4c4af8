"""Rows of a public data set by name, split and columns, through the optional package `datasets`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gradus.errors import ConfigError
from gradus.rows.tables import load_data_set

Row = dict[str, Any]


def hub_rows(
    name: str, *, split: str, columns: Sequence[str], subset: str | None = None
) -> Iterator[Row]:
    """The chosen columns of every row, in order; reads `name` from the hub or a local folder.

    Everything that can be wrong with the data set is said here, before the first row: ConfigError
    for what to change or install, HubError when the hub was not reached.

        >>> rows = hub_rows("owner/name", split="train", columns=["question"])  # doctest: +SKIP
    """
    dataset = load_data_set(name, split=split, subset=subset)
    missing = [column for column in columns if column not in dataset.column_names]
    if missing:
        raise ConfigError(
            f"data set {name!r} has no column {missing[0]!r}; it has "
            f"{', '.join(dataset.column_names)}. Set the column, or take another data set"
        )
    return _chosen(dataset, columns)


def _chosen(dataset: Any, columns: Sequence[str]) -> Iterator[Row]:
    for row in dataset.select_columns(list(columns)):
        yield {column: row[column] for column in columns}
