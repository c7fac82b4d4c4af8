"""Rows of JSON lines: what would not arrive as it is written is refused with its place."""

from __future__ import annotations

import pytest

from gradus.errors import ConfigError
from gradus.wire.codec import decode, encode
from gradus_jsonl.rows import PromptRow
from gradus_kit.tasksets.json_lines import parse_row


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not JSON"),
        ("[1]", "is a list"),
        ('{"answer": NaN}', "NaN is not a number"),
        ('{"answer": [-Infinity]}', "-Infinity is not a number"),
        ('{"answer": 1e400}', "too large"),
        ('{"answer": 18446744073709551616}', "more than 64 bits"),
        ('{"answer": -9223372036854775809}', "more than 64 bits"),
        (r'{"answer": "\ud800"}', "half a character"),
        ('{"answer": ' + "[" * 101 + "]" * 101 + "}", "more than 100 deep"),
        ('{"answer": ' + "[" * 99_999, "more than 100 deep"),
    ],
)
def test_a_row_that_would_not_arrive_is_refused(line: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        parse_row(line, "tasks.jsonl, line 3")
    assert str(caught.value).startswith("tasks.jsonl, line 3 ")


def test_a_row_arrives_as_it_is_written() -> None:
    line = '{"a": [18446744073709551615, -9223372036854775808, 1.5, null], "b": {"c": "\u00e9"}}'
    row = parse_row(line, "")
    assert decode(encode(PromptRow("", "", row)), dict)["row"] == row  # type: ignore[arg-type]
