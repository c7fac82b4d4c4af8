"""The options of each registered algorithm, with their defaults and the range of each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gradus.config.keys import KeyPath
from gradus.config.option_checks import refused_options
from gradus.config.problems import Problem
from gradus.config.schema.losses import ChoiceOption, NumberOption

ROLES = ("system", "user", "tool", "assistant")
"""Roles of messages, for `echo`."""
LENGTH_PARTS = ("output", "input", "turns")
"""Parts of the length penalty of `grpo`."""
_WEIGHT = NumberOption(0.1, least=0.0)


@dataclass(frozen=True)
class FlagOption:
    """Yes or no."""

    default: bool = False
    text: str = ""
    """What `true` does, in one sentence."""
    kind: ClassVar[str] = "true or false"

    def refusal(self, value: Any) -> str | None:
        """Why `value` cannot be used; None when it can."""
        return None if isinstance(value, bool) else "must be true or false, without quotes"


@dataclass(frozen=True)
class NamesOption:
    """A list of names."""

    default: tuple[str, ...] | None = None
    text: str = ""
    """What the names are, in one sentence."""
    kind: ClassVar[str] = "list of names"

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
    text: str = ""
    """What the text is, in one sentence."""

    @property
    def kind(self) -> str:
        """What it takes, in words."""
        return f"text with {self.contains}" if self.contains else "text"

    def refusal(self, value: Any) -> str | None:
        """Why `value` cannot be used; None when it can."""
        if not isinstance(value, str) or not value:
            return "must be a text"
        if self.contains not in value:
            return f"must contain {self.contains}"
        return None


@dataclass(frozen=True)
class WeightsOption:
    """A few names and the weight of each."""

    default: Mapping[str, float]
    what: str
    """What the names are of, in one word."""
    names: tuple[str, ...]
    text: str = ""
    """What the weights do, in one sentence."""

    @property
    def kind(self) -> str:
        """For the reference."""
        return f"table of {self.what} = weight, each at least 0"

    def refusal(self, value: Any) -> str | None:
        """Why `value` cannot be used; None when it can."""
        if not isinstance(value, Mapping):
            example = next(iter(self.default))
            return f"must map {self.what}s to weights, e.g. {{{example} = 0.1}}"
        for name, weight in value.items():
            if name not in self.names:
                return f"names the {self.what} {name!r}; use {', '.join(self.names)}"
            if refusal := _WEIGHT.refusal(weight):
                return f"gives {name} the weight {weight!r}, which {refusal}"
        return None


@dataclass(frozen=True)
class OptionalNumber:
    """A finite number; unset by default."""

    default: None = None
    text: str = ""
    """What it does, in one sentence."""
    kind: ClassVar[str] = "number"

    def refusal(self, value: Any) -> str | None:
        """Why `value` cannot be used; None when it can."""
        return NumberOption(0.0).refusal(value)


@dataclass(frozen=True)
class OptionalCount:
    """A whole number of 1 or more; unset by default."""

    default: None = None
    text: str = ""
    """What it does, in one sentence."""
    kind: ClassVar[str] = "whole number, 1 or more"

    def refusal(self, value: Any) -> str | None:
        """Why `value` cannot be used; None when it can."""
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        return None if is_count else "must be a whole number of 1 or more"


AlgorithmOption = (
    NumberOption
    | ChoiceOption
    | FlagOption
    | NamesOption
    | TextOption
    | WeightsOption
    | OptionalNumber
    | OptionalCount
)

_GRPO: Mapping[str, AlgorithmOption] = {
    "scale_by_std": FlagOption(text="Divide by the standard deviation of the group's rewards."),
    "leave_one_out": FlagOption(text="Compare with the mean of the other episodes (RLOO)."),
    "length_penalty": FlagOption(
        text="Lower rewards with output, input and turns before the mean is taken."
    ),
    "length_weights": WeightsOption(
        {"output": 0.25, "input": 0.1, "turns": 0.1},
        "part",
        LENGTH_PARTS,
        text="Weights of the length penalty, as shares of the size of the group's mean reward; a "
        "part that is left out weighs 0.",
    ),
    "overlong_limit_tokens": OptionalCount(
        text="Lower rewards by up to 1 as the sampled tokens come near this limit. None means off.",
    ),
    "overlong_cache_tokens": OptionalCount(
        text="Tokens before the limit from which on it costs. None means a fifth of the limit.",
    ),
}

ALGORITHM_OPTIONS: Mapping[str, Mapping[str, AlgorithmOption]] = {
    "grpo": _GRPO,
    "max_rl": {},
    "hierarchical_grpo": {
        "episode_agents": NamesOption(
            (), text="Agents that are compared within one episode instead of over the group."
        )
    },
    "rae": {
        "momentum": NumberOption(
            0.95, least=0.0, below=1.0, text="Share of a baseline that stays at each reward."
        ),
        "order": ChoiceOption(
            "update_first",
            ("update_first", "subtract_first"),
            text="Whether a reward moves its baseline before or after it is compared.",
        ),
        "key": ChoiceOption(
            "environment/task/agent",
            ("environment/task/agent", "environment/agent"),
            text="What has a baseline: each agent per task, or per source.",
        ),
    },
    "echo": {
        "roles": WeightsOption(
            {"tool": 0.1},
            "role",
            ROLES,
            text="Weight of the cross-entropy per role of an observed message.",
        ),
        "tool_names": NamesOption(text="Tools whose messages count. None means all."),
        "filter": TextOption(
            contains=":",
            text='"package.module:function" that says which messages or tokens count. None '
            "means all.",
        ),
        "normalize": ChoiceOption(
            "own",
            ("own", "batch"),
            text="Whether observations have their own denominator or share that of rl.",
        ),
        **_GRPO,
    },
    "opd": {},
    "opsd": {
        "demonstration": TextOption("answer", text="Field of the task that the policy is shown."),
        "hint": TextOption(
            "This is a good answer to what follows: {demonstration}",
            contains="{demonstration}",
            text="The words around the demonstration.",
        ),
    },
    "sft": {
        "min_reward": OptionalNumber(
            text="Episodes with less are left out. None means that all train."
        )
    },
}
"""Registered name → its options; their texts stand in the reference and in `--help`."""


def algorithm_option_problems(
    path: KeyPath, name: str, options: Mapping[str, Any]
) -> Iterator[Problem]:
    """Options that a registered algorithm does not take, and values that it cannot use."""
    return refused_options(path, f"algorithm {name!r}", options, ALGORITHM_OPTIONS.get(name))
