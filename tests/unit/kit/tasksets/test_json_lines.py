"""Rows of JSON lines: what would not arrive as it is written is refused with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradus.errors import ConfigError
from gradus.wire.codec import decode, encode
from gradus_jsonl.rows import PromptRow
from gradus_kit.tasksets.json_lines import rows_of


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"a":', "is not JSON"),
        ("1", "is a int"),
        ('{"answer": NaN}', "no number"),
        ('{"answer": [-Infinity]}', "no number"),
        ('{"answer": 1e400}', "no number"),
        ('{"answer": 18446744073709551616}', "more than 64 bits"),
        ('{"answer": -9223372036854775809}', "more than 64 bits"),
        (r'{"answer": "\ud800"}', "no text"),
        ('{"answer": ' + "[" * 101 + "]" * 101 + "}", "more than 100 deep"),
        ('{"answer": ' + "[" * 99_999, "is not JSON"),
    ],
)
def test_a_row_that_would_not_arrive_is_refused(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"answer": 1}\n\n' + line)
    with pytest.raises(ConfigError, match=reason) as caught:
        list(rows_of(file))
    assert str(caught.value).startswith(f"{file}:3 ")


def test_a_row_arrives_as_it_is_written(tmp_path: Path) -> None:
    line = '{"a": [18446744073709551615, -9223372036854775808, 1.5, null], "b": {"c": "\u00e9"}}'
    (tmp_path / "tasks.jsonl").write_text(line)
    [(_, row)] = rows_of(tmp_path / "tasks.jsonl")
    assert decode(encode(PromptRow("", "", row)), dict)["row"] == row  # type: ignore[arg-type]
