"""The strict base of every config model: unknown keys are errors, validators never write."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, model_validator
from pydantic_config import BaseConfig


class StrictConfig(BaseConfig):
    """Base model: no unknown keys, no other type, no change after validation.

    The docstring under a field is its help. A number in quotes is not a number; text from the
    command line becomes a number in `load.py`, where the wanted type is known.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _coerce_dict_str_values(cls, data: Any) -> Any:
        """Keep passed-through settings as they are written: "007" stays text.

        The base class turns a table of texts into numbers, for its own command line.
        """
        return data
