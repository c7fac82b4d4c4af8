"""A task of an environment in a terminal: `python -m gradus.environments.talk REQUEST`.

A person is the user where one agent plays; several agents play by themselves. Tools that are called
are shown, and what the episode is worth. It runs alone, with the variables of an environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.client import EvalClientConfig

from gradus.config import EnvironmentProcessConfig
from gradus.environments.process import prepare_source
from gradus.environments.roles import complete_roles
from gradus.environments.tasks import chosen_tasks
from gradus.environments.verifiers.table import ProcessSettings, apply
from gradus.errors import ConfigError, ExitCode, GradusError, ProcessError, first_line
from gradus.files import read_json
from gradus.installed import see_folder
from gradus.log import configure_logging, shown_text


async def play(request: dict[str, Any]) -> None:
    """Play the task; GradusError for what cannot be played."""
    config = EnvironmentProcessConfig.model_validate(request["config"])
    prepare_source(config)
    settings = complete_roles(config.name, config.verifiers)
    environment = vf.load_environment(vf.resolve_env_config(dict(settings)))
    number = request["task"]
    tasks = chosen_tasks(environment.taskset, config.tasks)
    task = next(itertools.islice(tasks, number, None), None) if number >= 0 else None
    if task is None:
        raise ConfigError(f"--task {number}: {config.name} has no such task; they begin with 0")
    is_alone = isinstance(environment, vf.SingleAgentEnv)
    if is_alone:
        environment.run = _with_a_person
    context = vf.ModelContext(
        model=request["model"],
        client=EvalClientConfig(base_url=request["base_url"], api_key_var=request["api_key_var"]),
        sampling=vf.SamplingConfig(**request["sampling"]),
    )
    async with environment.serving():
        # Not asyncio's: Ctrl-C must end what is typed, as Ctrl-D does.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        episode = await environment.run_episode(task, context)
    for trace in [] if is_alone else episode.traces:
        _say(f"--- {trace.agent.name}")
        _show(trace.messages)
    for trace in episode.traces:
        parts = ", ".join(f"{name} {it.value:g}" for name, it in trace.rewards.items() if it)
        _say(f"reward {trace.reward:g}{f' ({parts})' if parts else ''}")
    for error in [*episode.errors, *(it for trace in episode.traces for it in trace.errors)]:
        raise ProcessError(f"the episode failed: {error.type}: {first_line(error.message)}")


async def _with_a_person(task: vf.Task[Any, Any, Any], agents: vf.Agents) -> None:
    """The conversation of one agent with who sits here, who ends it."""
    if not agents.agent.harness.SUPPORTS_RESUME:
        _show((await agents.agent.run(task)).messages)
        return
    async with agents.agent.interaction(task) as talk:
        said: str | None = None
        if task.data.system_prompt:
            _say(f"[system] {task.data.system_prompt}")
        if task.data.prompt is None:
            said = _typed()
        else:
            _show(_opening(task.data.prompt))
        while True:
            segment = await talk.turn(said)
            if segment.terminated:
                _say(f"[ended: {talk.trace.stop_condition}]")
                return
            _show(segment.messages)
            said = _typed()
            if said is None:
                return


def _opening(prompt: Any) -> list[Any]:
    return [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)


def _typed() -> str | None:
    """The next words; None at the end of the input."""
    is_person = sys.stdin.isatty()
    while True:
        try:
            text = input("> ") if is_person else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            _say("")
            return None
        if text.strip() == "/quit" or not (text or is_person):
            return None
        if text.strip():
            return text.strip()


def _show(messages: Any) -> None:
    """What was said: calls of tools with their arguments, and what they answered."""
    for message in messages:
        content = message.content
        text = content if isinstance(content, str) else ""
        if isinstance(content, list):
            text = "\n".join(getattr(part, "text", None) or "[no text]" for part in content)
        mark = {"system": "[system] ", "user": "[user] ", "tool": "  -> "}.get(message.role, "")
        if text.strip() or not getattr(message, "tool_calls", None):
            _say(f"{mark}{text}")
        for call in getattr(message, "tool_calls", None) or ():
            _say(f"  calls {call.name} {call.arguments}")


def _say(text: str) -> None:
    sys.stdout.write(shown_text(text) + "\n")
    sys.stdout.flush()


def main(request: str) -> int:
    # The launcher ignores Ctrl-C meanwhile, which is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    configure_logging("chat")
    logging.getLogger("verifiers").setLevel(logging.ERROR)
    apply(ProcessSettings())
    see_folder()
    try:
        asyncio.run(play(read_json(Path(request))))
    except GradusError as error:
        sys.stderr.write(f"gradus chat: {shown_text(str(error))}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return ExitCode.DONE


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(*sys.argv[1:]))
