"""A library of articles with BM25 search over their words."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from gradus.errors import ConfigError

RESULTS = 5
"""Articles that a search shows."""
_LONGEST_QUERY = 300
_LONGEST_ARTICLE = 6000
"""Characters that one reading shows."""


class Library:
    """Owns articles and their index.

    >>> Library({"Ann": "Ann paints.", "Bob": "Bob bakes."}).search("who paints?")  # doctest: +SKIP
    '1. Ann: Ann paints.'
    """

    def __init__(self, articles: Mapping[str, str], *, lister: str = "wiki_search") -> None:
        """`lister` is the tool that shows which articles there are."""
        self._lister = lister
        self._articles = dict(articles)
        self._titles = list(self._articles)
        self._by_lower = {title.lower(): title for title in self._titles}
        package: Any = bm25()
        texts = [f"{title}. {title}. {text}" for title, text in self._articles.items()]
        self._package = package
        self._index = package.BM25()
        self._index.index(self._words(texts), show_progress=False)

    def search(self, query: str) -> str:
        """The best articles for some words, one a line with its beginning."""
        if not self._words([query[:_LONGEST_QUERY]])[0]:
            return "Nothing to search for: give some words."
        hits = self.best(query, RESULTS)
        lines = (f"{n}. {t}: {self._articles[t][:120]}" for n, t in enumerate(hits, start=1))
        return "\n".join(lines) or "No article has these words."

    def best(self, query: str, number: int) -> list[str]:
        """The titles of the articles that have some words, best first."""
        words = self._words([query[:_LONGEST_QUERY]])
        if not words[0]:
            return []
        found, scores = self._index.retrieve(
            words, k=min(number, len(self._titles)), show_progress=False
        )
        return [self._titles[i] for i, s in zip(found[0], scores[0], strict=True) if s > 0]

    def read(self, title: str) -> str:
        """The article under its title; else the titles that look like it."""
        found = self._by_lower.get(title.strip().lower())
        if found is not None:
            text = self._articles[found]
            more = "\n[cut]" if len(text) > _LONGEST_ARTICLE else ""
            return f"# {found}\n{text[:_LONGEST_ARTICLE]}{more}"
        near = difflib.get_close_matches(title[:100].lower(), self._by_lower, n=3)
        hint = ", ".join(self._by_lower[name] for name in near) or f"none; use {self._lister}"
        return f"There is no article {title[:100]!r}. Titles like it: {hint}"

    def _words(self, texts: list[str]) -> list[list[str]]:
        found: list[list[str]] = self._package.tokenize(
            texts, stopwords="en", return_ids=False, show_progress=False
        )
        return found


def bm25() -> ModuleType:
    """The package `bm25s`; ConfigError that says what to install."""
    try:
        return importlib.import_module("bm25s")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "searching needs the package `bm25s`; install gradus with its extra: "
            "pip install 'gradus-rl[tasks]'"
        ) from error
