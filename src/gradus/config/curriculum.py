"""Which of its tasks a source plays next."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradus.config.base import StrictConfig


class CurriculumConfig(StrictConfig):
    """A registered curriculum or a class of your own."""

    type: str = "uniform"
    """`uniform`, `difficulty`, or "package.module:Class"."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the curriculum, e.g. {hard_share = 0.2}."""
