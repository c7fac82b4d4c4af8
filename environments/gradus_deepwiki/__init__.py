"""Questions about a made-up country, asked of its wikis with the tools of DeepWiki."""

from __future__ import annotations

from gradus_deepwiki.taskset import DeepWikiTaskset

__all__ = ["DeepWikiTaskset"]
