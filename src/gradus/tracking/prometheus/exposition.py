"""The page that Prometheus scrapes, in its text format 0.0.4 (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gradus.tracking.prometheus.names import SeriesKind

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_LABEL_CHARACTERS = 200
"""A longer value is cut: a label is a name, not a text."""


@dataclass
class Family:
    """All series of one name."""

    kind: SeriesKind
    help: str
    samples: dict[tuple[tuple[str, str], ...], float] = field(default_factory=dict)
    """Labels → value."""


class Page:
    """Collects samples, and writes them as one text.

    >>> page = Page({"run": "demo"})
    >>> page.add("gradus_step", 3.0, help="Step.")
    >>> print(page.text(), end="")
    # HELP gradus_step Step.
    # TYPE gradus_step gauge
    gradus_step{run="demo"} 3
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        """`labels` are on every sample."""
        self._labels = dict(labels)
        self._families: dict[str, Family] = {}

    def add(
        self,
        name: str,
        value: float,
        *,
        help: str,
        kind: SeriesKind = "gauge",
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Add one sample; of two with the same labels the later one counts."""
        family = self._families.setdefault(name, Family(kind, help))
        own = {key: text[:MAX_LABEL_CHARACTERS] for key, text in (labels or {}).items()}
        family.samples[tuple(sorted({**self._labels, **own}.items()))] = value

    def text(self) -> str:
        """Every family with its help and its type."""
        return "".join(line for name in sorted(self._families) for line in self._lines(name))

    def _lines(self, name: str) -> Iterable[str]:
        family = self._families[name]
        yield f"# HELP {name} {_escape(family.help)}\n"
        yield f"# TYPE {name} {family.kind}\n"
        for labels, value in family.samples.items():
            pairs = ",".join(f'{key}="{_escape(text, quotes=True)}"' for key, text in labels)
            yield f"{name}{{{pairs}}} {format_value(value)}\n"


def format_value(value: float) -> str:
    """A number as Prometheus reads it.

    >>> [format_value(v) for v in (3.0, 0.1, 1e300, float("nan"), float("-inf"))]
    ['3', '0.1', '1e+300', 'NaN', '-Inf']
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


def _escape(text: str, *, quotes: bool = False) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    if quotes:
        escaped = escaped.replace('"', '\\"')
    return escaped.replace("\r", " ").encode("utf-8", "replace").decode()
