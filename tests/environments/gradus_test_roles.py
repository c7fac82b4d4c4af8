"""An environment whose author pinned something for its roles, and that brings a harness."""

from __future__ import annotations

import verifiers.v1 as vf
from echo_tasksets import EchoTaskset
from verifiers.v1.configs.agent import TimeoutConfig

from gradus_chat.chat import ChatHarness, ChatHarnessConfig

__all__ = ["EchoTaskset", "OwnHarness", "RolesEnv"]


class OwnHarnessConfig(ChatHarnessConfig):
    """A harness of the package's own."""

    id: str = "gradus-test-roles"


class OwnHarness(ChatHarness):
    """Chats as ours does."""


class RolesConfig(vf.EnvConfig):
    """Three roles: nothing pinned, a chat with limits, a container."""

    plain: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig(
        harness={"id": "null", "tool_timeout": 7.0},
        max_turns=2,
        timeout=TimeoutConfig(rollout=5.0),
    )
    boxed: vf.AgentConfig = vf.AgentConfig(
        harness={"id": "bash"}, runtime=vf.DockerConfig(image="box")
    )


class RolesEnv(vf.Env[RolesConfig]):
    """Plays the first role alone."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """One run."""
        await agents.plain.run(task)
