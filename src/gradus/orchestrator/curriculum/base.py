"""What decides which task of a source is played next, and learns from what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


@dataclass(frozen=True)
class TaskDraw:
    """One task of a source."""

    index: int
    pass_number: int
    """How often this task was drawn before."""
    group_size: int | None = None
    """Episodes to play of it. None means the `group_size` of the source."""


class Ending(StrEnum):
    """How a drawn task ended."""

    PLAYED = "played"
    """Every episode of its group ended by itself."""
    TOO_OLD = "too_old"
    """Its group was abandoned, or its samples became too old in the queue. The task comes back to
    the source by itself, `MAX_RETURNS` times."""
    SET_ASIDE = "set_aside"
    """It cannot be loaded, or ends its environment; the source skips it from now on."""


@dataclass(frozen=True)
class TaskResult:
    """What became of a drawn task.

    >>> TaskResult(rewards=(0.0, 1.0), failures=("TimeoutError",)).ending
    <Ending.PLAYED: 'played'>
    """

    ending: Ending = Ending.PLAYED
    rewards: tuple[float, ...] = ()
    """Of each finished episode, the mean over its trainable traces."""
    lengths_tokens: tuple[int, ...] = ()
    """Sampled tokens of each finished episode."""
    num_truncated: int = 0
    """Finished episodes with a trace that a limit cut short."""
    failures: tuple[str, ...] = ()
    """Of each failed episode, the type of its error."""


class Curriculum(Protocol):
    """The order of one source's tasks, and how many episodes are played of each.

    Built as `Class(num_tasks, seed=..., **options)`: `num_tasks` is None for an endless source,
    `seed` a text that is the same in every run with the same seed and source name. The order must
    depend on nothing but these, and on the calls made so far.
    """

    def next_task(self) -> TaskDraw:
        """The task to play next; there is always one."""
        ...

    def record(self, index: int, result: TaskResult) -> None:
        """Hear what became of a draw of task `index`.

        A group that waited too long after it was played is heard twice: as played, then as too old.
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
