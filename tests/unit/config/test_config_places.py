"""Where a value was written: lines of files, and what survives a merge."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from gradus.config import Layers, read_config_file
from gradus.config.front import line_of
from gradus.config.keys import KeyPath, nested
from gradus.errors import ConfigError

TEXT = '''\
seed = 1  # comment
"quoted key" = 2
a.b.c = 3

[table]
x = """
y = 1
[not.a.table]
"""
z = 2
[[list]]
id = 1
[list.sub]
k = 1
[[list]]
inline = {p = {q = 1}}
[[list.inner]]
w = 0
[[list.inner]]
w = 1
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("seed",), 1),
        (("quoted key",), 2),
        (("a", "b", "c"), 3),
        (("table",), 5),
        (("table", "x"), 6),
        (("table", "z"), 10),
        (("list",), 11),
        (("list", 0), 11),
        (("list", 0, "id"), 12),
        (("list", 0, "sub"), 13),
        (("list", 0, "sub", "k"), 14),
        (("list", 1), 15),
        (("list", 1, "inline", "p", "q"), 16),
        (("list", 1, "inner", 1, "w"), 20),
        (("table", "missing"), 5),
    ],
)
def test_line_of_a_key(path: KeyPath, line: int) -> None:
    assert tomllib.loads(TEXT)["list"][1]["inner"][1] == {"w": 1}
    assert line_of(TEXT, path) == line


def test_a_key_that_stands_nowhere_has_no_line() -> None:
    assert line_of(TEXT, ("nothing",)) is None


def merge(*layers: tuple[str, dict[Any, Any]]) -> Layers:
    merged = Layers(object)
    for name, layer in layers:
        merged.add(layer, lambda path, name=name: name)  # type: ignore[misc]
    return merged


def test_tables_merge_key_by_key() -> None:
    merged = merge(("one", {"a": {"x": 1, "y": 1}}), ("two", {"a": {"y": 2}}))
    assert merged.values == {"a": {"x": 1, "y": 2}}
    assert merged.place(("a", "x")) == "one"
    assert merged.place(("a", "y")) == "two"


def test_a_replaced_value_forgets_where_its_parts_came_from() -> None:
    merged = merge(("one", {"a": [{"x": 1}, {"x": 2}]}), ("two", {"a": [{"x": 3}]}))
    assert merged.values == {"a": [{"x": 3}]}
    assert merged.place(("a", 0, "x")) == "two"
    assert merged.place(("a", 1, "x")) == "two"


def test_a_table_replaces_a_value_and_a_value_a_table() -> None:
    assert merge(("one", {"a": 1}), ("two", {"a": {"x": 1}})).values == {"a": {"x": 1}}
    assert merge(("one", {"a": {"x": 1}}), ("two", {"a": 1})).values == {"a": 1}


def test_a_table_of_another_type_replaces_the_table() -> None:
    merged = merge(
        ("one", {"pool": {"type": "elastic", "multiplex": 1}}),
        ("two", {"pool": {"type": "static"}}),
    )
    assert merged.values == {"pool": {"type": "static"}}


def test_a_table_of_the_same_type_merges() -> None:
    merged = merge(
        ("one", {"pool": {"type": "static", "num_workers": 1}}),
        ("two", {"pool": {"type": "static"}}),
    )
    assert merged.values == {"pool": {"type": "static", "num_workers": 1}}


def test_numbers_reach_into_a_list() -> None:
    merged = merge(("one", {"a": [{"x": 1}, {"x": 2}]}), ("two", {"a": {1: {"y": 3}, 2: {"x": 4}}}))
    assert merged.values == {"a": [{"x": 1}, {"x": 2, "y": 3}, {"x": 4}]}
    assert merged.place(("a", 1, "x")) == "one"
    assert merged.place(("a", 1, "y")) == "two"


def test_a_number_far_behind_the_end_is_a_problem() -> None:
    merged = merge(("one", {"a": [1]}), ("two", {"a": {4: 1}}))
    assert [str(problem) for problem in merged.problems] == [
        "a.4: no such entry; the list has 1, counted from 0"
    ]


def test_a_layer_is_copied() -> None:
    layer = {"a": {"b": [1]}}
    merged = merge(("one", layer))
    merged.values["a"]["b"].append(2)
    assert layer == {"a": {"b": [1]}}


def test_nested_holds_one_value() -> None:
    assert nested(("a", 0, "b"), 1) == {"a": {0: {"b": 1}}}


def test_the_place_of_a_file_is_its_name_and_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("\nseed = 1\n")
    _, place = read_config_file(str(path))
    assert place(("seed",)) == f"{path}:2"
    assert place(()) == str(path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", b"[1]", "must hold a table at the top"),
        ("a.json", b'{\n"a": }', "a.json:2: not JSON"),
        ("a.json", b'{"a": NaN}', "not JSON"),
        ("a.json", b'{"a": "\\ud800"}', "not JSON"),
        ("a.json", b"[" * 100_000, "not JSON"),
        ("a.toml", b"\xff", "cannot be read as UTF-8"),
        ("a.toml", b"a = 12:00:00", "is a date or time"),
        ("a.toml", b"a = " + b"[" * 100_000, "not TOML"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_config_file(str(path))
    assert expected in str(caught.value)


def test_a_folder_is_no_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config_file(str(tmp_path))


def test_a_name_with_a_nul_character_is_no_file() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config_file("a\0.toml")
