"""The strict base of every config model: unknown keys are errors, validators never write."""

from __future__ import annotations

from pydantic import ConfigDict
from pydantic_config import BaseConfig


class StrictConfig(BaseConfig):
    """Base model: no unknown keys, no change after validation, docstrings are the field's help."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
