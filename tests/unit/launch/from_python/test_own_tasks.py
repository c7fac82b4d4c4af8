"""Rows and rewards of a call in Python: every form that is taken, and what is said of others."""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from gradus.errors import ConfigError
from gradus.launch.from_python import own_tasks as module
from gradus.launch.from_python.own_tasks import own_tasks, rows_of, try_rewards, unrated

ROWS: list[dict[str, Any]] = [
    {"prompt": "2+2", "answer": "4"},
    {"prompt": "3+3", "answer": "6", "level": 2},
]


def score(reply: str, row: dict[str, Any]) -> float:
    return float(reply == row["answer"])


def length(reply: str) -> float:
    return float(len(reply))


def generated() -> Iterator[dict[str, Any]]:
    yield from ROWS


class Data:
    """As a data set of the hub is read."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.column_names = list(rows[0])
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)


@pytest.mark.parametrize(
    "tasks",
    [ROWS, tuple(ROWS), generated, generated(), Data(ROWS), lambda: Data(ROWS), iter(ROWS)],
    ids=["list", "tuple", "function", "generator", "data set", "gives data set", "iterator"],
)
def test_rows_come_in_every_form(tasks: Any) -> None:
    assert rows_of(tasks, "tasks") == ROWS


def test_texts_are_prompts_and_gaps_of_a_frame_are_none() -> None:
    assert rows_of(["a", {"prompt": "b"}], "tasks") == [{"prompt": "a"}, {"prompt": "b"}]
    assert rows_of(pandas.DataFrame(ROWS), "tasks")[0]["level"] is None


def test_numbers_of_numpy_are_written_as_plain_ones() -> None:
    row = {"prompt": "x", "answer": 1, "n": np.int64(3), "v": np.array([1.5])}
    text = own_tasks([row], None).files["tasks.jsonl"]
    assert json.loads(text) == {"prompt": "x", "answer": 1, "n": 3, "v": [1.5]}


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ([], "there are no rows"),
        (iter(()), "there are no rows"),
        (3, "a int gives no rows"),
        (b"x", "a bytes gives no rows"),
        (ROWS[0], "one dict, not a list of rows; write [row]"),
        ({"messages": [{"role": "user", "content": "x"}]}, "one dict, not a list of rows"),
        (
            {"prompt": ["x", "y"]},
            "a dict of columns, not a list of rows; use datasets.Dataset.from",
        ),
        ({"prompt": np.array(["x"]), "meta": [{}]}, "a dict of columns"),
        ({"messages": [[{"role": "user", "content": "x"}]]}, "a dict of columns"),
        ({}, "one dict"),
        ({"train": Data(ROWS), "test": Data(ROWS)}, "choose one: tasks['train']"),
        ([ROWS[0], 3], "row 1: a int"),
        ([{"question": "x"}], "row 0 has no 'prompt' and no 'messages'; it has 'question'"),
        ([ROWS[0], {}], "row 1 has no 'prompt' and no 'messages'; it has nothing"),
        ([{"prompt": " "}], "row 0: the prompt is ' '"),
        ([{"prompt": None}], "row 0: the prompt is None"),
        ([ROWS[0] | {"at": datetime.date(2020, 1, 1)}], "row 0: 'at' is datetime.date"),
        ([ROWS[0] | {"x": float("nan")}], "row 0: 'x' is nan"),
        ([ROWS[0] | {"x": "\ud800"}], "row 0: 'x' is"),
        ([ROWS[0] | {"x": {1, 2}}], "row 0: 'x' is {1, 2}"),
        ([{"prompt": "x"}], "have no 'answer'"),
    ],
)
def test_rows_that_cannot_be_are_refused_by_number_and_key(tasks: Any, words: str) -> None:
    with pytest.raises(ConfigError) as told:
        own_tasks(tasks, None)
    assert words in str(told.value)


def test_rows_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 3)
    with pytest.raises(ConfigError, match="without end"):
        rows_of(({"prompt": str(n)} for n in itertools.count()), "tasks")


def test_the_key_of_the_prompt_may_be_named() -> None:
    assert own_tasks([{"question": "x", "answer": 1}], None, prompt_key="question").rows
    with pytest.raises(ConfigError, match="has no 'task'; it has 'prompt'"):
        own_tasks([{"prompt": "x"}], score, prompt_key="task")


@pytest.mark.parametrize(
    ("reward", "weights"),
    [
        (score, {"/f/score.py:score": 1.0}),
        ([score, length], {"/f/score.py:score": 1.0, "/f/length.py:length": 1.0}),
        ({score: 1, length: -0.5}, {"/f/score.py:score": 1.0, "/f/length.py:length": -0.5}),
        ({"right": score}, {"/f/right.py:right": 1.0}),
        ("gradus_jsonl.answers:last_number", {"gradus_jsonl.answers:last_number": 1.0}),
        ({"a.b:c": 2}, {"a.b:c": 2.0}),
    ],
)
def test_rewards_come_in_every_form(reward: Any, weights: dict[str, float]) -> None:
    source = own_tasks(ROWS, reward).source(Path("/f"))
    assert source["taskset"] == {"path": "/f/tasks.jsonl", "reward": weights}


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ([], "the list is empty"),
        ({}, "the list is empty"),
        (3, "3 is no function"),
        ("score", "'score' is no function"),
        ([score, None], "None is no function"),
        ([score, score], "two functions are named 'score'"),
        ({score: "much"}, "weight of 'score' is 'much'"),
        ({score: True}, "weight of 'score' is True"),
        ({score: float("inf")}, "weight of 'score' is inf"),
        ({"my name": score}, "'my name' is no name"),
        ({"class": score}, "'class' is a word of Python's own"),
        (["a.py:score", "b.py:score"], "two functions are named 'score'"),
        ([score, "b.py:score"], "two functions are named 'score'"),
    ],
)
def test_rewards_that_cannot_be_are_refused(reward: Any, words: str) -> None:
    with pytest.raises(ConfigError) as told:
        own_tasks(ROWS, reward)
    assert words in str(told.value)


def test_a_reward_that_was_called_is_refused_by_its_name() -> None:
    async def judge() -> float:
        return 1.0

    with pytest.raises(ConfigError, match=r"'judge' was called; give the function .* reward=judge"):
        own_tasks(ROWS, judge())


def test_an_environment_brings_its_own_reward() -> None:
    assert own_tasks("reverse-text", None).source(Path("/f")) == {"id": "reverse-text"}
    with pytest.raises(ConfigError, match="brings its own reward"):
        own_tasks("reverse-text", score)


def test_a_file_of_rows_stays_where_it_is(tmp_path: Path) -> None:
    tasks = own_tasks(tmp_path / "rows.jsonl", score)
    assert list(tasks.files) == ["score.py", "score.pickle"]
    assert tasks.source(Path("/f"))["taskset"] == {
        "path": str(tmp_path / "rows.jsonl"),
        "reward": {"/f/score.py:score": 1.0},
    }


def test_replies_alone_need_no_reward() -> None:
    assert "unrated" in str(unrated(["hello"]).source(Path("/f")))
    assert unrated("reverse-text").source(Path("/f")) == {"id": "reverse-text"}


def raising(reply: str) -> float:
    return float("four")


def not_a_number(reply: str) -> float:
    return float("nan")


def text(reply: str) -> object:
    return "good"


def same(reply: str) -> float:
    return 0.5


def sometimes(reply: str) -> float:
    return 1 / len(reply)


@pytest.mark.parametrize(
    ("reward", "said"),
    [(raising, "ValueError"), (not_a_number, "nan"), (text, "'good'")],
)
def test_a_reward_that_never_rates_is_told_before_anything_starts(
    reward: Any, said: str, tmp_path: Path
) -> None:
    tasks = own_tasks([{"prompt": "2 + 2?", "answer": 4}], reward)
    for name, content in tasks.files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        try_rewards(tasks, tmp_path)
    assert said in str(caught.value)
    if reward is raising:
        line = raising.__code__.co_firstlineno + 1
        assert f'File "{__file__}", line {line}, in raising' in str(caught.value)


@pytest.mark.parametrize("reward", [same, sometimes])
def test_a_reward_that_may_be_meant_goes_on_with_a_warning(
    reward: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = own_tasks([{"prompt": "2 + 2?", "answer": 4}], reward)
    for name, content in tasks.files.items():
        (tmp_path / name).write_text(content)
    try_rewards(tasks, tmp_path)
    assert len(caplog.records) == 1
