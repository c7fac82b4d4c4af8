"""Functions of scripts and notebooks as files: what another process gets of them."""

from __future__ import annotations

import functools
import inspect
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
@functools.singledispatch
def dispatched(reply): return 1.0
@dispatched.register
def of_text(reply: str): return 2.0
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
        *("applied", "decorated", "doubled", "param", "same", "recursive"),
        *("looped/1", "looped/2", "listed/1", "default", "long_default", "made", "shadow"),
        *("built_in", "dup", "kept", "limits", "of_dataclass", "of_enum", "of_tuple", "of_model"),
        *("of_package", "text", "under_if", "mutual", "shares", "local", "of_class", "given_more"),
    ],
)
def test_a_copy_means_what_the_function_means(
    meanings: dict[str, Any], choose: str, tmp_path: Path
) -> None:
    name, _, key = choose.partition("/")
    function = meanings[name][int(key)] if key else meanings[name]
    for called in (name, "mine"):
        copy = written(function, tmp_path, called).function
        assert copy("abc") == function("abc"), file_of(called, function)
        taken = [list(inspect.signature(it).parameters) for it in (copy, function)]
        assert taken[0] == taken[1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("stacked", "different things by 'f'"),
        ("dispatched", "means nothing on its own"),
        ("counting", "no binding for nonlocal"),
        ("dup_base", "'H2' of the class 'H2' may have another value"),
        ("of_changed", "'b' of the class 'Changed' may have another value"),
        ("of_method", "'v' of the class 'Method' may have another value"),
        ("kid", "needs the class in which it stands"),
        ("private", "needs the class in which it stands"),
        ("named", "asks for '__name__'"),
    ],
)
def test_what_would_mean_something_else_is_refused(
    meanings: dict[str, Any], name: str, words: str
) -> None:
    with pytest.raises(ConfigError) as told:
        file_of(name, meanings[name])
    assert words in str(told.value)
    assert "put the function into a file, rewards.py" in str(told.value)


@pytest.mark.parametrize("name", ["max", "mine"])
def test_a_reward_named_like_a_function_that_it_calls(
    meanings: dict[str, Any], name: str, tmp_path: Path
) -> None:
    if name == "max":
        with pytest.raises(ConfigError, match="different things by 'max'"):
            file_of(name, meanings["built_in"])
    else:
        assert written(meanings["built_in"], tmp_path, name).function("") == 2.0


def test_a_file_that_was_saved_since_is_refused(tmp_path: Path) -> None:
    names = cell("def rate(reply): return 1.0\n", "<cell edited>")
    cell("def rate(reply): return 2.0\n", "<cell edited>")
    with pytest.raises(ConfigError, match="not the one that was run; run it again, or put"):
        file_of("rate", names["rate"])


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


@pytest.mark.parametrize(
    "table", [dict.fromkeys(range(200_001)), ["x" * 4_000_000], "x" * 4_000_000]
)
def test_a_value_too_large_for_a_text_is_refused_at_once(table: Any) -> None:
    def rate(reply: str) -> float:
        return float(reply in table)

    with pytest.raises(ConfigError, match=r"uses 'table', a .* too large to copy as text"):
        file_of("rate", rate)
