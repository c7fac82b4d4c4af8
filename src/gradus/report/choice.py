"""Which metrics a person compares, which way is better, and in what units they are."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gradus.monitor import describe_metric

SHOWN_FIRST = {
    "rl": (
        "episode/reward/mean",
        "episode/*/reward/mean",
        "eval/avg@*",
        "eval/*/avg@*",
        "episode/length_tokens/mean",
        "episode/error/share",
        "episode/flat/share",
        "loss/entropy/mean",
        "loss/mismatch_kl/mean",
        "sample/staleness/mean",
        "optimizer/grad_norm",
        "throughput/*_tokens_per_second",
        "time/step_seconds",
    ),
    "sft": (
        "loss/total/mean",
        "validation/loss/mean",
        "eval/avg@*",
        "eval/*/avg@*",
        "optimizer/grad_norm",
        "throughput/trained_tokens_per_second",
        "time/step_seconds",
    ),
}
"""What is compared when nothing is asked for, by kind of run."""
OF_EVERY_KIND = ("eval/*avg*", "loss/*/mean", "throughput/*", "time/step_seconds")

_MORE_IS_BETTER = re.compile(
    r"(episode|eval)/(.+/)?reward/(.+/)?(mean|p\d+)|eval/(.+/)?(avg|pass)([@^].*)?|throughput/(?!peak).+"
)
_LESS_IS_BETTER = re.compile(
    r"loss/(total|ce(_batch|_trace)?)/.*|validation/loss/mean|.*error/(.+/)?share|time/.+_seconds"
    r"|weights/.+_seconds|.*/(boot|setup|finalize)_seconds/.+|throughput/peak_memory_gib"
    r"|loss/mismatch_kl/.+"
)


def shown_first(kinds: Sequence[str]) -> tuple[str, ...]:
    kind = kinds[0] if len(set(kinds)) == 1 else ""
    return SHOWN_FIRST.get("rl" if kind == "replay" else kind, OF_EVERY_KIND)


def direction(name: str) -> int:
    """1 where more is better, -1 where less is, 0 where neither holds by itself.

    >>> direction("episode/reward/mean"), direction("loss/entropy/mean")
    (1, 0)
    """
    if _MORE_IS_BETTER.fullmatch(name):
        return 1
    return -1 if _LESS_IS_BETTER.fullmatch(name) else 0


def unit_of(name: str) -> str:
    """The unit of a metric; empty for a plain number and for a name that is not listed."""
    found = describe_metric(name)
    return "" if found is None or found.metric.unit == "1" else found.metric.unit
