"""A hold-out by hash: which side of a task set a task is on, by nothing but its own key.

So the sides are disjoint for any order, number and seed of the tasks, and a task stays on its side
when others are added. A larger fraction only moves tasks to the held-out side.
"""

from __future__ import annotations

import hashlib
from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

from gradus.errors import ConfigError

Side = Literal["train", "held_out"]

_HASH_BYTES = 8


class HoldoutKeys(BaseModel):
    """The three keys of a task set that holds tasks out; its config inherits them.

    >>> HoldoutKeys(holdout_fraction=0.0).keeps("any key")
    True
    """

    holdout_fraction: float = Field(0.1, ge=0.0, le=1.0)
    """Share of the tasks that is held out, by the hash of each."""
    holdout_seed: int = 0
    """Another number holds other tasks out."""
    side: Side = "train"
    """Which tasks to load: those to train on, or those that are held out."""

    def keeps(self, *keys: str) -> bool:
        """Whether the task with these keys is on the configured side; one held-out key is enough to
        hold it out, so that no task to train on has any."""
        fraction, seed = self.holdout_fraction, self.holdout_seed
        is_held_out = "held_out" in {side_of(key, fraction=fraction, seed=seed) for key in keys}
        return is_held_out == (self.side == "held_out")

    @model_validator(mode="after")
    def _refuse_empty_side(self) -> Self:
        """ConfigError where no task can be on the side; a search without end would not find one."""
        if self.holdout_fraction == (1.0 if self.side == "train" else 0.0):
            raise ConfigError(
                f"no task is on side = {self.side!r} with holdout_fraction = "
                f"{self.holdout_fraction:g}"
            )
        return self


def side_of(key: str, *, fraction: float, seed: int = 0) -> Side:
    """The side of a task; any text is a key.

    >>> side_of("a task", fraction=1.0)
    'held_out'
    """
    text = f"{seed}\0{key}".encode("utf-8", "surrogatepass")
    number = int.from_bytes(hashlib.sha256(text).digest()[:_HASH_BYTES], "big")
    return "held_out" if number < fraction * 256**_HASH_BYTES else "train"
