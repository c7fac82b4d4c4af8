"""Rows of a public data set by name, split and columns, through the optional package `datasets`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from gradus.errors import ConfigError, HubError

Row = dict[str, Any]


def hub_rows(
    name: str, *, split: str, columns: Sequence[str], subset: str | None = None
) -> Iterator[Row]:
    """The chosen columns of every row, in order; reads `name` from the hub or a local folder.

    Everything that can be wrong with the data set is said here, before the first row: ConfigError
    for what to change or install, HubError when the hub was not reached.

        >>> rows = hub_rows("owner/name", split="train", columns=["question"])  # doctest: +SKIP
    """
    dataset = _load(name, split=split, subset=subset)
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


def _load(name: str, *, split: str, subset: str | None) -> Any:
    datasets = _datasets(name)
    where = f"data set {name!r}" + (f", subset {subset!r}" if subset else "")
    try:
        return datasets.load_dataset(name, subset, split=split)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise _not_found(where, error) from error
    # Before OSError, of which it is one.
    except ConnectionError as error:
        raise HubError(
            f"{where} was not reached ({error}). Check the network, or fetch it once elsewhere and "
            "set HF_HUB_OFFLINE=1 with the same HF_HOME, or use the offline source of the task set"
        ) from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"{where}, split {split!r} cannot be read: {_one_line(error)}. Check name, subset and "
            "split on its page"
        ) from error


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
            f"data set {name!r} needs the package `datasets`; install gradus with its extra: "
            "pip install 'gradus-rl[data]'"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
