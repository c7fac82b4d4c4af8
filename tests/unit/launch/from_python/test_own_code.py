"""Functions of scripts and notebooks as files: what another process gets of them."""

from __future__ import annotations

import inspect
import linecache
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradus.errors import ConfigError, EnvironmentFailure
from gradus.launch.from_python.own_tasks import files_of
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


MEANINGS = """
import enum
import functools
import typing
import xml.etree.ElementTree
from dataclasses import dataclass
from functools import lru_cache, wraps

import pydantic

def scaled(f):
    @wraps(f)
    def inner(*a, **k): return 10 * f(*a, **k)
    return inner
def raw(reply): return 1.0
applied = scaled(raw)
@scaled
def decorated(reply): return 1.0
def double(f):
    def wrapper(reply): return 2 * f(reply)
    return wrapper
@double
def doubled(reply): return 1.0
def retry(n):
    def deco(f):
        def w(*a):
            return f(*a) + n
        return w
    return deco
@retry(5)
def param(reply): return 1.0
@double
@retry(1)
def stacked(reply): return 1.0
def typed(f): return f
@typed
def same(reply): return 1.0
@scaled
def recursive(reply): return 1.0 + (recursive(reply[1:]) if reply else 0)
looped = {}
for k in (1, 2):
    looped[k] = lambda reply, k=k: float(k)
listed = [lambda reply, k=k: float(k) for k in range(3)]
later = 5
def default(reply, w=later, *, more=later + 1): return float(w + more)
def long_default(
    reply,
    w=max(
        later,
        4,
    ),
    f=scaled(raw),
): return w + f("")
later = 7
def make(k):
    def inner(reply, k2=k): return float(k2)
    return inner
made = make(3)
def round(x): return 42.0
def shadow(reply): return round(1.2)
def built_in(reply): return max(1.0, 2.0)
class H:
    def v(self): return 1.0
class H:
    def v(self): return 11.0
def dup(reply): return H().v()
class H2:
    def v(self): return 1.0
class H2(H2):
    def v(self): return super().v() + 10
def dup_base(reply): return H2().v()
limit = 2
class Limits:
    most = limit
    twice = limit * 2
class Method:
    def v(self, w=limit): return w
@dataclass
class Changed:
    b: int = limit
class Kept(H):
    most = 1 + 2
def kept(reply): return Kept.most
limit = 3
def limits(reply): return Limits.most + Limits.twice
def of_method(reply): return Method().v()
def of_changed(reply): return Changed().b
def counter():
    n = 0
    def count(reply):
        nonlocal n
        n += 1
        return float(n)
    return count
counting = counter()
@dataclass
class Part:
    a: int
    b: int = 2
class Color(enum.Enum):
    RED = 1
class P(typing.NamedTuple):
    x: int
class In(pydantic.BaseModel):
    y: int = 1
class M(pydantic.BaseModel):
    x: In = In()
    z: list[In] = []
def of_dataclass(reply): return float(Part(1).b)
def of_enum(reply): return float(Color.RED.value)
def of_tuple(reply): return float(P(3).x)
def of_model(reply): return float(M(z=[{"y": 4}]).z[0].y)
def of_package(reply): return float(len(xml.etree.ElementTree.fromstring("<a/>").tag))
def indented():
    def text(reply):
        t = '''
first
'''
        return float(len(t))
    return text
text = indented()
if later:
    def under_if(reply): return 3.0
@lru_cache
def even(n): return True if n == 0 else odd(n - 1)
@lru_cache(maxsize=3)
def odd(n): return False if n == 0 else even(n - 1)
def mutual(reply): return float(even(4)) + odd.cache_info().maxsize
class Kid(H):
    @staticmethod
    def score(reply): return __class__.__name__
    @staticmethod
    def private(reply): return Kid.__x
kid = Kid.score
private = Kid.private
def named(reply): return float(__name__ == "__main__")
def of_class(reply): return float(reply.__class__ is str)
step = 1.0
def of_local():
    step = 5.0
    class Local:
        def v(self): return self.w
        @property
        def w(self): return step
    def local(reply): return Local().v()
    return local
local = of_local()
SHARED = []
def adds(): SHARED.append(1)
ALIAS = SHARED
def shares(reply):
    adds()
    return float(len(ALIAS) == len(SHARED))
def given_more(reply): return given_more.weight
given_more.weight = 3
"""


@pytest.fixture(scope="module")
def meanings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return cell(MEANINGS, tmp_path_factory.mktemp("script") / "meanings.py")


@pytest.mark.parametrize(
    "choose",
    [
        *("applied", "decorated", "doubled", "param", "same", "recursive", "stacked"),
        *("looped/1", "looped/2", "listed/1", "default", "long_default", "made", "shadow"),
        *("built_in", "dup", "kept", "limits", "of_dataclass", "of_enum", "of_tuple", "of_model"),
        *("of_package", "text", "under_if", "mutual", "shares", "local", "of_class", "given_more"),
        *("dup_base", "of_changed", "of_method", "counting", "named"),
    ],
)
def test_a_copy_means_what_the_function_means(
    meanings: dict[str, Any], choose: str, tmp_path: Path
) -> None:
    name, _, key = choose.partition("/")
    function = meanings[name][int(key)] if key else meanings[name]
    for called in (name, "mine"):
        copy = written(function, tmp_path, called).function
        assert copy("abc") == function("abc")
        taken = [list(inspect.signature(it).parameters) for it in (copy, function)]
        assert taken[0] == taken[1]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names of a script that was run, as `__main__` has them."""
    return cell(SCRIPT, tmp_path_factory.mktemp("script") / "mine.py")


def cell(text: str, file: Path | str) -> dict[str, Any]:
    """The names after a cell of a notebook, whose text only `linecache` knows."""
    names: dict[str, Any] = {"__name__": "__main__"}
    linecache.cache[str(file)] = (len(text), None, text.splitlines(keepends=True), str(file))
    exec(compile(text, str(file), "exec", dont_inherit=True), names)
    return names


def written(function: Any, folder: Path, name: str = "mine") -> RewardFunction:
    for file, text in files_of(name, function).items():
        (folder / file).write_text(text, encoding="utf-8")
    return RewardFunction.load(f"{folder / name}.py:{name}", offered=OFFERED)


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

    for file, text in files_of("mine", my_rewards.rate).items():
        (tmp_path / file).write_text(text)
    line = "import mine; print(mine.mine('a'), mine.mine.__module__)"
    words = [sys.executable, "-c", line]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "1.0 my_rewards\n"


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


def test_a_function_that_cannot_be_copied_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file, pytest.raises(ConfigError, match="'mine'"):
        files_of("mine", lambda reply: file.write(reply))


def test_the_text_of_a_function_is_the_same_each_time(script: dict[str, Any]) -> None:
    first, second = (files_of("mine", script["later"])["mine.py"] for _ in range(2))
    assert first == second
    assert "async def later(reply)" in first
