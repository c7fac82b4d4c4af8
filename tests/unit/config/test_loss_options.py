"""Options of losses are refused before anything starts, at their key."""

from __future__ import annotations

from typing import Any

import pytest

from gradus.config import option_problems
from gradus.config.schema.losses import LOSS_OPTIONS, ChoiceOption, NumberOption
from gradus.testing.configs import build_run_config, contradictions_of


def messages(name: str, options: dict[str, Any]) -> list[str]:
    return [str(problem) for problem in option_problems(("options",), name, options)]


@pytest.mark.parametrize("name", sorted(LOSS_OPTIONS))
def test_the_defaults_of_every_loss_are_in_range(name: str) -> None:
    assert messages(name, {key: it.default for key, it in LOSS_OPTIONS[name].items()}) == []


def test_an_option_of_another_loss_is_refused_with_the_nearest() -> None:
    assert messages("dapo", {"clip_hi": 0.2}) == [
        "options.clip_hi: loss 'dapo' takes no such option; did you mean 'clip_high'?"
    ]
    (message,) = messages("cispo", {"xyz": 1})
    assert "use one of: ratio_cap, kl_coefficient" in message


@pytest.mark.parametrize("value", [True, "1", None, float("nan"), float("inf"), [1.0]])
def test_what_is_no_finite_number_is_refused(value: Any) -> None:
    assert NumberOption(1.0).refusal(value) == "must be a finite number, without quotes"


def test_bounds_are_open_or_closed() -> None:
    option = NumberOption(0.5, above=0.0, most=1.0)
    assert option.refusal(1) is None
    assert option.refusal(0.0) == "is out of range; it must be greater than 0"
    assert option.refusal(1.01) == "is out of range; it must be at most 1"
    assert NumberOption(0.0, least=0.0).refusal(-1) == "is out of range; it must be at least 0"


def test_a_wrong_word_is_refused_with_the_nearest() -> None:
    option = ChoiceOption("off", ("off", "truncated"))
    assert option.refusal("off") is None
    assert option.refusal("truncate") == "is not one of off, truncated; did you mean 'truncated'?"


def test_the_options_of_ones_own_class_are_left_to_it() -> None:
    assert messages("mine.losses:Mine", {"anything": "goes"}) == []


def test_a_run_with_a_wrong_option_is_refused_at_its_key() -> None:
    loss = {"type": "gspo", "options": {"clip_low": 2.0, "threshold": 0.1}}
    problems = contradictions_of(build_run_config({"trainer": {"loss": loss}}))
    assert {problem.path for problem in problems} == {
        ("trainer", "loss", "options", "clip_low"),
        ("trainer", "loss", "options", "threshold"),
    }
