"""Which options each registered loss takes, with their defaults and the range of each value."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gradus.config.keys import KeyPath
from gradus.config.option_checks import refused_options
from gradus.config.problems import Problem, nearest


def number_words(noun: str, bounds: Mapping[str, float | None]) -> str:
    """A number and its range in words: "number above 0 and at most 1"."""
    found = [f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None]
    return f"{noun} {' and '.join(found)}" if found else noun


@dataclass(frozen=True)
class NumberOption:
    """A finite number between bounds."""

    default: float
    above: float | None = None
    """The value must be greater."""
    least: float | None = None
    most: float | None = None
    below: float | None = None
    """The value must be less."""
    text: str = ""
    """What it does, with its unit, in one sentence."""

    @property
    def kind(self) -> str:
        """What it takes, in words."""
        bounds = {"above": self.above, "at least": self.least, "at most": self.most}
        return number_words("number", {**bounds, "below": self.below})

    def refusal(self, value: Any) -> str | None:
        """Why `value` cannot be used; None when it can."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            return "must be a finite number, without quotes"
        if self.above is not None and value <= self.above:
            return f"is out of range; it must be greater than {self.above:g}"
        if self.least is not None and value < self.least:
            return f"is out of range; it must be at least {self.least:g}"
        if self.most is not None and value > self.most:
            return f"is out of range; it must be at most {self.most:g}"
        if self.below is not None and value >= self.below:
            return f"is out of range; it must be less than {self.below:g}"
        return None


@dataclass(frozen=True)
class ChoiceOption:
    """One of a few words."""

    default: str
    choices: tuple[str, ...]
    text: str = ""
    """What each choice does, in one sentence."""

    @property
    def kind(self) -> str:
        """What it takes, in words."""
        return " or ".join(f'"{choice}"' for choice in self.choices)

    def refusal(self, value: Any) -> str | None:
        """Why `value` cannot be used; None when it can."""
        if value in self.choices:
            return None
        near = nearest(str(value), self.choices)
        hint = f"; did you mean {near!r}?" if near else ""
        return f"is not one of {', '.join(self.choices)}{hint}"


Option = NumberOption | ChoiceOption


def _options(*, kl_coefficient: float, **own: Option) -> Mapping[str, Option]:
    """The options of one loss: its own, then those of every loss."""
    return {
        **own,
        "kl_coefficient": NumberOption(
            kl_coefficient,
            least=0.0,
            text="Pull towards the policy that sampled: weight of the squared log-ratio.",
        ),
        "entropy_coefficient": NumberOption(
            0.0, least=0.0, text="Entropy bonus per token; the entropy carries gradient."
        ),
        "reference_kl_coefficient": NumberOption(
            0.0,
            least=0.0,
            text="Pull towards the reference model, on the tokens that it scored.",
        ),
        "importance_sampling": ChoiceOption(
            "off",
            ("off", "truncated", "masked"),
            text="Correction of the mismatch between trainer and engine: `truncated` caps the "
            "ratio r at importance_cap, `masked` drops tokens with r outside [1/cap, cap].",
        ),
        "importance_level": ChoiceOption(
            "token",
            ("token", "sequence", "sequence_mean"),
            text="What r is: the token's ratio, the product over its sequence, or the geometric "
            "mean of the sequence.",
        ),
        "importance_cap": NumberOption(
            2.0, above=1.0, text="The cap of importance_sampling, a ratio of probabilities."
        ),
    }


def _clip(low: float, high: float) -> dict[str, Option]:
    return {
        "clip_low": NumberOption(
            low, above=0.0, most=1.0, text="The ratio is clipped below 1 - clip_low."
        ),
        "clip_high": NumberOption(
            high, above=0.0, text="The ratio is clipped above 1 + clip_high."
        ),
    }


def _threshold(default: float) -> Option:
    return NumberOption(
        default,
        above=0.0,
        most=1.0,
        text="Change of a token's probability beyond which the token is dropped.",
    )


LOSS_OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "dppo": _options(kl_coefficient=1e-3, threshold=_threshold(0.2)),
    "ipo": _options(kl_coefficient=1e-3, threshold=_threshold(0.1)),
    "ppo_clip": _options(kl_coefficient=0.0, **_clip(0.2, 0.2)),
    "dapo": _options(kl_coefficient=0.0, **_clip(0.2, 0.28)),
    "cispo": _options(
        kl_coefficient=0.0,
        ratio_cap=NumberOption(
            5.0, least=1.0, text="Largest weight of a token, a ratio of probabilities."
        ),
    ),
    "gspo": _options(kl_coefficient=0.0, **_clip(3e-4, 4e-4)),
}
"""Registered name → its options; their texts stand in the reference and in `--help`."""


def option_problems(path: KeyPath, name: str, options: Mapping[str, Any]) -> Iterator[Problem]:
    """Options that a registered loss does not take, and values out of range."""
    return refused_options(path, f"loss {name!r}", options, LOSS_OPTIONS.get(name))
