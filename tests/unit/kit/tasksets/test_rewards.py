"""Reward functions by name: what they may ask for, and what they may return."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from gradus.errors import ConfigError, EnvironmentFailure
from gradus_kit.tasksets.rewards import RewardFunction, WeightedRewards

OFFERED = ("reply", "row")


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Loads the function `rate` of a file with this text."""

    def write(text: str, name: str = "rate") -> RewardFunction:
        file = tmp_path / "mine.py"
        file.write_text(text, encoding="utf-8")
        return RewardFunction.load(f"{file}:{name}", offered=OFFERED)

    return write


async def test_a_function_gets_only_what_it_asks_for(load: Any) -> None:
    rate = load("def rate(reply): return len(reply)")
    assert rate.wanted == ("reply",)
    assert await rate({"reply": "abc", "row": {}}) == {"rate": 3.0}


@pytest.mark.parametrize(
    "text",
    [
        "async def rate(*, row, weight=2): return row['x'] * weight",
        "def rate(**given): return given['row']['x'] * len(given)",
        "class rate:\n def __new__(cls, row, reply='no'): return row['x'] * len(reply)",
    ],
)
async def test_functions_of_every_form_are_called(load: Any, text: str) -> None:
    assert await load(text)({"reply": "ab", "row": {"x": 3}}) == {"rate": 6.0}


async def test_several_numbers_are_recorded_by_their_names(load: Any) -> None:
    rate = load("def rate(): return {'right': True, 'short': 0.5}")
    assert await rate({}) == {"right": 1.0, "short": 0.5}


@pytest.mark.parametrize(
    "value",
    ["float('nan')", "-float('inf')", "None", "'1.0'", "10**400", "[1]", "{}", "{'a': None}", "1j"],
)
async def test_what_is_no_finite_number_is_refused(load: Any, value: str) -> None:
    rate = load(f"def rate(): return {value}")
    with pytest.raises(EnvironmentFailure, match="must return a finite number"):
        await rate({})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("judge()", "reward 'rate' returned a coroutine, 'judge': await it, or return what"),
        ("{'x': judge()}", "reward 'rate' returned a coroutine for 'x', 'judge': await it"),
    ],
)
async def test_what_was_never_awaited_is_named(load: Any, given: str, words: str) -> None:
    rate = load(f"async def judge(): return 1.0\nasync def rate(): return {given}")
    with pytest.raises(EnvironmentFailure, match=words):
        await rate({})


async def test_a_huge_result_is_shown_in_short(load: Any) -> None:
    with pytest.raises(EnvironmentFailure) as told:
        await load("def rate(): return 'x' * 10**6")({})
    assert len(str(told.value)) < 500


@pytest.mark.parametrize("word", ["", "async "])
async def test_what_the_function_raises_is_told_with_its_lines(load: Any, word: str) -> None:
    rate = load(f"{word}def rate():\n    return inner()\ndef inner():\n    return 1 / 0\n")
    with pytest.raises(EnvironmentFailure) as told:
        await rate({})
    file = Path(rate.path.rpartition(":")[0])
    assert [it for it in str(told.value).splitlines() if "^" not in it] == [
        "reward 'rate' failed: ZeroDivisionError: division by zero",
        f'  File "{file}", line 2, in rate',
        "    return inner()",
        f'  File "{file}", line 4, in inner',
        "    return 1 / 0",
    ]


async def test_lines_of_libraries_do_not_push_out_the_user_s_own(load: Any) -> None:
    rate = load("import httpx\ndef rate():\n    return httpx.get('http://127.0.0.1:9')\n")
    with pytest.raises(EnvironmentFailure) as told:
        await rate({})
    file = Path(rate.path.rpartition(":")[0])
    assert str(told.value).splitlines()[1:] == [
        f'  File "{file}", line 3, in rate',
        "    return httpx.get('http://127.0.0.1:9')",
    ]


async def test_several_functions_add_up_by_their_weights(tmp_path: Path) -> None:
    file = tmp_path / "both.py"
    file.write_text("def a(reply): return 2\nasync def b(row): return {'x': 1, 'y': True}\n")
    rewards = WeightedRewards.load({f"{file}:a": 0.5, f"{file}:b": -1.0}, offered=OFFERED)
    assert rewards.wanted == {"reply", "row"}
    assert await rewards({"reply": "", "row": {}}) == {"a": 1.0, "x": -1.0, "y": -1.0}


def test_two_functions_of_one_name_are_refused_when_they_are_loaded(tmp_path: Path) -> None:
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    for file in files:
        file.write_text("def score(): return 2\n")
    with pytest.raises(ConfigError, match="are both named 'score'; rename one of the functions"):
        WeightedRewards.load([f"{file}:score" for file in files], offered=OFFERED)


async def test_a_number_that_two_functions_give_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "both.py"
    file.write_text("def a(): return 2\ndef b(): return {'a': 1}\n")
    rewards = WeightedRewards.load([f"{file}:a", f"{file}:b"], offered=OFFERED)
    with pytest.raises(EnvironmentFailure, match="reward 'b' gives 'a', as another reward does"):
        await rewards({})


def test_a_list_without_functions_is_refused() -> None:
    with pytest.raises(ConfigError, match="no reward function is named"):
        WeightedRewards.load([], offered=OFFERED)


async def test_an_installed_module_is_named_without_py() -> None:
    loaded = RewardFunction.load("textwrap:dedent", offered=("text",))
    assert (loaded.name, loaded.function) == ("dedent", textwrap.dedent)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def other(): return 1", "has no function 'rate'"),
        ("rate = 3", "has no function 'rate'"),
        ("def rate(answer): return 1", "asks for 'answer'; it may take, by name: reply, row"),
        ("def rate(reply, /): return 1", "asks for 'reply'"),
        ("def rate(answer, **more): return 1", "asks for 'answer'"),
        ("import nothing_of_this_name", "fails when it is imported (ModuleNotFoundError"),
        ("def rate(:", "fails when it is imported (SyntaxError"),
    ],
)
def test_a_function_that_cannot_serve_is_refused_at_once(load: Any, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as told:
        load(text)
    assert words in str(told.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("reward", "'module:function' or 'file.py:function'"),
        ("mine.py:", "'module:function' or 'file.py:function'"),
        ("no/such/file.py:rate", "there is no file"),
        ("no_such_module:rate", "cannot import 'no_such_module'"),
        ("math:no_such_function", "has no function"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, words: str) -> None:
    with pytest.raises(ConfigError) as told:
        RewardFunction.load(path, offered=OFFERED)
    assert words in str(told.value)


def test_a_file_is_executed_once_in_a_process(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text("calls = []\ndef rate(): return 1\n", encoding="utf-8")
    path = f"{tmp_path}/counted.py:rate"
    first, second = (RewardFunction.load(path, offered=OFFERED) for _ in range(2))
    assert first.function is second.function
