"""The child that loads an environment: `python -m gradus.conformance.reader REQUEST RESULT`.

It runs alone, because the code of an environment may hang, exit, or ruin its process. REQUEST is
the environment process's config; RESULT becomes {"refused": ...} or what was seen.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

from gradus.config import EnvironmentProcessConfig
from gradus.conformance.probes import GOLD_HOOK
from gradus.environments.containers import engines_of, refuse_silent
from gradus.environments.process import prepare_source
from gradus.environments.roles import complete_roles
from gradus.environments.tasks import chosen_tasks, load_tasks
from gradus.environments.verifiers.task_headers import headers_of
from gradus.errors import GradusError
from gradus.files import read_json, write_json
from gradus.installed import see_folder
from gradus.log import configure_logging
from gradus.processes.child import watch_death_pipe

NUM_TASKS = 8
"""Tasks that are read, and compared with those of another process."""


def read(config: EnvironmentProcessConfig) -> dict[str, Any]:
    """Everything that an environment shows without being played."""
    prepare_source(config)
    started = time.perf_counter()
    settings = complete_roles(config.name, config.verifiers)
    refuse_silent(engines_of(settings))
    tasks = load_tasks(config.name, settings, is_rendered=True, selection=config.tasks)
    loaded = time.perf_counter() - started
    number = NUM_TASKS if tasks.num_tasks is None else min(NUM_TASKS, tasks.num_tasks)
    # From here on, a difference comes from loading the tasks twice in one process.
    environment = vf.load_environment(vf.resolve_env_config(dict(settings)))
    again = list(itertools.islice(chosen_tasks(environment.taskset, config.tasks), number))

    async def first() -> list[dict[str, Any]]:
        return [await tasks.task(index) for index in range(number)]

    return {
        "seconds": loaded,
        "settings": settings,
        "num_tasks": tasks.num_tasks,
        "agents": tasks.agents,
        "offers_tools": tasks.offers_tools,
        "missing_modules": list(tasks.missing_modules),
        "tasks": asyncio.run(first()),
        "again": [task.data.model_dump(mode="json", serialize_as_any=True) for task in again],
        "gold": [_gold(task) for task in again],
        "headers": [_headers_problem(task, config.headers_from) for task in again],
    }


def _headers_problem(task: vf.Task[Any, Any, Any], field: str | None) -> str | None:
    """Why a task does not carry the headers that the source asks for; None when it does."""
    if field is None:
        return None
    try:
        headers_of(task.data, field)
    except ValueError as error:
        return str(error)
    return None


def _gold(task: vf.Task[Any, Any, Any]) -> dict[str, Any]:
    """What the task's own hook gives; {} if it has none."""
    hook = getattr(task, GOLD_HOOK, None)
    if hook is None:
        return {}
    try:
        replies = hook()
        if isinstance(replies, Mapping) and "tool" not in replies:
            return {"roles": {role: _listed(said) for role, said in replies.items()}}
        return {"replies": _listed(replies)}
    except Exception as error:  # the environment's own code
        return {"error": f"{type(error).__name__}: {error}"}


def _listed(replies: Any) -> list[Any]:
    """The turns of one role, of which a single one may stand alone."""
    turns = [replies] if isinstance(replies, str | Mapping) else replies
    return [turn if isinstance(turn, Mapping) else str(turn) for turn in turns]


def main(request: str, result: str) -> None:
    see_folder()
    watch_death_pipe()
    configure_logging("reader")
    try:
        config = EnvironmentProcessConfig.model_validate(read_json(Path(request)))
        seen = read(config)
    except GradusError as error:
        seen = {"refused": str(error)}
    try:
        write_json(Path(result), seen)
    except ValueError as error:
        text = f"the data of its tasks is not JSON ({error}); use finite numbers and text"
        write_json(Path(result), {"refused": text})


if __name__ == "__main__":
    main(*sys.argv[1:])
