"""Conversations of the policy with a tool, through verifiers' own rollout and a scripted engine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from echo_tasksets import AddTools
from renderers import Qwen3RendererConfig

from gradus.testing.engine import ScriptedEngine

TOKEN = "data-token"
CALL = '<tool_call>\n{"name": "calculator_add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


class UserOpens(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """A conversation that the user opens, with a tool server that somebody else runs."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """One server, at an address where nobody listens."""
        return [AddTools(vf.ToolsetConfig(url="http://127.0.0.1:9/mcp"))]


class AddServer:
    """Gives its answers in turn, whatever is called; then always the same one."""

    tools = ({"name": "add", "inputSchema": {}},)

    def __init__(self, answers: Iterable[str] = ()) -> None:
        self._answers = iter(answers)

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """The next answer."""
        return next(self._answers, "3")


async def open_add_server(*_: Any, **__: Any) -> Any:
    """Stands for the connection to a tool server."""
    return AddServer()


def policy_seat(
    engine: ScriptedEngine,
    model: Path,
    harness: dict[str, Any],
    *,
    sampling: dict[str, Any],
    **seat: Any,
) -> vf.AgentConfig:
    """A seat that the engine plays as the policy, with its tokens recorded."""
    return vf.AgentConfig(
        harness=harness,
        runtime={"type": "subprocess"},
        model="policy",
        client=vf.TrainClientConfig(
            base_url=engine.base_url,
            api_key_var="GRADUS_INFERENCE_TOKEN",
            renderer=Qwen3RendererConfig(),
            renderer_model_name=str(model),
        ),
        sampling={"temperature": 1.0, **sampling},
        **seat,
    )


def path_of(trace: vf.Trace, node: Any) -> list[int]:
    """The tokens of a message and of all before it in its branch."""
    tokens = list(node.token_ids)
    while node.parent is not None:
        node = trace.nodes[node.parent]
        tokens = [*node.token_ids, *tokens]
    return tokens
