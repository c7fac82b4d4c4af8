"""Conversations that click on a link, to warm a small model up."""

from __future__ import annotations

import random
from typing import Any

from gradus_wikispeedia.graph import Graph
from gradus_wikispeedia.walk import shown

CLICK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "click_link",
        "description": "Follow a link of the page you are on.",
        "parameters": {
            "properties": {"title": {"title": "Title", "type": "string"}},
            "required": ["title"],
            "title": "click_linkArguments",
            "type": "object",
        },
    },
}
"""The tools as the model sees them declared."""
BACK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "go_back",
        "description": "Return to the page before.",
        "parameters": {"properties": {}, "title": "go_backArguments", "type": "object"},
    },
}


def demonstrations(num: int, *, graph: Graph, seed: int, instruction: str) -> list[dict[str, Any]]:
    """First clicks of walks whose target is a link of the first page.

    The click is on any link of it: a model learns how to click, and has still to find out which
    click pays.
    """
    draw = random.Random(f"wikispeedia demonstrations {seed}")
    pages = [page for page in graph.values() if page.links]
    rows = []
    for _ in range(num):
        page = draw.choice(pages)
        target, title = draw.choice(page.links), draw.choice(page.links)
        call = {"name": "click_link", "arguments": {"title": title}}
        messages = [
            {"role": "system", "content": instruction},
            {"role": "user", "content": shown(page, page.text, target)},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": call}],
            },
        ]
        rows.append({"messages": messages, "tools": [CLICK, BACK]})
    return rows
