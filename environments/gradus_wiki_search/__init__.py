"""Search a small encyclopedia, read its articles, and answer questions that need several of them.

Its modules `world`, `questions` and `search` can be imported without verifiers, so the taskset is
loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["WikiSearchTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("gradus_wiki_search.taskset"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
