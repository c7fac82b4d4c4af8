"""Why an episode cannot train: an outcome that is counted, not an error of the run."""

from __future__ import annotations

from dataclasses import dataclass


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
