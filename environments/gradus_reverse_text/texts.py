"""Texts to reverse from a data set of the Hugging Face hub or from a local file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gradus_kit.tasksets.hub import hub_rows
from gradus_kit.tasksets.json_lines import rows_of

HUB_DATASET = "PrimeIntellect/Reverse-Text-RL"


def read_hub(name: str, *, dataset_split: str, column: str) -> Iterator[str]:
    """The texts of a data set by its name on the hub, or by the path of a local folder."""
    rows = hub_rows(name, split=dataset_split, columns=[column])
    for number, row in enumerate(rows):
        yield _checked(row[column], f"row {number} of data set {name!r}", column)


def read_file(path: Path, *, column: str) -> Iterator[str]:
    """The texts of a file of JSON lines."""
    for where, row in rows_of(path):
        yield _checked(row.get(column), where, column)


def _checked(text: object, where: str, column: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: {column!r} is {text!r}, not a text")
    return text
