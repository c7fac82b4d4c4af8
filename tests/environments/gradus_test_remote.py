"""An environment whose author runs its only role in a sandbox that somebody bills."""

from __future__ import annotations

import verifiers.v1 as vf
from echo_tasksets import EchoTaskset

__all__ = ["EchoTaskset", "RemoteEnv"]


class RemoteConfig(vf.EnvConfig):
    """One role with pins."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.PrimeConfig(), max_turns=9)


class RemoteEnv(vf.Env[RemoteConfig]):
    """Plays its role alone."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """One run."""
        await agents.agent.run(task)
