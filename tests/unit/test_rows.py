"""Rows are read from what people have, and what is wrong is named with its file and line."""

from __future__ import annotations

import bz2
import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradus.errors import ConfigError
from gradus.rows.reading import is_file_name, read_rows

ROWS = [{"question": "a, b", "answer": "1"}, {"question": "c\nd", "answer": None}]


def _lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _table(path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).to_parquet(str(path))


def _saved(path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(str(path))


def _folder(path: Path) -> None:
    path.mkdir()
    _table(path / "train-00000-of-00001.parquet")


def _folder_of_text(path: Path) -> None:
    path.mkdir()
    (path / "train.jsonl").write_text(_lines(ROWS))
    (path / "test.jsonl").write_text(_lines(ROWS[:1]))


CSV = 'question,answer\r\n"a, b",1\r\n"c\nd",\r\n'
FORMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a.jsonl": (lambda path: path.write_text("\n" + _lines(ROWS), "utf-8-sig"), ":3"),
    "a.json": (lambda path: path.write_text(json.dumps(ROWS, indent=1)), ":6"),
    "objects.json": (
        lambda path: path.write_text("\n".join(json.dumps(row, indent=1) for row in ROWS)),
        ":5",
    ),
    "a.csv": (lambda path: path.write_bytes(CSV.encode()), ":3"),
    "b.csv": (lambda path: path.write_text(CSV.replace(",", ";").replace("a;", "a,")), ":3"),
    "a.tsv": (lambda path: path.write_text(CSV.replace(",", "\t").replace("a\t", "a,")), ":3"),
    "a.jsonl.gz": (lambda path: path.write_bytes(gzip.compress(_lines(ROWS).encode())), ":2"),
    "a.csv.bz2": (lambda path: path.write_bytes(bz2.compress(CSV.encode())), ":3"),
    "a.parquet": (_table, " row 1"),
    "saved": (_saved, " row 1"),
    "tables": (_folder, " row 1"),
    "texts": (_folder_of_text, "/train.jsonl:2"),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if datasets := sys.modules.get("datasets"):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FORMS)
def test_rows_come_with_their_places(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write, last = FORMS[name]
    write(path)
    found = list(read_rows(path))
    assert [row for _, row in found] == ROWS
    assert found[-1][0] == f"{path}{last}"


@pytest.mark.filterwarnings("ignore")
def test_a_folder_with_subsets_and_splits_is_read_by_both(tmp_path: Path) -> None:
    for name in ("main", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test.jsonl").write_text(_lines([{"a": name}]))
    listed = "".join(f"- config_name: {it}\n  data_dir: {it}\n" for it in ("main", "other"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{listed}---\n")
    assert [row for _, row in read_rows(tmp_path, split="test", subset="other")] == [{"a": "other"}]
    for keys, named in (({}, "'main', 'other'"), ({"subset": "main"}, "'main', split 'train'")):
        with pytest.raises(ConfigError, match=named):
            read_rows(tmp_path, **keys)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_keys_that_a_table_filled_up_are_no_keys(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"calls": [{"a": 1, "b": None}], "x": float("nan")}, {"calls": [{"b": {"c": None}}]}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    assert [row for _, row in read_rows(tmp_path / "a.parquet")] == [
        {"calls": [{"a": 1}], "x": None},
        {"calls": [{"b": {}}], "x": None},
    ]


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', ":2"),
        ("a.json", b'[{"a": 1},\n\n{"a": ,', ":3"),
        ("a.json", b'[{"a": 1},\n{"a": 2}\n', ":3"),
        ("a.json", b"[" * 99_999, ":1"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", ":3"),
        ("a.csv", b"a,a\n1,2\n", ":1"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), " is not UTF-8"),
        ("a.jsonl.gz", gzip.compress(_lines(ROWS * 99).encode())[:-9], " cannot be read"),
        ("a.jsonl.gz", b"text", " cannot be read"),
        ("a.parquet", b"PAR1", " is no table"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(
    name: str, content: bytes, place: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        list(read_rows(tmp_path / name))
    assert str(caught.value).startswith(f"{tmp_path / name}{place}")


def test_a_file_that_is_not_there_is_no_name_of_the_hub(tmp_path: Path) -> None:
    assert is_file_name("rows.tsv.xz")
    assert not is_file_name("openai/gsm8k")
    with pytest.raises(ConfigError, match=r"none\.csv"):
        read_rows(tmp_path / "none.csv")


def test_without_the_package_the_message_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"gradus-rl\[data\]"):
        read_rows("org/chats")
