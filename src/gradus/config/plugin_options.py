"""The options of registered filters, curricula and error policies, with the range of each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gradus.config.keys import KeyPath
from gradus.config.option_checks import refused_options
from gradus.config.problems import Problem
from gradus.config.schema.losses import NumberOption, number_words


@dataclass(frozen=True)
class CountOption:
    """A whole number."""

    default: int | None
    """None means that it is found out."""
    least: int
    text: str = ""
    """What it does, with its unit, in one sentence."""

    @property
    def kind(self) -> str:
        """What it takes, in words."""
        return number_words("whole number", {"at least": self.least})

    def refusal(self, value: Any) -> str | None:
        """Why `value` cannot be used; None when it can."""
        if not isinstance(value, int) or isinstance(value, bool):
            return "must be a whole number, without quotes"
        return None if value >= self.least else f"is out of range; it must be at least {self.least}"


@dataclass(frozen=True)
class RangeOption:
    """Two finite numbers, the smaller one first."""

    default: tuple[float, float]
    text: str = ""
    """What it does, in one sentence."""
    kind: ClassVar[str] = "two numbers, the smaller one first"

    def refusal(self, value: Any) -> str | None:
        """Why `value` cannot be used; None when it can."""
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        if not is_pair or any(NumberOption(0.0).refusal(bound) for bound in value):
            return "must be two finite numbers, e.g. [-1.0, 1.0]"
        return None if value[0] < value[1] else "must begin with the smaller number"


Options = Mapping[str, NumberOption | CountOption | RangeOption]

FILTER_OPTIONS: Mapping[str, Options] = {
    "gibberish": {
        "vocabulary_size": CountOption(
            None, least=1, text="V, in tokens. None means the model's vocabulary."
        ),
        "token_id": CountOption(
            100_000, least=0, text="Only tokens with a larger id count as rare."
        ),
        "logprob_offset": NumberOption(
            2.0, text="Nats below -ln V that the logprob of a rare token must lie."
        ),
    },
    "repetition": {
        "tokens": CountOption(
            3_000, least=1, text="Length in tokens of a run that counts as repetition."
        ),
        "probability": NumberOption(
            0.99, above=0.0, below=1.0, text="Each token of the run was sampled above it."
        ),
    },
    "zero_advantage": {},
}
"""Registered filter → its options."""

CURRICULUM_OPTIONS: Mapping[str, Options] = {
    "difficulty": {
        "easy_above": NumberOption(0.9, text="Mean reward above which a task is easy."),
        "hard_below": NumberOption(0.1, text="Mean reward below which a task is hard."),
        "easy_share": NumberOption(
            0.05, least=0.0, most=1.0, text="Share of the groups drawn from the easy tasks."
        ),
        "hard_share": NumberOption(
            0.1, least=0.0, most=1.0, text="Share of the groups drawn from the hard tasks."
        ),
        "reward_range": RangeOption(
            (0.0, 1.0), text="Reward of a task that is never solved, and of one that always is."
        ),
    },
    "uniform": {},
}
"""Registered curriculum → its options."""

ERROR_POLICY_OPTIONS: Mapping[str, Options] = {"listed": {}}
"""Registered error policy → its options; its keys stand in `errors` itself."""

_TABLES = {
    "filter": FILTER_OPTIONS,
    "curriculum": CURRICULUM_OPTIONS,
    "error policy": ERROR_POLICY_OPTIONS,
}


def plugin_option_problems(
    path: KeyPath, kind: str, name: str, options: Mapping[str, Any]
) -> Iterator[Problem]:
    """Options that a registered plug-in does not take, and values that it cannot use."""
    refused = list(refused_options(path, f"{kind} {name!r}", options, _TABLES[kind].get(name)))
    yield from refused
    if name == "difficulty" and not refused:
        yield from _contradictions(path, options)


def _contradictions(path: KeyPath, options: Mapping[str, float]) -> Iterator[Problem]:
    """Pools that overlap, and shares that are more than all."""
    chosen = {name: option.default for name, option in CURRICULUM_OPTIONS["difficulty"].items()}
    values: dict[str, Any] = chosen | dict(options)
    low, high = values["hard_below"], values["easy_above"]
    if low >= high:
        key = "hard_below" if "hard_below" in options else "easy_above"
        yield Problem((*path, key), f"hard_below = {low:g} must be less than easy_above = {high:g}")
    easy, hard = values["easy_share"], values["hard_share"]
    if easy + hard > 1:
        key = "hard_share" if "hard_share" in options else "easy_share"
        yield Problem(
            (*path, key),
            f"easy_share = {easy:g} and hard_share = {hard:g} must not be more than 1 together",
        )
