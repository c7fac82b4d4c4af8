"""Options of algorithms are refused before anything starts, at their key."""

from __future__ import annotations

from typing import Any

import pytest

from gradus.config import ALGORITHM_OPTIONS
from gradus.config.algorithm_options import algorithm_option_problems
from gradus.testing.configs import build_run_config, contradictions_of


def messages(name: str, **options: Any) -> list[str]:
    return [str(problem) for problem in algorithm_option_problems(("options",), name, options)]


@pytest.mark.parametrize("name", sorted(ALGORITHM_OPTIONS))
def test_the_defaults_of_every_algorithm_can_be_written_down(name: str) -> None:
    options = {key: option.default for key, option in ALGORITHM_OPTIONS[name].items()}
    written = {key: value for key, value in options.items() if value is not None}
    assert messages(name, **written) == []


def test_a_misspelt_option_is_refused_with_the_nearest() -> None:
    assert messages("rae", momentun=0.5) == [
        "options.momentun: algorithm 'rae' takes no such option; did you mean 'momentum'?"
    ]
    (message,) = messages("grpo", xyz=1)
    assert "use one of: scale_by_std, leave_one_out, length_penalty" in message
    (message,) = messages("max_rl", scale_by_std=True)
    assert message.endswith("takes no such option; it has none")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("grpo", {"scale_by_std": "true"}, "must be true or false, without quotes"),
        ("grpo", {"leave_one_out": 1}, "must be true or false, without quotes"),
        ("rae", {"momentum": 1.0}, "1.0 is out of range; it must be less than 1"),
        ("rae", {"momentum": "0.9"}, "must be a finite number, without quotes"),
        ("rae", {"order": "update"}, "is not one of update_first, subtract_first"),
        ("rae", {"key": "environment"}, "did you mean 'environment/agent'?"),
        ("hierarchical_grpo", {"episode_agents": "solver"}, 'a list of names: ["solver"]'),
        ("hierarchical_grpo", {"episode_agents": [1]}, "must be a list of names"),
        ("echo", {"tool_names": "search"}, 'must be a list of names: ["search"]'),
        ("echo", {"roles": 0.1}, "must map roles to weights, e.g. {tool = 0.1}"),
        ("echo", {"roles": {"tools": 0.1}}, "the role 'tools'; use system, user, tool, assistant"),
        ("echo", {"roles": {"tool": -1}}, "gives tool the weight -1, which is out of range"),
        ("echo", {"filter": "only_a_module"}, "must contain :"),
        ("echo", {"normalize": "batches"}, "did you mean 'batch'?"),
        ("opsd", {"demonstration": ""}, "must be a text"),
        ("opsd", {"hint": "Look:"}, "must contain {demonstration}"),
        ("sft", {"min_reward": "1"}, "must be a finite number, without quotes"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_what_can(
    name: str, options: dict[str, Any], words: str
) -> None:
    (message,) = messages(name, **options)
    assert words in message


def test_echo_takes_the_options_of_grpo_too() -> None:
    assert messages("echo", roles={"tool": 0.1, "user": 0}, length_penalty=True) == []


def test_the_options_of_ones_own_class_are_left_to_it() -> None:
    assert messages("mine.credit:Mine", anything="goes") == []


def test_a_run_with_wrong_options_is_refused_at_their_keys() -> None:
    shared = {"type": "rae", "options": {"momentum": 2}}
    own = {"type": "echo", "options": {"tool_name": ["search"]}}
    train = {"algo": shared, "env": [{"id": "a"}, {"id": "b", "algo": own}]}
    problems = contradictions_of(build_run_config({"orchestrator": {"train": train}}))
    assert {problem.path for problem in problems} == {
        ("orchestrator", "train", "algo", "options", "momentum"),
        ("orchestrator", "train", "env", 1, "algo", "options", "tool_name"),
    }
