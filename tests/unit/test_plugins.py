"""A plug-in is found by its path, or refused with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradus.errors import ConfigError
from gradus.plugins import find_function, find_plugin, plain_state


def test_a_class_of_the_user_is_found_by_its_path() -> None:
    assert find_plugin("kind", "decimal:Decimal").__name__ == "Decimal"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fractoin", "must be given as 'package.module:Class'"),
        ("no_such_module_here:Thing", "cannot import 'no_such_module_here'"),
        ("fractions:Nothing", "has no class 'Nothing'"),
        ("math:pi", "has no class 'pi'"),
    ],
)
def test_an_unusable_plugin_says_what_is_wrong(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_plugin("loss", name)
    assert message in str(caught.value)
    assert f"loss {name!r}" in str(caught.value)


@pytest.mark.parametrize("code", ["def (", "1 / 0", "from math import nothing"])
def test_a_module_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    (tmp_path / "module_with_a_mistake.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="'module_with_a_mistake' fails when it is imported"):
        find_plugin("loss", "module_with_a_mistake:Loss")


def test_a_function_of_the_user_is_found_by_its_path() -> None:
    assert find_function("echo filter", "math:isfinite")(1.0)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("isfinite", "must be given as 'package.module:function'"),
        ("no_such_module_here:f", "cannot import 'no_such_module_here'"),
        ("math:nothing", "has no function 'nothing'"),
        ("math:pi", "has no function 'pi'"),
    ],
)
def test_an_unusable_function_says_what_is_wrong(path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_function("echo filter", path)
    assert message in str(caught.value)
    assert f"echo filter {path!r}" in str(caught.value)


def test_a_state_comes_back_in_plain_values() -> None:
    state = {"rate": np.float64(0.5), "counts": np.arange(2), "order": (1, None, True, "a")}
    assert plain_state("owner", state) == {
        "rate": 0.5,
        "counts": [0, 1],
        "order": [1, None, True, "a"],
    }
    assert type(plain_state("owner", state)["rate"]) is float


def test_a_state_is_a_copy() -> None:
    state: dict[str, Any] = {"rates": {"a": [0.5]}}
    taken = plain_state("owner", state)
    state["rates"]["a"].append(1.0)
    assert taken == {"rates": {"a": [0.5]}}


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"a": {"b": [1.0, float("nan")]}}, r"holds nan at 'a\.b\[1\]'"),
        ({"a": np.array([float("inf")])}, r"holds inf at 'a\[0\]'"),
        ({"a": {1: 2}}, "holds the key 1, which is not text, at 'a'"),
        ({1: 2}, "holds the key 1, which is not text, at ''"),
        ({"a": {1, 2}}, "holds a set at 'a'"),
        ({"a": object()}, "holds a object at 'a'"),
        ({"a": "\ud800"}, "holds text that is not Unicode at 'a'"),
        ([1], "gives list; it must give a dict"),
    ],
)
def test_a_state_that_would_come_back_otherwise_is_refused(state: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"state\(\) of curriculum 'words' {problem}"):
        plain_state("curriculum 'words'", state)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["again"] = state
    with pytest.raises(ConfigError, match="or contains itself"):
        plain_state("curriculum 'words'", state)
