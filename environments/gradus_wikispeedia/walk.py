"""A walk over pages: where one is, where one may go, and what a finished walk is worth; pure."""

from __future__ import annotations

import difflib

from gradus_wikispeedia.graph import Page

_SHOWN_LINKS = 150
_FOR_ARRIVING, _FOR_COMING_CLOSER = 0.5, 0.2


def shown(page: Page, text: str, target: str) -> str:
    links = ", ".join(page.links[:_SHOWN_LINKS])
    return f"Target: {target}\nPage: {page.title}\n{text}\nLinks: {links or 'none; go back'}"


def link_on(page: Page, asked: str) -> str | None:
    """The link that a player means, whatever its case; None for one that is not on the page."""
    wanted = asked.strip().lower()
    return next((link for link in page.links if link.lower() == wanted), None)


def refused(page: Page, asked: str) -> str:
    """What the player is told who asks for a link that is not there."""
    near = difflib.get_close_matches(asked.strip()[:100], page.links, n=3, cutoff=0.5)
    hint = f" Links like it: {', '.join(near)}." if near else ""
    return f"The page {page.title} has no link {asked[:100]!r}.{hint} You are still on it."


def worth(moves: int, *, shortest: int, left: int | None) -> float:
    """1 for the shortest way, at least 0.5 for any that arrives, and little for coming closer.

    `left` are the clicks from where the walk ended; None where the target cannot be reached.

        >>> worth(3, shortest=3, left=0), worth(6, shortest=3, left=0), worth(2, shortest=2, left=1)
        (1.0, 0.75, 0.1)
    """
    if left == 0:
        return _FOR_ARRIVING + (1 - _FOR_ARRIVING) * min(1.0, shortest / max(moves, 1))
    if left is None or left >= shortest:
        return 0.0
    return _FOR_COMING_CLOSER * (shortest - left) / shortest
