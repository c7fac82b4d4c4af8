"""Names of metrics held against the catalogue, for the tests of every role."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gradus.monitor.catalogue import METRICS, describe_metric, entries_of
from gradus.monitor.metric_table import Maker

OWN_LOSSES = "loss/<name>"
"""The entry of whatever a loss of the user's own records."""


def families_of(names: Iterable[str]) -> set[str]:
    """The family of each name, which must have one entry, and not as one of a user's loss."""
    found = set()
    for name in names:
        known = [it.pattern for it in entries_of(name) if it.pattern != OWN_LOSSES]
        assert len(known) == 1, f"{name}: {known}"
        description = describe_metric(name)
        assert description is not None
        found.add(description.family)
    return found


def families_in_the_catalogue(*makers: Maker) -> set[str]:
    """Every family that some process is said to make."""
    patterns = [it.pattern for it in METRICS if it.maker in makers and it.pattern != OWN_LOSSES]
    return {re.sub("[<>]", "", form) for pattern in patterns for form in _forms(pattern)}


def _forms(pattern: str) -> list[str]:
    """`a[/<b>]/{c,d}` is `a/c`, `a/d`, `a/<b>/c` and `a/<b>/d`."""
    found = re.search(r"\[(.*?)\]|\{(.*?)\}", pattern)
    if found is None:
        return [pattern]
    choices = ["", found[1]] if found[1] else found[2].split(",")
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [form for choice in choices for form in _forms(f"{before}{choice}{after}")]
