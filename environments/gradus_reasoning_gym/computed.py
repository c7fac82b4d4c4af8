"""Scores an answer in a helper process, where the scorer computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import reasoning_gym.factory  # noqa: F401  # here, so that it is no part of a call's time

from gradus_reasoning_gym.generators import Question, scorer


def rate(generator: Mapping[str, Any], answer: str, question: Mapping[str, Any]) -> float:
    """Ask the generator's scorer."""
    return scorer(**generator).score(answer, Question(**question))
