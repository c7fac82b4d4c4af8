"""An environment whose author bounded the conversation of each of its roles."""

from __future__ import annotations

import verifiers.v1 as vf
from echo_tasksets import EchoTaskset

__all__ = ["EchoTaskset", "PairEnv"]


class PairConfig(vf.EnvConfig):
    """Two roles."""

    one: vf.AgentConfig = vf.AgentConfig(max_turns=2)
    two: vf.AgentConfig = vf.AgentConfig(max_turns=3)


class PairEnv(vf.Env[PairConfig]):
    """Plays the first role alone."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """One run."""
        await agents.one.run(task)
