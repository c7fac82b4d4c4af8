"""Texts to reverse from a data set of the Hugging Face hub or from a local file."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

HUB_DATASET = "PrimeIntellect/Reverse-Text-RL"


def read_hub(name: str, *, dataset_split: str, column: str) -> Iterator[str]:
    """The texts of a data set by its name on the hub, or by the path of a local folder."""
    dataset = _datasets().load_dataset(name, split=dataset_split)
    if column not in dataset.column_names:
        raise ValueError(
            f"data set {name!r} has no column {column!r}; it has {', '.join(dataset.column_names)}"
        )
    for number, text in enumerate(dataset[column]):
        yield _checked(text, f"row {number} of data set {name!r}", column)


def read_file(path: Path, *, column: str) -> Iterator[str]:
    """The texts of a file of JSON lines."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            text = row.get(column) if isinstance(row, dict) else None
            yield _checked(text, f"{path}, line {number}", column)


def _checked(text: object, where: str, column: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: {column!r} is {text!r}, not a text")
    return text


def _datasets() -> ModuleType:
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise ValueError(
            "source = 'hub' needs the package `datasets`; install gradus with its extra: "
            "pip install 'gradus-rl[data]'"
        ) from error
