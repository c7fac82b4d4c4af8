"""The real loader of the public data set, on a small data set of the same form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradus.errors import ConfigError
from gradus_reverse_text.taskset import ReverseTextConfig, ReverseTextTaskset
from gradus_reverse_text.texts import HUB_DATASET

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, with a cache for the test."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets


def test_a_data_set_is_loaded_by_name_split_and_column(datasets: Any, tmp_path: Path) -> None:
    texts = [f"Text number {i}." for i in range(40)]
    folder = tmp_path / "data"
    folder.mkdir()
    datasets.Dataset.from_dict({"prompt": texts}).to_parquet(str(folder / "train-0.parquet"))

    def prompts(split: str) -> list[str]:
        config = ReverseTextConfig(id="x", source="hub", dataset=str(folder), split=split)
        return [task.data.prompt for task in ReverseTextTaskset(config)]

    assert sorted([*prompts("train"), *prompts("holdout")]) == sorted(texts)


def test_a_missing_column_is_told_with_those_there_are(datasets: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    datasets.Dataset.from_dict({"text": ["a"]}).to_json(str(tmp_path / "data" / "train.json"))
    config = ReverseTextConfig(id="x", source="hub", dataset=str(tmp_path / "data"))
    with pytest.raises(ConfigError, match="has no column 'prompt'; it has text"):
        list(ReverseTextTaskset(config))


def test_the_default_is_the_public_data_set() -> None:
    assert ReverseTextConfig(id="x").dataset == HUB_DATASET == "PrimeIntellect/Reverse-Text-RL"
