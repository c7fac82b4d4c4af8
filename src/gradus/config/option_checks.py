"""The options of a registered plug-in, against those that it takes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

from gradus.config.keys import KeyPath
from gradus.config.problems import Problem, nearest, shown


class Option(Protocol):
    """An option that knows which values it takes, and what it means."""

    @property
    def default(self) -> Any:
        """Its value when nothing is written; None when it is then absent or found out."""

    @property
    def text(self) -> str:
        """What it does, with its unit, in one sentence for the reference."""

    @property
    def kind(self) -> str:
        """What it takes, in words."""

    def refusal(self, value: Any) -> str | None:
        """Why `value` cannot be used; None when it can."""
        ...


def refused_options(
    path: KeyPath, what: str, options: Mapping[str, Any], known: Mapping[str, Option] | None
) -> Iterator[Problem]:
    """Options that `what` does not take, and values that it cannot use.

    `known` are those that it takes; None for a class of the user's own, which checks them itself.
    """
    if known is None:
        return
    for key, value in options.items():
        option = known.get(key)
        if option is None:
            yield Problem((*path, key), f"{what} takes no such option; {_hint(key, known)}")
        elif refusal := option.refusal(value):
            yield Problem((*path, key), f"{shown(value)} {refusal}")


def _hint(key: str, known: Collection[str]) -> str:
    """What may have been meant."""
    if not known:
        return "it has none"
    near = nearest(key, known)
    return f"did you mean {near!r}?" if near else f"use one of: {', '.join(known)}"
