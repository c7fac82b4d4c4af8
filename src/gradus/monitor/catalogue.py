"""Every metric of a run: its name as a pattern, its unit, what it means, and who makes it.

A name is `<stage>/<quantity>/<reduction>`, in the order in which a task becomes a step. In a
pattern `[/<source>]` may be missing, and then the number is that of all sources together;
`{mean,p95}` is one of the words; `<error>` is whatever the run brings. `describe_metric` finds the
pattern of a name, `page` is docs/metrics.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from gradus.monitor.metric_table import SECTIONS, Metric

METRICS = tuple(metric for section in SECTIONS for metric in section.metrics)
"""Every entry."""

_MAX_REMEMBERED = 8192
"""Descriptions that are kept; a run has some hundred names."""


class Kind(StrEnum):
    """What became of the values that a number summarises; the last word of its name says so."""

    MEAN = "mean"
    PERCENTILE = "percentile"
    """`p5`: a twentieth of the values is as small as this or smaller; `p50` is the median."""
    MAX = "max"
    STD = "std"
    """Standard deviation."""
    SHARE = "share"
    """From 0 to 1."""
    SUM = "sum"
    """Added up since the record before."""
    TOTAL = "total"
    """Added up since the run began."""
    GAUGE = "gauge"
    """As it was when the record was made."""


_REDUCTIONS = {
    kind.value for kind in (Kind.MEAN, Kind.MAX, Kind.STD, Kind.SHARE, Kind.SUM, Kind.TOTAL)
}


@dataclass(frozen=True)
class Description:
    """What is known of one name.

    >>> found = describe_metric("episode/words/reward/mean")
    >>> found.family, found.labels, found.kind
    ('episode/source/reward/mean', {'source': 'words'}, <Kind.MEAN: 'mean'>)
    """

    name: str
    metric: Metric
    kind: Kind
    labels: Mapping[str, str]
    """The text in place of each `<word>` of the pattern."""

    family: str
    """The name with each label's own word in place of its value; the same for all values."""


def describe_metric(name: str) -> Description | None:
    """What the catalogue says of a metric; None for a name that is in no entry.

    >>> describe_metric("loss/total/mean").metric.unit
    'nats'
    """
    return _describe(name)


def entries_of(name: str) -> list[Metric]:
    """Every entry whose pattern the name has; the first is the one that describes it."""
    return [metric for metric, _ in _matches(name)]


@lru_cache(maxsize=_MAX_REMEMBERED)
def _describe(name: str) -> Description | None:
    first = next(_matches(name), None)
    if first is None:
        return None
    metric, match = first
    labels = {label: value for label, value in match.groupdict().items() if value is not None}
    family = name
    for label in sorted(labels, key=match.start, reverse=True):
        family = family[: match.start(label)] + label + family[match.end(label) :]
    return Description(name, metric, kind_of(name), labels, family)


def kind_of(name: str) -> Kind:
    """By the last word of a name.

    >>> kind_of("sample/staleness/p95"), kind_of("optimizer/lr")
    (<Kind.PERCENTILE: 'percentile'>, <Kind.GAUGE: 'gauge'>)
    """
    word = name.rpartition("/")[2]
    if re.fullmatch(r"p\d+", word):
        return Kind.PERCENTILE
    return Kind(word) if word in _REDUCTIONS else Kind.GAUGE


def _matches(name: str) -> Iterator[tuple[Metric, re.Match[str]]]:
    for metric, expression in _by_stage().get(name.partition("/")[0], ()):
        match = expression.fullmatch(name)
        if match is not None:
            yield metric, match


@lru_cache(maxsize=1)
def _by_stage() -> dict[str, list[tuple[Metric, re.Pattern[str]]]]:
    """Entries in the order of the table, by the first word of their names."""
    found: dict[str, list[tuple[Metric, re.Pattern[str]]]] = {}
    for metric in METRICS:
        stage = re.split(r"[/\[]", metric.pattern, maxsplit=1)[0]
        expression = re.compile(_expression(metric.pattern), re.DOTALL)
        found.setdefault(stage, []).append((metric, expression))
    return found


_WORD = re.compile(r"<(\w+)>|\[(.*?)\]|\{(.*?)\}")
_LABELS = {
    **dict.fromkeys(("source", "environment", "agent", "outcome", "k"), "[^/]+"),
    "alarm": "(?!value$)[^/]+",
}
"""What a label may be. Others come from the code of an environment and may be anything."""


def _expression(pattern: str) -> str:
    parts, end = [], 0
    for found in _WORD.finditer(pattern):
        parts.append(re.escape(pattern[end : found.start()]))
        label, optional, choice = found.groups()
        if label:
            parts.append(f"(?P<{label}>{_LABELS.get(label, '.+?')})")
        elif optional:
            parts.append(f"(?:{_expression(optional)})?")
        else:
            parts.append("(?:" + "|".join(map(re.escape, choice.split(","))) + ")")
        end = found.end()
    return "".join([*parts, re.escape(pattern[end:])])


def page() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Every number that reaches `metrics.jsonl`, and with it every tracker, under the same",
        "name; Prometheus has its own rule, see [monitoring](monitoring.md#prometheus).",
        "",
        "`[/<source>]` may be missing: then the number is of all sources together. `{mean,p95}` is "
        "one of the words. The last word says",
        "what became of the values:",
        "",
        "| last word | meaning |",
        "|---|---|",
        *(f"| {word} | {meaning} |" for word, meaning in _LAST_WORDS),
    ]
    for section in SECTIONS:
        lines += ["", f"## {section.title}", section.introduction, ""]
        lines += ["| metric | unit | meaning | made by |", "|---|---|---|---|"]
        lines += [
            f"| `{it.pattern}` | {it.unit} | {it.meaning} | {it.maker} |" for it in section.metrics
        ]
    return "\n".join(lines) + "\n"


_LAST_WORDS = (
    ("`mean`, `max`", "of the values of this record"),
    ("`p5`, `p50`, `p95`", "percentiles of these: the smallest value that so many do not exceed"),
    ("`share`", "from 0 to 1"),
    ("`sum`", "added up since the record before"),
    ("`total`", "added up since the run began, over resumes too"),
    ("any other", "as it was when the record was made"),
)
