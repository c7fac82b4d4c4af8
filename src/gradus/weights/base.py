"""Weights travel from trainer to inference as one stream of (name, tensor) per version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Published:
    """A version that inference may apply."""

    version: int
    directory: Path
    """Where its files lie."""
    digest: str
    """Of its manifest; stands for every byte of the version."""


class WeightPublisher(Protocol):
    """The trainer's end of a weight transfer; only rank 0 has one."""

    def wait_for_room(self) -> None:
        """Return when one more version can be published; may take as long as an evaluation."""
        ...

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Published:
        """Make `version` available, whole or not at all; FencedError under a newer term."""
        ...

    def drain(self) -> None:
        """Return when inference needs nothing more from this process."""
        ...

    def close(self) -> None:
        """Release what the transfer holds; published versions stay."""
        ...
