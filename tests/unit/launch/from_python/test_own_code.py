"""Functions of scripts and notebooks as files: what another process gets of them."""

from __future__ import annotations

import functools
import linecache
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from gradus.errors import ConfigError, EnvironmentFailure
from gradus.launch.from_python.own_code import file_of
from gradus_kit.tasksets.rewards import RewardFunction

OFFERED = ("prompt", "reply", "row")
SCRIPT = """
import dataclasses
import functools
import math as maths
import re
from collections import Counter
from pathlib import Path

WORDS = {"a": 1, "b": [1, 2]}
SOME = {"y", "x", "z"}
DIGITS = re.compile(r"[0-9]+", re.I)
HERE = Path("here")
model = object()
row = object()

@dataclasses.dataclass
class Box:
    size: int

    def twice(self):
        return self.size * 2

@functools.lru_cache
def root(number, more=len(WORDS)):
    return maths.sqrt(number) + more

def score(reply, row) -> "Unknown":
    model = Counter(reply)
    return root(len(reply)) + len(DIGITS.findall(reply)) + Box(2).twice() + model["a"]

def times(factor, plus=3):
    def inner(reply):
        return len(reply) * factor + plus
    return inner

def within(n):
    def helper(text):
        return len(text) + n
    def inner(reply):
        return helper(reply) * 2
    return inner

async def later(reply):
    return len(HERE.name) + ("q" in SOME)

pair = [lambda reply: len(reply), lambda reply: WORDS["a"] - len(reply)]
long = (lambda reply, row:
    len(row)
    + 1)
def fails(reply): return model.x
def breaks(reply):
    return [1 / len(reply)
            for _ in "a"]
def again(reply): return again("") if reply else 1.0
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names of a script that was run, as `__main__` has them."""
    return cell(SCRIPT, tmp_path_factory.mktemp("script") / "mine.py")


def cell(text: str, file: Path | str) -> dict[str, Any]:
    """The names after a cell of a notebook, whose text only `linecache` knows."""
    names: dict[str, Any] = {"__name__": "__main__"}
    linecache.cache[str(file)] = (len(text), None, text.splitlines(keepends=True), str(file))
    exec(compile(text, str(file), "exec"), names)
    return names


def written(function: Any, folder: Path, name: str = "mine") -> RewardFunction:
    file = folder / f"{name}.py"
    file.write_text(file_of(name, function), encoding="utf-8")
    return RewardFunction.load(f"{file}:{name}", offered=OFFERED)


@pytest.mark.parametrize(
    ("choose", "value"),
    [
        (lambda names: names["score"], math.sqrt(3) + 2 + 1 + 4 + 2),
        (lambda names: names["times"](4), 15),
        (lambda names: names["within"](1), 8),
        (lambda names: names["later"], 4),
        (lambda names: names["pair"][0], 3),
        (lambda names: names["pair"][1], -2),
        (lambda names: names["long"], 2),
        (lambda names: names["again"], 1),
        (lambda _: len_of_row, 1),
        (lambda _: lambda reply: len(reply) + 1, 4),
        (lambda _: [lambda reply: 2.0, lambda reply: 3.0][1], 3),
        (lambda _: (lambda n: lambda reply: reply.count("a") + n)(5), 7),
    ],
)
async def test_a_function_gives_there_what_it_gives_here(
    script: dict[str, Any], choose: Any, value: float, tmp_path: Path
) -> None:
    rate = written(choose(script), tmp_path)
    assert await rate({"prompt": "p", "reply": "aa1", "row": {"n": 1}}) == {"mine": value}


def len_of_row(row: dict[str, Any]) -> int:
    return len(row)


def test_a_function_of_a_module_is_imported_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards.py").write_text("def rate(reply): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_rewards  # type: ignore[import-not-found]

    text = file_of("mine", my_rewards.rate)
    assert "from my_rewards import rate as mine" in text
    assert f"sys.path[:0] = ['{tmp_path}']" in text
    monkeypatch.delitem(sys.modules, "my_rewards")


def test_a_set_is_written_in_the_same_order_each_time(script: dict[str, Any]) -> None:
    assert "SOME = {'x', 'y', 'z'}" in file_of("mine", script["later"])


def test_what_is_installed_adds_no_folder() -> None:
    assert "sys.path" not in file_of("mine", math.sqrt)


async def test_an_error_shows_the_lines_that_the_user_wrote(
    script: dict[str, Any], tmp_path: Path
) -> None:
    rate = written(script["breaks"], tmp_path)
    with pytest.raises(EnvironmentFailure) as told:
        await rate({"reply": ""})
    first, *lines = str(told.value).splitlines()
    file = script["breaks"].__code__.co_filename
    number = SCRIPT.splitlines().index("def breaks(reply):") + 2
    assert first == "reward 'mine' failed: ZeroDivisionError: division by zero"
    assert lines[:2] == [
        f'  File "{file}", line {number}, in breaks',
        "    return [1 / len(reply)",
    ]


class Rater:
    def __call__(self, reply: str) -> float:
        return 1.0


def test_a_function_that_no_text_gives_is_refused_with_what_to_do(script: dict[str, Any]) -> None:
    typed: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def typed(reply): return 1", "<stdin>", "exec"), typed)
    cases = {
        "'model', a object": script["fails"],
        "is a partial": functools.partial(len_of_row),
        "is a Rater": Rater(),
        "is not known": typed["typed"],
    }
    for words, function in cases.items():
        with pytest.raises(ConfigError) as told:
            file_of("mine", function)
        assert words in str(told.value)
        assert "'mine'" in str(told.value)


def test_one_name_that_means_two_things_is_refused() -> None:
    names = cell("def inner(reply): return n + call()\n", "<cell 1>")
    names["n"] = 1
    others = cell("def call(): return n\n", "<cell 2>")
    others["n"] = 2
    names["call"] = others["call"]
    with pytest.raises(ConfigError, match="different things by 'n'"):
        file_of("mine", names["inner"])
