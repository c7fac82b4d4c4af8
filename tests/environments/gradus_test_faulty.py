"""One task for each fault that `gradus env check` must name."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["FaultyTaskset"]

FAULTS = (
    *("none", "pays_for_the_echo", "reward_is_nan", "reward_is_huge", "exits_in_scoring"),
    *("hangs_in_scoring", "reads_only_utf8", "leaks_a_process", "shares_state"),
    *("shares_state_too", "tool_server_dies"),
)
asked: list[str] = [""]
"""The answer of the last episode that began, which is the fault `shares_state`."""


class FaultyConfig(vf.TasksetConfig):
    """Faults of the whole set."""

    is_random: bool = False
    """Whether the prompts are other ones in each process."""


class FaultyData(vf.TaskData):
    """What goes wrong in this task."""

    fault: str
    answer: str = "forty-two"


class FaultyTools(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    """A tool server that one call ends."""

    TOOL_PREFIX = "bad"

    @vf.tool  # type: ignore[untyped-decorator]
    def leave(self, reason: str) -> str:
        """End the server."""
        os._exit(3)


class FaultyTask(vf.Task[FaultyData, vf.State, vf.TaskConfig]):
    """Say the answer."""

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Keep in the module what belongs to one episode."""
        asked[0] = self.data.answer

    @vf.reward  # type: ignore[untyped-decorator]
    async def right(self, trace: vf.Trace) -> float:
        """1 for the answer, and the fault."""
        reply = trace.last_reply
        is_right = float(reply == self.data.answer)
        match self.data.fault:
            case "pays_for_the_echo":
                return float(self.data.prompt in reply or is_right)
            case "reward_is_nan":
                return float("nan") if not reply else is_right
            case "reward_is_huge":
                return 100.0 * is_right
            case "exits_in_scoring":
                raise SystemExit(0)
            case "hangs_in_scoring":
                await asyncio.Event().wait()
            case "reads_only_utf8":
                assert "\ufffd" not in reply
            case "shares_state" | "shares_state_too":
                return float(reply == asked[0])
            case "leaks_a_process":
                subprocess.Popen(["sleep", "600"], start_new_session=True)
        return is_right


class FaultyTaskset(vf.Taskset[FaultyTask, FaultyConfig]):
    """The faults in their order."""

    @classmethod
    def toolsets(cls, config: FaultyConfig) -> list[vf.Toolset]:
        """One server for all tasks."""
        return [FaultyTools(vf.SharedToolsetConfig())]

    def load(self) -> Iterable[FaultyTask]:
        """One task for each fault."""
        draw = random.Random() if self.config.is_random else random.Random(0)
        for fault in FAULTS:
            prompt = f"Say forty-two. {draw.random()}"
            answer = "forty-three" if fault == "shares_state_too" else "forty-two"
            data = FaultyData(prompt=prompt, fault=fault, answer=answer)
            yield FaultyTask(data, self.config.task)


if __name__ == "__main__":
    FaultyTools.run()
