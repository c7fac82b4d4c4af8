"""Tries a reward function on some replies: `python -m gradus_jsonl.trial RESULT`.

Reads {"reward": ..., "offered": [...], "calls": [{...}]} from standard input and writes to the file
RESULT either {"rated": [...]}, of each call its number or the text of its failure, with null for a
function that needs a trace, or {"refused": ...}. It runs alone, because a function may hang, exit,
or ruin its process.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradus.errors import GradusError
from gradus.installed import see_folder
from gradus_kit.tasksets.rewards import RewardFunction


def rated(
    reward: str, offered: Sequence[str], calls: Sequence[Mapping[str, Any]]
) -> list[float | str] | None:
    """The reward of each call, or why it has none; None for one that needs a trace."""
    function = RewardFunction.load(reward, offered=offered)
    trace = inspect.signature(function.function).parameters.get("trace")
    if trace is not None and trace.default is trace.empty:
        return None

    async def rate(call: Mapping[str, Any]) -> float | str:
        try:
            return sum((await function(call)).values())
        except GradusError as error:
            said, *lines = str(error).splitlines()
            return "\n".join([f"{said}, for the reply {call['reply']!r:.60}", *lines])
        except SystemExit:
            return f"reward {reward!r} exits; it must return a number"

    async def rate_all() -> list[float | str]:
        return [await rate(call) for call in calls]

    return asyncio.run(rate_all())


if __name__ == "__main__":
    see_folder()
    request = json.load(sys.stdin)
    try:
        answer: dict[str, Any] = {"rated": rated(**request)}
    except GradusError as error:
        answer = {"refused": str(error)}
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")
