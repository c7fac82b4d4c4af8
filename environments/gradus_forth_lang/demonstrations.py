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
    num: int,
    *,
    seed: int,
    tiers: tuple[int, ...] = (0,),
    careless_share: float = 0.0,
    tells_results: bool = True,
) -> list[dict[str, Any]]:
    """Conversations in the brief style, from problems with their own seed.

    In `careless_share` of them the program only pushes the numbers of the formula, so a model
    learns how to hand in, and has still to find out which programs pay. Without `tells_results`
    the tool's answers name a number drawn at random: a model that learns from them as well knows
    their form, and has still to find out what they say of a program.
    """
    draw = random.Random(f"forth-lang demonstrations {seed}")
    found = [one.problem for one in build_problems(tiers, 400, seed=seed) if one.problem.formula]
    shown = []
    for _ in range(num):
        problem = draw.choice(found)
        code = problem.solution(SOLUTION)
        if draw.random() < careless_share:
            code = _numbers_only(problem)
        if tells_results:
            num_passed = grade(code, SOLUTION, problem.cases).num_passed
        else:
            num_passed = draw.randint(0, len(problem.cases))
        shown.append(_conversation(problem, code, num_passed))
    return shown


def _numbers_only(problem: Problem) -> str:
    numbers = " ".join(re.findall(r"\d+", problem.formula))
    return f": {SOLUTION} {numbers} ;"


def _conversation(problem: Problem, code: str, num_passed: int) -> dict[str, Any]:
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
