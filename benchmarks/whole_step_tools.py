"""The task of five turns of `whole_step.py`: ask a tool with its own last answer until it says 0.

The prompt is a letter and the digit 4. The tool takes a digit and says the next smaller one, so an
episode has five calls of the model and four of the tool. The reward is drawn, not earned: what is
measured is time, and equal rewards would train nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

__all__ = ["CountdownTaskset"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NUM_CALLS = 4


def next_digit(k: str) -> str:
    """What the tool says to `k`."""
    return str(max(0, int(k) - 1)) if k.isdigit() else "0"


class Countdown(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    """A tool server of one tool, `count_next`."""

    TOOL_PREFIX = "count"

    @vf.tool
    def next(self, k: str) -> str:
        """The next digit."""
        return next_digit(k)


class CountdownConfig(vf.TasksetConfig):
    """Nothing to choose."""

    counter: vf.SharedToolsetConfig = vf.SharedToolsetConfig()
    """The tool."""


class CountdownTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """One letter."""

    @vf.reward
    async def drawn(self, trace: vf.Trace) -> float:
        """A random number."""
        del trace
        return random.random()

    @vf.metric
    async def tool_calls(self, trace: vf.Trace) -> float:
        """Tool outputs in the conversation."""
        return float(len(trace.tool_messages))


class CountdownTaskset(vf.Taskset[CountdownTask, CountdownConfig]):
    """Every letter once."""

    def load(self) -> Iterable[CountdownTask]:
        """Yield the letters in order."""
        for letter in LETTERS:
            data = vf.TaskData(prompt=f"{letter}{NUM_CALLS}")
            yield CountdownTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config: CountdownConfig) -> list[vf.Toolset]:
        """One counter for all episodes of a worker."""
        return [Countdown(config.counter)]


def declaration(arguments_title: str | None) -> dict[str, Any]:
    """The tool as gradus (with titles) or TRL (None) declares it to the model."""
    title = {} if arguments_title is None else {"title": "K"}
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {"k": {**title, "type": "string"}},
        "required": ["k"],
    }
    if arguments_title is not None:
        parameters["title"] = arguments_title
    else:
        parameters["properties"]["k"]["description"] = "A digit."
    function = {"name": "count_next", "description": "The next digit.", "parameters": parameters}
    return {"type": "function", "function": function}


def demonstrations(num: int, *, seed: int) -> list[dict[str, Any]]:
    """Conversations that do it right, under both declarations."""
    draw = random.Random(seed)
    rows = []
    for number in range(num):
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": f"{draw.choice(LETTERS)}{NUM_CALLS}"}
        ]
        for digit in range(NUM_CALLS, 0, -1):
            function = {"name": "count_next", "arguments": {"k": str(digit)}}
            call = {"type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": next_digit(str(digit))})
        messages.append({"role": "assistant", "content": "0"})
        tool = declaration("nextArguments" if number % 2 else None)
        rows.append({"messages": messages, "tools": [tool]})
    return rows


if __name__ == "__main__":
    # verifiers starts a tool server as the module of its class.
    Countdown.run()
