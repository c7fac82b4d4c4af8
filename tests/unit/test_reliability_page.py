"""The catalogue of faults and the marks of the tests agree, and the page shows what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import reliability_page
from reliability_page import Row, catalogue, marks, problems, status

ROOT = Path(__file__).resolve().parents[2]
ROWS = {name: Row("a fault", "an end", not_shown="later") for name in reliability_page.names()}


def test_every_row_has_a_test_or_a_reason_and_never_both() -> None:
    assert problems(catalogue(), marks()) == []


def test_every_mark_stands_where_it_is_counted() -> None:
    """Above a function whose name begins with test_, with plain names as arguments."""
    for path in (ROOT / "tests").rglob("*.py"):
        if path == Path(__file__):
            continue
        text = path.read_text()
        marked = re.findall(
            r"^@pytest\.mark\.shows\((?:\s*\"\w+\",?)+\s*\)\n"
            r"(?:@(?:.|\n)*?)?(?:async )?def test_",
            text,
            re.M,
        )
        assert len(marked) == text.count("mark.shows"), path.name


@pytest.mark.parametrize(
    ("changed", "marked", "said"),
    [
        ({}, {"F81": ["a.py::test_b"]}, "F81 has no place in the catalogue"),
        ({"F01": Row("a fault", "an end")}, {}, "F01 has neither a test nor a reason"),
        ({}, {"I1": ["a.py::test_b"]}, r"I1 is said not to be shown; a\.py::test_b says"),
        ({"F02": Row("a fault", "", "", "later")}, {}, "F02 does not say what holds"),
        ({"F03": Row("a", "b", "c", "d")}, {}, "F03 says both what it lacks and"),
        ({"F99": Row("a", "b", "", "d")}, {}, "F99 is not a row"),
    ],
)
def test_what_does_not_agree_is_named(
    changed: dict[str, Row], marked: dict[str, list[str]], said: str
) -> None:
    (found,) = problems({**ROWS, **changed}, marked)
    assert re.match(said, found)
    assert problems(ROWS, {}) == []


def test_a_row_that_is_gone_is_missed() -> None:
    assert problems({n: row for n, row in ROWS.items() if n != "SEC7"}, {}) == [
        "SEC7 is missing or out of order"
    ]


def test_marks_are_read_from_the_text_of_tests(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        'import gone\n@pytest.mark.shows("F01", "I2")\n@pytest.mark.slow\n'
        'async def test_b(): ...\nclass C:\n    @pytest.mark.shows("F01")\n    def test_d(): ...\n'
    )
    place = f"{tmp_path.name}/test_a.py"
    found = {"F01": [f"{place}::test_b", f"{place}::test_d"], "I2": [f"{place}::test_b"]}
    assert marks(tmp_path) == found
    states = [status(n, Row("a", "b", lacks), found) for n, lacks in (("F01", ""), ("I2", "c"))]
    assert states == ["held", "in part"]
