"""What owns something that must be closed, and closes it at the end of a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A context manager for a class that has `close`.

    >>> with Journal(path, term=1, now=time.time) as journal:  # doctest: +SKIP
    ...     journal.sync()
    """

    @abstractmethod
    def close(self) -> None:
        """Release what the object owns."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
