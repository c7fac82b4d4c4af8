"""Conversations that hand in right programs, to warm a small model up."""

from __future__ import annotations

import random
from typing import Any

from gradus_forth_lang.problems.build import SOLUTION, build_problems

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "submit_code",
        "description": "Hand in the program that defines the word; it is tested on cases that you "
        "do not see.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"title": "Code", "type": "string"}},
            "required": ["code"],
            "title": "submit_codeArguments",
        },
    },
}
"""`submit_code` as the model sees it declared when it is the only tool offered."""


def demonstrations(
    num: int, *, seed: int, tiers: tuple[int, ...] = (0,), wrong_share: float = 0.0
) -> list[dict[str, Any]]:
    """Conversations in the brief style, from problems of a seed of their own.

    In `wrong_share` of them the program is that of another problem, so that a model learns how to
    hand in, and how far its answers may be from right.
    """
    draw = random.Random(f"forth-lang demonstrations {seed}")
    found = [one.problem for one in build_problems(tiers, 400, seed=seed) if one.problem.formula]
    shown = []
    for _ in range(num):
        asked = draw.choice(found)
        answered = draw.choice(found) if draw.random() < wrong_share else asked
        code = answered.solution(SOLUTION)
        call = {"name": "submit_code", "arguments": {"code": code}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": asked.formula},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": call}],
            },
            {"role": "tool", "content": "passed 8 of 8" if answered is asked else "passed 0 of 8"},
            {"role": "assistant", "content": "ok"},
        ]
        shown.append({"messages": messages, "tools": [TOOL]})
    return shown
