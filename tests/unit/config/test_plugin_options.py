"""Options of filters, curricula and error policies are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from gradus.config.plugin_options import (
    CURRICULUM_OPTIONS,
    FILTER_OPTIONS,
    plugin_option_problems,
)
from gradus.testing.configs import build_run_config, contradictions_of

TABLES = {"filter": FILTER_OPTIONS, "curriculum": CURRICULUM_OPTIONS}
NAMES = [(kind, name) for kind, table in TABLES.items() for name in sorted(table)]


def messages(kind: str, name: str, **options: Any) -> list[str]:
    return [str(p) for p in plugin_option_problems(("options",), kind, name, options)]


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_the_defaults_can_be_written_down(kind: str, name: str) -> None:
    defaults = {key: option.default for key, option in TABLES[kind][name].items()}
    written = {key: value for key, value in defaults.items() if value is not None}
    assert messages(kind, name, **written) == []


@pytest.mark.parametrize(
    ("kind", "name", "options", "words"),
    [
        ("filter", "repetition", {"token": 5}, "takes no such option; did you mean 'tokens'?"),
        ("filter", "repetition", {"tokens": 0}, "0 is out of range; it must be at least 1"),
        ("filter", "repetition", {"tokens": 5.5}, "must be a whole number, without quotes"),
        ("filter", "repetition", {"probability": 1.0}, "1.0 is out of range; it must be less"),
        ("filter", "gibberish", {"vocabulary_size": "big"}, "must be a whole number"),
        ("filter", "zero_advantage", {"tokens": 5}, "takes no such option; it has none"),
        ("curriculum", "uniform", {"seed": 5}, "takes no such option; it has none"),
        ("curriculum", "difficulty", {"hard": 1}, "use one of: easy_above, hard_below"),
        ("curriculum", "difficulty", {"hard_share": -0.1}, "it must be at least 0"),
        (
            "curriculum",
            "difficulty",
            {"hard_below": 0.95},
            "options.hard_below: hard_below = 0.95 must be less than easy_above = 0.9",
        ),
        (
            "curriculum",
            "difficulty",
            {"easy_share": 0.95},
            "options.easy_share: easy_share = 0.95 and hard_share = 0.1 must not be more than 1",
        ),
        ("error policy", "listed", {"retries": 3}, "takes no such option; it has none"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_with_what_can(
    kind: str, name: str, options: dict[str, Any], words: str
) -> None:
    (message,) = messages(kind, name, **options)
    assert words in message


def test_a_class_of_the_user_s_own_checks_its_options_itself() -> None:
    assert messages("filter", "mine:Filter", anything=1) == []


def test_every_place_in_a_run_is_checked() -> None:
    source = {
        "id": "reverse-text",
        "curriculum": {"type": "difficulty", "options": {"hard": 1}},
        "errors": {"options": {"list": []}},
    }
    filters = [{"type": "repetition", "options": {"token": 5}}]
    orchestrator = {"train": {"env": [source]}, "filters": filters}
    config = build_run_config({"orchestrator": orchestrator})
    assert [".".join(map(str, problem.path)) for problem in contradictions_of(config)] == [
        "orchestrator.filters.0.options.token",
        "orchestrator.train.env.0.curriculum.options.hard",
        "orchestrator.train.env.0.errors.options.list",
    ]
