"""What the models accept at a key path, and what typed text becomes there."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import Field, ValidationError

from gradus.config import RunConfig, StrictConfig, dotted, load_config
from gradus.config.keys import UNKNOWN, KeyPath, all_key_paths, annotation_at, keys_at, type_text
from gradus.config.problems import Problem, shown
from gradus.config.schema.learning import OptimizerConfig
from gradus.errors import ConfigError, nearest, refuse

ENV: KeyPath = ("orchestrator", "train", "env")


@pytest.mark.parametrize(
    ("path", "annotation"),
    [
        ((), RunConfig),
        (("max_steps",), int),
        (("trainer", "optimizer", "max_grad_norm"), float),
        ((*ENV, 0, "id"), str),
        ((*ENV, 3, "curriculum", "easy_above"), float),
        ((*ENV, 0, "taskset", "anything", "below"), Any),
        ((*ENV, 0, "agents", "judge", "max_turns"), int | None),
        (("trainer", "env_vars", "X"), str),
        (("nothing",), UNKNOWN),
        ((*ENV, "id"), UNKNOWN),
        (("max_steps", "deeper"), UNKNOWN),
        ((*ENV, 0, "curriculum", "nothing"), UNKNOWN),
    ],
)
def test_annotation_at_a_key_path(path: KeyPath, annotation: Any) -> None:
    assert annotation_at(RunConfig, path) == annotation


def test_the_type_of_a_union_may_be_any_of_its_tags() -> None:
    text = type_text(annotation_at(RunConfig, (*ENV, 0, "curriculum", "type")))
    assert '"uniform" or "difficulty"' in text


def test_keys_of_a_union_are_those_of_all_variants() -> None:
    keys = keys_at(RunConfig, (*ENV, 0, "curriculum"))
    assert {"type", "easy_above", "drop_hard"} <= {*keys}


def test_key_paths_do_not_lead_through_lists() -> None:
    paths = {dotted(path) for path in all_key_paths(RunConfig)}
    assert "trainer.optimizer.lr" in paths
    assert "orchestrator.train.env" in paths
    assert not any("env.id" in path for path in paths)


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int, "int"),
        (int | None, "int or None"),
        (list[str], "list of str"),
        (dict[str, Any], "table of any"),
        (tuple[float, float], "2 x float"),
        (Literal["a", "b"], '"a" or "b"'),
        (OptimizerConfig | None, "table or None"),
    ],
)
def test_a_type_in_words(annotation: Any, text: str) -> None:
    assert type_text(annotation) == text


class Example(StrictConfig):
    """A model with one of each trap."""

    number: float = 1.0
    """A number."""
    table: dict[str, Any] = Field(default_factory=dict)
    """Anything."""


@pytest.mark.parametrize("number", ["1", True, float("inf"), float("nan")])
def test_a_strict_model_takes_no_other_type(number: object) -> None:
    with pytest.raises(ValidationError):
        Example.model_validate({"number": number})


def test_a_strict_model_takes_a_whole_number_as_a_number() -> None:
    assert Example.model_validate({"number": 2}).number == 2.0


def test_a_strict_model_leaves_passed_through_text_alone() -> None:
    assert Example.model_validate({"table": {"a": "007", "b": "1"}}).table == {"a": "007", "b": "1"}


def test_a_strict_model_does_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Example().number = 2.0  # type: ignore[misc]


class Typed(StrictConfig):
    """A key of each kind."""

    whole: int | None = 0
    """A whole number."""
    number: float = 0.0
    """A number."""
    text: str | None = ""
    """Text."""
    switch: bool | Literal["auto"] = False
    """A switch."""
    numbers: list[int] = Field(default_factory=list)
    """Numbers."""
    table: Example | None = Example()
    """A table."""
    free: dict[str, Any] = Field(default_factory=dict)
    """Anything."""


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--whole", "3"], "whole", 3),
        (["--whole", "None"], "whole", None),
        (["--number", "3"], "number", 3.0),
        (["--number", "1e-5"], "number", 1e-5),
        (["--text", "3"], "text", "3"),
        (["--text", "[1]"], "text", "[1]"),
        (["--text", "true"], "text", "true"),
        (["--switch", "True"], "switch", True),
        (["--switch", "auto"], "switch", "auto"),
        (["--switch"], "switch", True),
        (["--no-switch"], "switch", False),
        (["--numbers", "[1]"], "numbers", [1]),
        (["--table", '{"number": 1}'], "table", Example(number=1.0)),
        (["--table"], "table", Example()),
        (["--no-table"], "table", None),
        (["--free.x", "1e999"], "free", {"x": "1e999"}),
    ],
)
def test_text_becomes_what_its_key_wants(words: list[str], key: str, value: object) -> None:
    found = getattr(load_config(Typed, words), key)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    "words",
    [
        ["--whole", "many"],
        ["--number", "x"],
        ["--numbers", "1,2"],
        ["--switch", "yess"],
        ["--table.number", "nan"],
        ["--whole"],
        ["--no-whole"],
    ],
)
def test_text_that_fits_nothing_is_refused_at_its_flag(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"^{words[0]}: "):
        load_config(Typed, words)


def test_a_word_that_begins_one_choice_means_it() -> None:
    assert nearest("ppo", ["dppo", "ipo", "ppo_clip"]) == "ppo_clip"
    assert nearest("dpo", ["dppo", "ppo_clip"]) == "dppo"


def test_nothing_is_near_a_word_that_is_like_no_other() -> None:
    assert nearest("max_stepz", ["max_steps", "seed"]) == "max_steps"
    assert nearest("zzz", ["max_steps", "seed"]) is None


def test_refusing_lists_every_problem() -> None:
    refuse([])
    with pytest.raises(ConfigError) as caught:
        refuse([Problem(("a", 0, "b"), "is wrong"), "c: is wrong too"])
    assert str(caught.value) == "a.0.b: is wrong\nc: is wrong too"


def test_a_value_is_shown_on_one_line() -> None:
    assert shown("a\nb") == "'a\\nb'"
    assert len(shown("x" * 1000)) < 70
