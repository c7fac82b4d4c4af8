"""What decides which task of a source is played next, and learns from what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class TaskDraw:
    """One task of a source."""

    index: int
    pass_number: int
    """How often this task was drawn before."""


class Curriculum(Protocol):
    """The order of one source's tasks.

    Built as `Class(num_tasks, seed=..., **options)`: `num_tasks` is None for an endless source,
    `seed` a text that is the same in every run with the same seed and source name. The order must
    depend on nothing but these, and on the calls made so far.
    """

    def next_task(self) -> TaskDraw:
        """The task to play next; there is always one."""
        ...

    def record(self, index: int, rewards: Sequence[float]) -> None:
        """A group of task `index` was played to its end: the reward of each finished episode.

        Not called for groups that were abandoned, or without a finished episode.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Everything a restart would lose, as JSON values.

        Copied at once. Numbers and arrays of numpy are converted; what JSON cannot give back (keys
        that are not text, sets, numbers that are not finite) ends the run with an error.
        """
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state()` of a curriculum that was built with the same arguments."""
        ...
