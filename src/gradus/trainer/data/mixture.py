"""Several data sets in one stream: which of them the next conversation comes from.

The next draw is of the data set that lags most behind its share, so that after any number of draws
each has had its share, within one. It follows from that number alone, as a resume needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice


@dataclass(frozen=True)
class Mixture:
    """Data sets that lie end to end.

    >>> list(islice(Mixture((10, 10), (2.0, 1.0)).parts(), 6))
    [0, 1, 0, 0, 1, 0]
    """

    sizes: tuple[int, ...]
    """Conversations of each data set."""
    weights: tuple[float, ...]
    """How often each is drawn, relative to the others."""

    @property
    def starts(self) -> list[int]:
        return [0, *accumulate(self.sizes[:-1])]

    def parts(self, taken: Sequence[int] | None = None) -> Iterator[int]:
        """The data set of each draw, after `taken` of each were drawn."""
        counts = [0] * len(self.sizes) if taken is None else list(taken)
        shares = [weight / sum(self.weights) for weight in self.weights]
        while True:
            drawn = sum(counts) + 1
            part = max(range(len(counts)), key=lambda i: (shares[i] * drawn - counts[i], -i))
            counts[part] += 1
            yield part

    def taken(self, num_drawn: int) -> list[int]:
        """How many conversations of each data set the first draws took."""
        if len(self.sizes) == 1:
            return [num_drawn]
        counts = [0] * len(self.sizes)
        for part in islice(self.parts(), num_drawn):
            counts[part] += 1
        return counts
