"""Tables of Arrow and data sets of the hub, by the optional package `datasets`."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from gradus.errors import ConfigError, HubError

_SAVED = ("dataset_dict.json", "state.json")
"""Written by `save_to_disk` beside its tables."""


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
            f"{where}, split {split!r} cannot be read: {one_line(error)}. Correct the name, or "
            "set `subset` and `split`"
        ) from error


def _is_saved(folder: Path) -> bool:
    return any((folder / file).is_file() for file in _SAVED)


def files_of_folder(folder: Path, split: str, subset: str | None) -> list[Path]:
    """The files of a split; none of what `save_to_disk` wrote."""
    if _is_saved(folder):
        return []
    datasets = _datasets(str(folder))
    with _refusals(datasets, str(folder), split, subset):
        named = datasets.load_dataset_builder(str(folder), subset).config.data_files or {}
        return [Path(file) for file in named.get(split, ())]


def without_nulls(value: Any) -> Any:
    """A value without the keys that a table filled up: in a column all objects have the same."""
    if isinstance(value, Mapping):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def rows_of_table(path: Path, kind: str) -> Iterator[tuple[str, Any]]:
    datasets = _datasets(str(path))
    try:
        found = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        rows = rows_of_data_set(found.decode(False), str(path))
        yield from rows
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"{path} is no table of {kind}: {one_line(error)}") from error


def rows_of_data_set(rows: Any, name: str) -> Iterator[tuple[str, Any]]:
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
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name!r} needs the package `datasets`; install gradus with its extra: "
            "pip install 'gradus-rl[data]'"
        ) from error
    # Its errors are raised too, and said once.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
