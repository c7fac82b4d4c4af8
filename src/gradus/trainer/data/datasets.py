"""Rows of a data set of the hub, through the optional `datasets` package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradus.errors import ConfigError


def load_hub_rows(name: str, split: str) -> list[Mapping[str, Any]]:
    """All rows of one split; ConfigError when the package or the data set is not there."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name!r} is not a file, and reading it from the hub needs the package 'datasets': "
            "pip install 'gradus-rl[data]'"
        ) from error
    try:
        return list(_undecoded(datasets.load_dataset(name, split=split)))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"data set {name!r}, split {split!r}: neither a local file nor on the hub ({error})"
        ) from error


def _undecoded(rows: Any) -> Any:
    """With the bytes of images as they are, which are decoded where they train."""
    import datasets

    for name, feature in getattr(rows, "features", {}).items():
        of_each = getattr(feature, "feature", None)
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(name, datasets.Image(decode=False))
        elif isinstance(of_each, datasets.Image):
            rows = rows.cast_column(name, datasets.List(datasets.Image(decode=False)))
    return rows
