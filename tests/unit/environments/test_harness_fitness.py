"""Which harnesses train, and what the page about them says, from their installed classes."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf
from pydantic import create_model
from verifiers.v1.utils.loaders import harness_class, harness_config_type

from gradus.environments.harness.fitness import (
    CHAT_COMPLETIONS,
    continues,
    declared_tools,
    dialect_of,
    harness_refusal,
)
from gradus.installed import BUILTIN_HARNESSES, builtin_plugins

PAGE = Path(__file__).parents[3] / "docs" / "harnesses.md"
ROW = re.compile(r"^\| `(\w+)` \| (.+) \|$", re.M)


def table() -> dict[str, list[str]]:
    text = PAGE.read_text().partition("| harness | asks by |")[2]
    return {row[1]: row[2].split(" | ") for row in ROW.finditer(text)}


def built(name: str, **settings: Any) -> vf.Harness[Any]:
    kind: type[vf.Harness[Any]] = harness_class(name)
    return kind(harness_config_type(name)(id=name, **settings))


def test_the_page_has_a_row_for_every_harness_of_verifiers() -> None:
    assert sorted(table()) == builtin_plugins(BUILTIN_HARNESSES)


@pytest.mark.parametrize("name", builtin_plugins(BUILTIN_HARNESSES))
def test_the_page_says_what_the_class_says(name: str) -> None:
    harness = built(name)
    dialect = dialect_of(harness).replace("_", " ")
    if hasattr(harness.config, "transport"):
        dialect += ", by `transport` others"
    assert table()[name][:5] == [
        dialect,
        "yes" if dialect_of(harness) == CHAT_COMPLETIONS else "no",
        "container" if harness.NEEDS_CONTAINER else "any",
        "yes" if harness.SUPPORTS_MCP else "no",
        "yes" if continues(harness) else "no",
    ]


@pytest.mark.parametrize("name", builtin_plugins(BUILTIN_HARNESSES))
def test_no_harness_that_starts_a_program_of_another_dialect_passes_for_one_that_trains(
    name: str,
) -> None:
    source = Path(inspect.getfile(harness_class(name))).read_text()
    starts_another = "ANTHROPIC_BASE_URL" in source or "@openai/codex@" in source
    assert starts_another == (dialect_of(built(name)) != CHAT_COMPLETIONS)


def environment(
    harness: vf.Harness[Any],
    *,
    runtime: str = "docker",
    tools: bool = False,
    boxed: bool = False,
    roles: int = 1,
) -> Any:
    """What `harness_refusal` reads of an environment."""

    class Task:
        NEEDS_CONTAINER = boxed

        @classmethod
        def toolsets(cls, _: Any) -> list[str]:
            return ["a server"] if tools else []

    class Taskset:
        config = SimpleNamespace(task=None)

        @classmethod
        def task_type(cls) -> Any:
            return Task

        def toolsets(self, _: Any) -> list[str]:
            return []

    names = [f"role{number}" for number in range(roles)]
    seat = vf.AgentConfig(harness={"id": harness.config.id}, runtime={"type": runtime})
    fields: dict[str, Any] = dict.fromkeys(names, (vf.AgentConfig, seat))
    config_type = create_model("Roles", __base__=vf.EnvConfig, **fields)
    return SimpleNamespace(
        config=config_type(),
        taskset=Taskset(),
        _harnesses=dict.fromkeys(names, harness),
    )


def test_a_harness_without_tool_servers_is_refused_where_the_task_set_has_them() -> None:
    harness = built("mini_swe_agent")
    refusal = harness_refusal(environment(harness, tools=True), is_rendered=True)
    assert refusal is not None
    assert "calls no tool servers" in refusal
    assert harness_refusal(environment(harness), is_rendered=True) is None


def test_a_role_that_may_play_other_tasks_is_not_refused_for_the_task_set_s_tools() -> None:
    harness = built("mini_swe_agent")
    assert harness_refusal(environment(harness, tools=True, roles=2), is_rendered=True) is None


def test_a_task_set_that_needs_a_container_is_refused_in_a_subprocess(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    harness = built("bash")
    refusal = harness_refusal(
        environment(harness, boxed=True, runtime="subprocess"), is_rendered=True
    )
    assert refusal == 'the task set needs a container; write agent.runtime = {type = "docker"}'
    assert harness_refusal(environment(harness, boxed=True), is_rendered=True) is None


def test_the_tools_of_a_task_set_are_declared_without_starting_a_server() -> None:
    settings = {"taskset": {"id": "gradus-word-lookup"}}
    (tool,) = declared_tools(settings)
    assert tool["type"] == "function"
    assert tool["function"]["name"] == "dict_get"
    assert tool["function"]["parameters"]["required"] == ["k"]
    assert declared_tools({"taskset": {"id": "gradus-reverse-text"}}) == []


def test_rlm_is_refused_in_a_subprocess() -> None:
    refusal = harness_refusal(environment(built("rlm"), runtime="subprocess"), is_rendered=True)
    assert refusal is not None
    assert refusal.startswith("harness 'rlm' of role 'role0' needs a container")


def test_skills_for_a_harness_that_reads_none_are_refused() -> None:
    harness = built("bash", skills=["a"])
    refusal = harness_refusal(environment(harness), is_rendered=True)
    assert refusal is not None
    assert "reads no skills" in refusal
