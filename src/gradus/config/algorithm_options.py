"""The options of each registered algorithm, with their defaults and the range of each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gradus.config.loss_options import ChoiceOption, NumberOption
from gradus.config.option_checks import refused_options
from gradus.config.problems import Problem
from gradus.config.schema import KeyPath

ROLES = ("system", "user", "tool", "assistant")
"""Roles of messages, for `echo`."""
_ALPHA = NumberOption(0.1, least=0.0)


@dataclass(frozen=True)
class FlagOption:
    """Yes or no."""

    default: bool = False

    def refusal(self, value: Any) -> str | None:
        """Why `value` cannot be used; None when it can."""
        return None if isinstance(value, bool) else "must be true or false, without quotes"


@dataclass(frozen=True)
class NamesOption:
    """A list of names."""

    default: tuple[str, ...] | None = None

    def refusal(self, value: Any) -> str | None:
        """Why `value` cannot be used; None when it can."""
        if isinstance(value, str):
            return f'must be a list of names: ["{value}"]'
        if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
            return None
        return "must be a list of names"


@dataclass(frozen=True)
class TextOption:
    """A text, perhaps one that must contain something."""

    default: str | None = None
    contains: str = ""

    def refusal(self, value: Any) -> str | None:
        """Why `value` cannot be used; None when it can."""
        if not isinstance(value, str) or not value:
            return "must be a text"
        if self.contains not in value:
            return f"must contain {self.contains}"
        return None


@dataclass(frozen=True)
class AlphasOption:
    """Roles of messages and the weight of each."""

    default: Mapping[str, float]

    def refusal(self, value: Any) -> str | None:
        """Why `value` cannot be used; None when it can."""
        if not isinstance(value, Mapping):
            return "must map roles to weights, e.g. {tool = 0.1}"
        for role, alpha in value.items():
            if role not in ROLES:
                return f"names the role {role!r}; use {', '.join(ROLES)}"
            if refusal := _ALPHA.refusal(alpha):
                return f"gives {role} the weight {alpha!r}, which {refusal}"
        return None


@dataclass(frozen=True)
class OptionalNumber:
    """A finite number; unset by default."""

    default: None = None

    def refusal(self, value: Any) -> str | None:
        """Why `value` cannot be used; None when it can."""
        return NumberOption(0.0).refusal(value)


AlgorithmOption = (
    NumberOption
    | ChoiceOption
    | FlagOption
    | NamesOption
    | TextOption
    | AlphasOption
    | OptionalNumber
)

_GRPO: Mapping[str, AlgorithmOption] = {
    "scale_by_std": FlagOption(),
    "leave_one_out": FlagOption(),
    "length_penalty": FlagOption(),
}

ALGORITHM_OPTIONS: Mapping[str, Mapping[str, AlgorithmOption]] = {
    "grpo": _GRPO,
    "max_rl": {},
    "hierarchical_grpo": {"episode_agents": NamesOption(())},
    "rae": {
        "momentum": NumberOption(0.95, least=0.0, below=1.0),
        "order": ChoiceOption("update_first", ("update_first", "subtract_first")),
        "key": ChoiceOption(
            "environment/task/agent", ("environment/task/agent", "environment/agent")
        ),
    },
    "echo": {
        "roles": AlphasOption({"tool": 0.1}),
        "tool_names": NamesOption(),
        "filter": TextOption(contains=":"),
        "normalize": ChoiceOption("own", ("own", "batch")),
        **_GRPO,
    },
    "opd": {},
    "opsd": {
        "demonstration": TextOption("answer"),
        "hint": TextOption(
            "This is a good answer to what follows: {demonstration}", contains="{demonstration}"
        ),
    },
    "sft": {"min_reward": OptionalNumber()},
}
"""Registered name → its options; `docs/algorithms.md` says what they do."""


def algorithm_option_problems(
    path: KeyPath, name: str, options: Mapping[str, Any]
) -> Iterator[Problem]:
    """Options that a registered algorithm does not take, and values that it cannot use."""
    return refused_options(path, f"algorithm {name!r}", options, ALGORITHM_OPTIONS.get(name))
