"""Why an episode cannot train, an outcome that is counted; and which error a run ends with."""

from __future__ import annotations

from dataclasses import dataclass

from gradus.errors import GradusError


@dataclass(frozen=True)
class Failure:
    """Why an episode gives no samples."""

    kind: str
    """Counted by this: the type of the error, e.g. "ProviderError" or "invalid_reward"."""
    message: str


class EpisodeFailed(Exception):
    """An episode could not be had; an outcome to count, not an error of the run."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.kind}: {failure.message}")
        self.failure = failure


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show: the first that names itself, else the first of all."""
    leaves: list[BaseException] = []
    waiting: list[BaseException] = [group]
    while waiting:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting[:0] = error.exceptions
        else:
            leaves.append(error)
    return next((e for e in leaves if isinstance(e, GradusError)), leaves[0])
