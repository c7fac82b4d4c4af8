"""Which harness can play a seat here, found before the first episode."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields

from gradus.environments.containers import answering_engine
from gradus.installed import plugin_module

CHAT_COMPLETIONS = "chat_completions"
_OTHER_DIALECTS = {"codex": "OpenAI's Responses", "claude_code": "Anthropic's Messages"}
"""Harnesses that ask in one other dialect, and in which."""
_LOCAL = "subprocess"


def dialect_of(harness: vf.Harness[Any]) -> str:
    """How the program of a harness asks the model, as its settings are."""
    other = _OTHER_DIALECTS.get(plugin_module(harness.config.id))
    return other or getattr(harness.config, "transport", None) or CHAT_COMPLETIONS


def continues(harness: vf.Harness[Any]) -> bool:
    """Whether it can continue with a conversation after a user or another agent has spoken."""
    kind = type(harness)
    has_own_way = (kind.session, kind.resume) != (vf.Harness.session, vf.Harness.resume)
    return harness.SUPPORTS_RESUME or has_own_way


def harness_refusal(environment: vf.Env[Any], *, is_rendered: bool) -> str | None:
    """Why a role's harness cannot play here, and what to write; None when each of them can.

    `is_rendered` says that tokens of the policy are recorded, and so of chat completions alone.
    """
    seats = agent_config_fields(environment.config)
    # Where there are several roles, not each of them plays tasks of the task set.
    is_alone = len(seats) == 1
    for role, agent in seats.items():
        harness = environment._harnesses[role]
        who = f"harness {harness.config.id!r} of role {role!r}"
        dialect = dialect_of(harness)
        if is_rendered and agent.client is None and dialect != CHAT_COMPLETIONS:
            can_choose = hasattr(harness.config, "transport")
            advice = f'agent.harness.transport = "{CHAT_COMPLETIONS}", or ' if can_choose else ""
            return (
                f"{who} asks the model by {dialect}, and gradus records tokens of chat "
                f"completions alone; use {advice}another harness, e.g. chat or bash"
            )
        if agent.runtime.type == _LOCAL:
            engine = answering_engine() or "docker"
            in_box = f'needs a container; write agent.runtime = {{type = "{engine}"}}'
            if harness.NEEDS_CONTAINER:
                return f"{who} {in_box}"
            if is_alone and type(environment.taskset).task_type().NEEDS_CONTAINER:
                return f"the task set {in_box}"
        if is_alone and has_tool_servers(environment) and not harness.SUPPORTS_MCP:
            return (
                f"{who} calls no tool servers, and the task set offers its tools by them; use "
                "another harness, e.g. chat or bash"
            )
        if harness.config.skills and not harness.SUPPORTS_SKILLS:
            return f"{who} reads no skills; leave out agent.harness.skills, or use another harness"
    return None


def has_tool_servers(environment: vf.Env[Any]) -> bool:
    return bool(_toolsets(environment))


def _toolsets(environment: vf.Env[Any]) -> list[vf.Toolset[Any, Any]]:
    taskset = environment.taskset
    per_task = type(taskset).task_type().toolsets(taskset.config.task)
    return [*per_task, *taskset.toolsets(taskset.config)]


def declared_tools(verifiers_config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a chat declares of the tools of a task set, asked of its classes: no server starts.

    Without the tools of servers that run elsewhere, or that read them from elsewhere.
    """
    # Slow to import, and of no use in a run.
    server_class = importlib.import_module("mcp.server.mcpserver").MCPServer
    environment = vf.load_environment(vf.resolve_env_config(dict(verifiers_config)))
    found = []
    for toolset in _toolsets(environment):
        server = server_class(toolset.server_name or "tools")
        toolset.register(server)
        prefix = f"{toolset.server_name}_" if toolset.server_name else ""
        for tool in asyncio.run(server.list_tools()):
            declared = tool.model_dump(mode="json", by_alias=True)
            found.append(declaration(prefix + tool.name, declared))
    return found


def offers_tools(environment: vf.Env[Any]) -> bool:
    """Whether a model that plays here is offered tools, by the taskset or by its harness.

    A harness that runs code and speaks to tool servers brings its own tools; those that only run
    code read it from the text. Seats of other models do not count: their endpoint reads the calls.
    """
    policy = [
        name
        for name, agent in agent_config_fields(environment.config).items()
        if agent.client is None
    ]
    if policy and has_tool_servers(environment):
        return True
    harnesses = [environment._harnesses[name] for name in policy]
    return any(harness.EXECUTES_CODE and harness.SUPPORTS_MCP for harness in harnesses)


def declaration(name: str, declared: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as the chat dialect declares it, from what its server tells."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": declared.get("description") or "",
            "parameters": declared.get("inputSchema") or {},
        },
    }
