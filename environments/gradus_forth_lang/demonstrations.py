"""Conversations that hand in right programs, to warm a small model up."""

from __future__ import annotations

import random
import re
from typing import Any

from gradus_forth_lang.problems.build import SOLUTION, build_problems
from gradus_forth_lang.problems.problem import Problem, grade

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
    num: int, *, seed: int, tiers: tuple[int, ...] = (0,), careless_share: float = 0.0
) -> list[dict[str, Any]]:
    """Conversations in the brief style, from problems of a seed of their own.

    In `careless_share` of them the program only pushes the numbers of the formula, so a model
    learns how to hand in, and has still to find out which programs pay.
    """
    draw = random.Random(f"forth-lang demonstrations {seed}")
    found = [one.problem for one in build_problems(tiers, 400, seed=seed) if one.problem.formula]
    return [_shown(draw.choice(found), draw.random() < careless_share) for _ in range(num)]


def _shown(problem: Problem, is_careless: bool) -> dict[str, Any]:
    numbers = " ".join(re.findall(r"\d+", problem.formula))
    code = f": {SOLUTION} {numbers} ;" if is_careless else problem.solution(SOLUTION)
    num_passed = grade(code, SOLUTION, problem.cases).num_passed
    call = {"name": "submit_code", "arguments": {"code": code}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": problem.formula},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": f"passed {num_passed} of {len(problem.cases)}"},
        {"role": "assistant", "content": "ok"},
    ]
    return {"messages": messages, "tools": [TOOL]}
