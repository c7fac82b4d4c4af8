"""Rows of a data set, and what is said about one that cannot be read."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from gradus.errors import ConfigError, HubError
from gradus_kit.tasksets.hub import hub_rows


class NotFound(FileNotFoundError):
    """What `datasets` raises for a data set that is gated, private or not there."""


@pytest.fixture
def raises(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a `datasets` in place whose loading ends with an error."""

    def install(error: Exception) -> None:
        def load_dataset(*_: Any, **__: Any) -> Any:
            raise error

        exceptions = SimpleNamespace(DatasetNotFoundError=NotFound, DatasetsError=RuntimeError)
        module: Any = SimpleNamespace(
            load_dataset=load_dataset, exceptions=exceptions, logging=MagicMock()
        )
        monkeypatch.setitem(sys.modules, "datasets", module)

    return install


@pytest.mark.filterwarnings("ignore")
def test_the_chosen_columns_of_a_local_folder_come_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    columns = {"b": [1, 2, 3], "other": ["x"] * 3, "a": ["p", "q", "r"]}
    datasets.Dataset.from_dict(columns).to_parquet(str(folder / "train-0.parquet"))
    rows = list(hub_rows(str(folder), split="train", columns=["a", "b"]))
    assert rows == [{"a": "p", "b": 1}, {"a": "q", "b": 2}, {"a": "r", "b": 3}]
    with pytest.raises(ConfigError, match="has no column 'c'; it has b, other, a"):
        hub_rows(str(folder), split="train", columns=["a", "c"])
    with pytest.raises(ConfigError, match="split 'validation' cannot be read"):
        hub_rows(str(folder), split="validation", columns=["a"])


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'gradus-rl\[data\]'"):
        hub_rows("owner/name", split="train", columns=["a"])


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (NotFound("Dataset 'o/n' is a gated dataset on the Hub."), ConfigError, "accept its terms"),
        (NotFound("Dataset 'o/n' doesn't exist."), ConfigError, "Correct the name"),
        (ConnectionError("Couldn't reach 'o/n'"), HubError, "HF_HUB_OFFLINE=1"),
        (ValueError("Unknown split\n'x'"), ConfigError, "cannot be read: Unknown split 'x'"),
        (OSError(), ConfigError, "cannot be read: OSError"),
    ],
)
def test_a_data_set_that_cannot_be_read_is_named_with_what_to_do(
    raises: Any, error: Exception, kind: type[Exception], words: str
) -> None:
    raises(error)
    with pytest.raises(kind, match="data set 'o/n', subset 's'") as told:
        hub_rows("o/n", split="x", columns=["a"], subset="s")
    assert words in str(told.value)
