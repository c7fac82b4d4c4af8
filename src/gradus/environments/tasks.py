"""The tasks of a verifiers taskset by index."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import hashlib
import inspect
import json
import random
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from types import SimpleNamespace
from typing import Any, TypeAlias

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields

from gradus.config import TaskSelectionConfig
from gradus.environments.containers import ENGINES
from gradus.environments.harness.fitness import harness_refusal, offers_tools
from gradus.environments.load_errors import Stopped, explained, origin, source_name
from gradus.errors import ConfigError, EnvironmentFailure, GradusError
from gradus.installed import has_module
from gradus.log import get_logger

log = get_logger(__name__)

AnyTask: TypeAlias = "vf.Task[Any, Any, Any]"
LOOK_AHEAD = 10_000
"""Tasks of an endless taskset that are looked at for the first one that is selected."""
_TELL_SECONDS = 10.0
_SHOWN = 5
"""Names of tasks in an error."""
_HASH_BYTES = 8
ENDLESS_WINDOW = 4096
"""Tasks of an endless taskset that are kept; an earlier one is reached by starting again."""


class TaskIndex:
    """Owns the tasks of one taskset: all of a finite one, a window of an endless one."""

    def __init__(
        self,
        taskset: vf.Taskset[Any, Any],
        agents: Mapping[str, bool] | None = None,
        *,
        offers_tools: bool = False,
        missing_modules: Sequence[str] = (),
        selection: TaskSelectionConfig | None = None,
        environment: vf.Env[Any] | None = None,
    ) -> None:
        self.environment = environment
        """What plays the tasks, where that was loaded too."""
        self.taskset_id: str = taskset.config.id
        self.agents = dict(agents or {})
        """Agents of an episode → whether the environment lets them train."""
        self.offers_tools = offers_tools
        """Whether the policy is offered tools."""
        self.missing_modules = tuple(missing_modules)
        """Modules that its code imports while it plays, and that are not installed."""
        self._taskset = taskset
        self._selection = selection or TaskSelectionConfig()
        chosen = chosen_tasks(taskset, self._selection)
        self._all = chosen if isinstance(chosen, list) else None
        self._iterator: Iterator[vf.Task[Any, Any, Any]] = iter(())
        self._window: deque[vf.Task[Any, Any, Any]] = deque(maxlen=ENDLESS_WINDOW)
        self._next_index = 0
        self._broken: str | None = None
        """Why the iterator of an endless taskset gives no more tasks."""
        self._lock = asyncio.Lock()
        if self._all is None:
            self._restart()

    @property
    def finite_tasks(self) -> Sequence[AnyTask]:
        return self._all or ()

    @property
    def num_tasks(self) -> int | None:
        return None if self._all is None else len(self._all)

    async def task(self, index: int) -> dict[str, Any]:
        """`task_data` and `key` of one task; EnvironmentFailure outside the range."""
        if index < 0 or (self._all is not None and index >= len(self._all)):
            raise EnvironmentFailure(
                f"taskset {self.taskset_id!r} has no task {index}; it has "
                f"{'endless' if self._all is None else len(self._all)} tasks, counted from 0"
            )
        if self._all is not None:
            return _record(self._all[index])
        async with self._lock:
            # The generator is the author's code and may be slow; health must still be answered.
            return await asyncio.to_thread(self._reach, index)

    def _reach(self, index: int) -> dict[str, Any]:
        if index < self._next_index - len(self._window):
            self._restart()
        told = time.monotonic()
        while self._next_index <= index:
            if time.monotonic() > told + _TELL_SECONDS:
                told = time.monotonic()
                log.info("making task %d on the way to task %d", self._next_index, index)
            try:
                self._window.append(next(self._iterator))
            except StopIteration:
                if self._broken is not None:
                    raise EnvironmentFailure(self._broken) from None
                raise EnvironmentFailure(
                    f"taskset {self.taskset_id!r} says that it is endless, and ended before task "
                    f"{index}; set INFINITE = False in its class"
                ) from None
            except ConfigError as error:
                self._broken = f"taskset {self.taskset_id!r}: {error}"
                raise EnvironmentFailure(self._broken) from error
            except Exception as error:
                self._broken = (
                    f"taskset {self.taskset_id!r} failed at task {self._next_index}: "
                    f"{origin(error)}. A generator that raised gives no more tasks: catch the "
                    "error there and continue with the next one"
                )
                raise EnvironmentFailure(self._broken) from error
            self._next_index += 1
        return _record(self._window[index - self._next_index])

    def _restart(self) -> None:
        self._iterator = streamed(self._taskset, self._selection, is_endless=True)
        self._window.clear()
        self._next_index = 0
        self._broken = None


def _record(task: vf.Task[Any, Any, Any]) -> dict[str, Any]:
    task_data = task.data.model_dump(mode="json", serialize_as_any=True)
    return {"task_data": task_data, "key": identity(task)}


def identity(task: AnyTask) -> str:
    """The key of a task, which asks the same whatever instruction comes before it; an instruction
    counts where the task has no prompt, no name and no id."""
    if any((task.data.prompt, task.data.name, task.data.id)):
        task = task.with_data(system_prompt=None)
    return str(task.key)


def chosen_tasks(
    taskset: vf.Taskset[Any, Any], selection: TaskSelectionConfig
) -> list[AnyTask] | Iterator[AnyTask]:
    """The tasks of a source in their order: a list where they end, an iterator where they do not.

    ConfigError when the selection leaves none.
    """
    if taskset.bounded or selection.limit is not None:
        return selected(taskset, selection, is_endless=not taskset.bounded)
    return streamed(taskset, selection, is_endless=True)


def selected(
    tasks: Iterable[AnyTask], selection: TaskSelectionConfig, *, is_endless: bool
) -> list[AnyTask]:
    """The selected tasks of a finite task set, or the first `limit` of an endless one.

    ConfigError when none is left; it names some that there are.
    """
    is_cut = is_endless or selection.shuffle is None
    several = streamed(tasks, selection, is_endless=is_endless)
    found = list(islice(several, selection.limit if is_cut else None))
    if selection.shuffle is not None:
        random.Random(f"tasks/{selection.shuffle}").shuffle(found)
    return found[: selection.limit]


def streamed(
    tasks: Iterable[AnyTask], selection: TaskSelectionConfig, *, is_endless: bool
) -> Iterator[AnyTask]:
    """The selected tasks in the order of the task set; ConfigError when none comes, at the
    beginning or, of an endless one, after some."""
    seen: list[str] = []
    number = num_found = last = 0
    for task in tasks:
        number += 1
        if len(seen) < _SHOWN:
            seen.append(task.data.name or identity(task))
        if _is_selected(task, selection):
            num_found, last = num_found + 1, number
            yield task
        elif number - last >= LOOK_AHEAD and (is_endless or not num_found):
            break
    if num_found and number - last >= LOOK_AHEAD and is_endless:
        raise ConfigError(
            f"none of the {number - last:,} tasks after number {last} is selected by the source's "
            f"`tasks`, which found {num_found} before; set tasks.limit = {num_found}"
        )
    if not num_found and number:
        raise ConfigError(
            f"none of its {number:,} tasks is selected by the source's `tasks`: include = "
            f"{selection.include}, exclude = {selection.exclude}, side = {selection.side!r} with "
            f"holdout_fraction = {selection.holdout_fraction:g}. Names begin with: "
            f"{', '.join(seen)}"
        )


def _is_selected(task: AnyTask, selection: TaskSelectionConfig) -> bool:
    words = [word for word in (task.data.name, identity(task)) if word]
    if selection.include and not _matches(words, selection.include):
        return False
    if _matches(words, selection.exclude):
        return False
    if not selection.holdout_fraction:
        return True
    key = identity(task) if selection.holdout_by is None else _field(task, selection.holdout_by)
    text = f"{selection.holdout_seed}\0{key}".encode("utf-8", "surrogatepass")
    number = int.from_bytes(hashlib.sha256(text).digest()[:_HASH_BYTES], "big")
    is_held_out: bool = number < selection.holdout_fraction * 256**_HASH_BYTES
    return is_held_out == (selection.side == "held_out")


def _field(task: AnyTask, path: str) -> str:
    """The value of a field of the task's data, as text; ConfigError when there is none."""
    data = task.data.model_dump(mode="json")
    value: Any = data
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if value is None:
        raise ConfigError(
            f"task {task.data.name or task.key!r} has no value in the field {path!r} of the "
            f"source's tasks.holdout_by; it has: {', '.join(sorted(data))}"
        )
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _matches(words: list[str], patterns: list[str]) -> bool:
    return any(fnmatchcase(word, pattern) for word in words for pattern in patterns)


def load_tasks(
    source: str,
    verifiers_config: Mapping[str, Any],
    *,
    is_rendered: bool = False,
    reads_images: bool = False,
    selection: TaskSelectionConfig | None = None,
    warm_containers: int = 0,
    asks_by_text: str = "",
) -> TaskIndex:
    """The tasks of the environment of `source`, for a policy that `reads_images` or does not, and
    an algorithm that asks another model by text alone if `asks_by_text` names it.

    `is_rendered` says that gradus serves the policy, whose tokens are recorded: then a harness that
    speaks something else than chat completions is refused.

    Builds the environment once to see every error here, with its cause: ConfigError for what the
    user wrote, EnvironmentFailure for what the environment's own code did.
    """
    name = source_name(source, verifiers_config)
    with explained(name, verifiers_config):
        config = vf.resolve_env_config(dict(verifiers_config))
        environment = vf.load_environment(config)
    if refusal := harness_refusal(environment, is_rendered=is_rendered):
        raise ConfigError(f"{name}: {refusal}")
    # Authors pin runtimes too, and settings of an environment or a tool server may name one.
    written = config.model_dump_json(serialize_as_any=True)
    if warm_containers and not any(f'"type":"{engine}"' in written for engine in ENGINES):
        raise ConfigError(
            f"{name}: warm_containers = {warm_containers} would start nothing: no agent plays in "
            'docker or podman; write agent.runtime = {type = "podman"}, or leave it out'
        )
    try:
        index = TaskIndex(
            environment.taskset,
            trainable_agents(environment),
            offers_tools=offers_tools(environment),
            missing_modules=missing_modules(environment),
            selection=selection,
            environment=environment,
        )
    except Stopped:
        raise
    except GradusError as error:
        # A task set that speaks our errors has said all that there is to say.
        raise type(error)(f"{name}: {error}") from error
    except (Exception, SystemExit) as error:
        raise EnvironmentFailure(
            f"{name} could not load its tasks: {origin(error)}. Check the source's `taskset` "
            "settings and its data"
        ) from error
    if index.num_tasks == 0:
        raise ConfigError(
            f"{name} has no tasks: its data set is empty. Check the source's `taskset` settings"
        )
    if is_rendered and len(index.agents) == 1:
        _check_images(
            name, index.finite_tasks, reads_images=reads_images, asks_by_text=asks_by_text
        )
    return index


def _check_images(
    name: str, tasks: Iterable[AnyTask], *, reads_images: bool, asks_by_text: str
) -> None:
    """ConfigError for a task that shows an image to a model of text, or to one that is asked by
    text, and for an image by its address."""
    for task in tasks:
        for url in _image_urls(task):
            shown = f"{name}: task {task.data.name or task.key!r} shows the model an image"
            if not reads_images:
                raise ConfigError(
                    f"{shown}, and the policy reads text alone (in `gradus env check` it always "
                    "does); leave such tasks out (tasks.exclude), or train a model that reads "
                    "images; what only a hub has that was not reached counts as one of text"
                )
            if asks_by_text:
                raise ConfigError(
                    f"{shown}, and {asks_by_text} asks a model by text alone, which would not see "
                    "it; leave such tasks out (tasks.exclude), or use grpo without algo.reference"
                )
            if not has_module("PIL"):
                raise ConfigError(f"{shown}, which only Pillow can check: pip install pillow")
            if not url.startswith("data:"):
                raise ConfigError(
                    f"{shown} by the address {url[:80]!r}, and no address is fetched; let the task "
                    "set load its images and give them as data:image/...;base64,..."
                )


def _image_urls(task: AnyTask) -> Iterator[str]:
    messages = task.data.prompt
    for message in messages if isinstance(messages, list) else ():
        for part in message.content if isinstance(message.content, list) else ():
            if isinstance(part, vf.ImageUrlContentPart):
                yield part.image_url.url


def trainable_agents(environment: vf.Env[Any]) -> dict[str, bool]:
    """The environment's agents → whether its `setup` lets them train.

    `setup` says who never trains. It is run here up to where it waits for something, on agents that
    can do nothing else than to be marked; what it does not say in time counts as trainable.
    An environment whose settings leave a role without a seat names it in `unplayed_roles`.
    """
    seats = {
        name: SimpleNamespace(trainable=True) for name in agent_config_fields(environment.config)
    }
    unplayed = frozenset(getattr(environment, "unplayed_roles", ()))
    agents: Any = vf.Agents(environment.config, lambda name, _: seats[name])
    setup = environment.setup(agents)
    try:
        setup.send(None)
    except StopIteration:
        pass
    except Exception as error:  # it wanted more of an agent than its mark
        log.debug("setup of the environment cannot be tried: %s", error)
    finally:
        setup.close()
    return {name: bool(it.trainable) for name, it in seats.items() if name not in unplayed}


def missing_modules(environment: vf.Env[Any]) -> list[str]:
    """Modules that functions of the environment and its taskset import, and that are not installed.

    Such an import fails every episode that reaches it; one in a `try` has another way out.
    """
    found: dict[str, None] = {}
    for kind in (type(environment), type(environment.taskset)):
        with contextlib.suppress(OSError, TypeError, SyntaxError):
            source = inspect.getsource(sys.modules[kind.__module__])
            for function in ast.walk(ast.parse(source)):
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.update(dict.fromkeys(_imported(function)))
    return [name for name in found if not has_module(name)]


def _imported(node: ast.AST) -> Iterator[str]:
    """Top-level modules of absolute imports below a node, those in a `try` left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
            yield child.module.partition(".")[0]
        elif not isinstance(child, ast.Try):
            yield from _imported(child)
