"""Which variables a config may set, and which ones it names."""

from __future__ import annotations

import pytest

from gradus.config import variables_named_in
from gradus.config.check import env_vars_problems
from gradus.config.owned import RESERVED


def test_variables_that_the_config_names_are_found_at_any_depth() -> None:
    config = {
        "taskset": {"id": "x", "task": {"judges": [{"client": {"api_key_var": "JUDGE_KEY"}}]}},
        "agent": {"harness": {"forward_env": ["EDITOR", 3]}},
        "agents": [{"client": {"headers_from_env": {"X-Team": "TEAM"}, "api_key_var": None}}],
    }
    assert variables_named_in(config) == {"JUDGE_KEY", "EDITOR", "TEAM"}


def test_a_config_without_names_names_nothing() -> None:
    assert variables_named_in({"taskset": {"id": "x"}, "pool": [1, None]}) == set()


@pytest.mark.parametrize(
    ("role", "name"), [(role, name) for role, names in RESERVED.items() for name in names]
)
def test_a_variable_that_gradus_sets_is_refused_with_the_reason(role: str, name: str) -> None:
    (problem,) = env_vars_problems(role, (role, "env_vars"), {name: "secret value"})
    assert "gradus sets it itself" in problem.message
    assert "secret value" not in problem.message


def test_an_ordinary_variable_is_accepted() -> None:
    assert list(env_vars_problems("trainer", ("trainer", "env_vars"), {"MY_FLAG": "1"})) == []
