"""The task sets `gsm8k`, `math500` and `aime`: their problems, and what a reply must hold."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.errors import ConfigError
from gradus_aime.taskset import AimeConfig, AimeTaskset, whole_number
from gradus_gsm8k.problems import make_problems
from gradus_gsm8k.taskset import Gsm8kConfig, Gsm8kTaskset, read_number
from gradus_hendrycks_math.problems import LEVELS, SUBJECTS
from gradus_hendrycks_math.taskset import (
    HendrycksMathConfig,
    HendrycksMathTaskset,
    helpers_here,
)
from gradus_math500.taskset import Math500Config, Math500Taskset

SETS: dict[str, Any] = {
    "gsm8k": (Gsm8kTaskset, Gsm8kConfig, 400),
    "math500": (Math500Taskset, Math500Config, 500),
    "aime": (AimeTaskset, AimeConfig, 30),
}


@pytest.fixture(autouse=True, scope="module")
def _no_helper_is_left() -> Iterator[None]:
    yield
    helpers_here().close()


def load(name: str, **keys: Any) -> list[Any]:
    pytest.importorskip("math_verify")
    taskset, config, _ = SETS[name]
    return list(taskset(config(id=f"gradus-{name}", **keys)))


def saying(reply: str) -> Any:
    return SimpleNamespace(last_reply=reply)


@pytest.mark.parametrize("name", SETS)
async def test_there_are_different_problems_whose_gold_is_right_and_nothing_else(name: str) -> None:
    tasks = load(name)
    assert len({task.data.prompt for task in tasks}) == len(tasks) == SETS[name][2]
    assert [task.data for task in load(name)] == [task.data for task in tasks]
    assert load(name, seed=1)[0].data.prompt not in {task.data.prompt for task in tasks}
    for task in tasks[:30]:
        (gold,) = task.gold_replies()
        assert await task.right(saying(gold)) == 1.0
        for reply in (
            "",
            str(task.data.prompt),
            "\ud800",
            "I do not know.",
            gold.replace("{", "{1+"),
        ):
            assert await task.right(saying(reply)) == float(reply == gold)


@pytest.mark.parametrize("name", ["math500", "aime"])
def test_a_set_to_compare_models_holds_no_default_problem_of_hendrycks_math(name: str) -> None:
    config = HendrycksMathConfig(id="gradus-hendrycks-math")
    trained = {task.data.prompt for task in HendrycksMathTaskset(config)}
    assert not trained & {task.data.prompt for task in load(name)}


@pytest.mark.parametrize("name", SETS)
def test_both_sides_are_apart_and_an_empty_one_is_refused(name: str) -> None:
    sides = [load(name, holdout_fraction=0.3, side=side) for side in ("train", "held_out")]
    train, held_out = ({task.data.prompt for task in side} for side in sides)
    assert train
    assert held_out
    assert not train & held_out
    with pytest.raises(ConfigError, match="no task is on side"):
        load(name, holdout_fraction=1.0)


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("7 * 12 = 84\n#### 75", "75"),
        ("#### 1\n#### 2", "2"),
        ("#### $1,220.50.", "1220.50"),
        ("#### -3", "-3"),
        ("#### 70 + 5", None),
        ("#### 75 apples", None),
        ("#### 1,22", None),
        ("#### ٣", None),
        ("75", None),
        ("#### 75\n####  ", None),
        ("#" * 100_000, None),
    ],
)
def test_the_number_after_the_last_mark_is_read(reply: str, number: str | None) -> None:
    assert read_number(reply) == number


@pytest.mark.parametrize(
    ("box", "number"),
    [("73", 73), ("073", 73), (" 0 ", 0), ("1000", None), ("-1", None), ("7^2", None), ("٣", None)],
)
def test_a_box_of_aime_holds_a_whole_number(box: str, number: int | None) -> None:
    assert whole_number(box) == number


@given(st.text())
def test_any_reply_can_be_read(text: str) -> None:
    read_number(f"#### {text}")
    whole_number(text)


def test_answers_of_word_problems_follow_from_their_numbers() -> None:
    """For the kinds whose formula can be read back from the text."""
    formulas = {
        "boxes with": lambda n: n[0] * n[1] - n[2],
        "times as old": lambda n: n[1] * (1 + n[0]) + 2 * n[2],
        "to the market": lambda n: n[0] * n[1] // 100 * n[2],
        "rides a bicycle": lambda n: n[0] * n[1] + n[2] * n[3],
        "keeps": lambda n: Fraction(n[0] + n[1] - n[2], n[3]),
        "an hour,": lambda n: n[0] * n[1] * n[2] * (1 + n[3]),
        "A book has": lambda n: Fraction(n[0] - 3 * n[1], n[2]),
        "pays with": lambda n: n[4] - n[0] * n[1] - n[2] * n[3],
    }
    checked = set()
    for text, answer in itertools.islice(make_problems(), 200):
        (kind,) = (kind for kind in formulas if kind in text)
        numbers = [int(digits) for digits in re.findall(r"\d+", text)]
        assert formulas[kind](numbers) == answer > 0
        checked.add(kind)
    assert checked == set(formulas)


def test_math500_has_every_subject_and_level() -> None:
    kinds = {(task.data.subject, task.data.level) for task in load("math500")}
    assert kinds == set(itertools.product(SUBJECTS, LEVELS))


@pytest.mark.filterwarnings("ignore")
def test_rows_of_the_hub_are_read_and_those_without_an_answer_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    columns = {
        "gsm8k": {"question": ["a", "b"], "answer": ["2 + 3 = 5\n#### 1,005", "none"]},
        "math500": {
            "problem": ["a", "b"],
            "answer": ["\\frac{1}{2}", "2"],
            "subject": ["Counting & Probability", "Geometry"],
            "level": [5, 2],
        },
        "aime": {"problem": ["a", "b"], "answer": ["073", "1234"]},
    }
    for name, values in columns.items():
        (tmp_path / name).mkdir()
        split = "test" if name == "math500" else "train"
        datasets.Dataset.from_dict(values).to_parquet(str(tmp_path / name / f"{split}-0.parquet"))
    keys: dict[str, Any] = {"source": "hub", "holdout_fraction": 0.0}
    (word,) = load("gsm8k", dataset=str(tmp_path / "gsm8k"), dataset_subset=None, **keys)
    (hard,) = load("math500", dataset=str(tmp_path / "math500"), levels=[5], **keys)
    (whole,) = load("aime", dataset=str(tmp_path / "aime"), **keys)
    assert (word.data.answer, whole.data.answer) == ("1005", 73)
    assert (hard.data.subject, hard.data.answer) == ("counting_and_probability", "\\frac{1}{2}")
