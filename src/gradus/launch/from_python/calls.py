"""What a script or a notebook calls: `train`, `sft`, `evaluate` and `generate`.

Each makes a config of its arguments, launches it as the command of that name does, with real
processes, and returns the run. What only the caller's process knows, rows and functions, is
written into the run's folder, where every later launch and command finds it.
"""

from __future__ import annotations

import inspect
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradus.config import (
    EvalConfig,
    LaunchedConfig,
    RunConfig,
    SftConfig,
    load_config,
    run_name,
    top_level_keys,
)
from gradus.errors import (
    ConfigError,
    ExitCode,
    GradusError,
    ProcessError,
    StalledError,
    refuse,
)
from gradus.files import read_json
from gradus.launch.episodes import Episodes
from gradus.launch.from_python.keywords import in_keywords, keyword_values
from gradus.launch.from_python.loaded_run import LoadedRun, load_run
from gradus.launch.from_python.own_tasks import (
    OwnTasks,
    is_environment,
    lines_of,
    own_tasks,
    rows_of,
    try_rewards,
    unrated,
)
from gradus.launch.job import Job, job_of
from gradus.launch.launch import launch
from gradus.launch.steps import Steps
from gradus.plan.machine import check
from gradus.processes.child import LAUNCH_VARIABLE
from gradus.run.lease import read_marker, run_path
from gradus.run.paths import RunDirectory
from gradus.run.recording import read_launched

INTERRUPTED = 130
"""What a run returns that Ctrl-C ended."""
_PLAYED = "tasks"
_HELD_OUT = "held-out"
_CONVERSATIONS = "conversations.jsonl"
_SOURCES: Mapping[type[LaunchedConfig], tuple[str | int, ...]] = {
    RunConfig: ("orchestrator", "train", "env", 0),
    SftConfig: (),
    EvalConfig: ("env", 0),
}
"""Config → where the keys of its one source stand."""
_KINDS: Mapping[str, type[LaunchedConfig]] = {"rl": RunConfig, "sft": SftConfig, "eval": EvalConfig}
Config = str | Path | Mapping[str, Any] | LaunchedConfig
Model = str | Path | Mapping[str, Any] | LoadedRun
Resume = bool | str | Path | LoadedRun


class RunInterrupted(KeyboardInterrupt):
    """The run was interrupted, has saved what it could, and has ended."""

    def __init__(self, run: LoadedRun, resume: str) -> None:
        super().__init__(f"{run.path} was interrupted; {resume}")
        self.run = run
        """What it wrote so far."""


@dataclass(frozen=True)
class _Call:
    """What one call asks for, before it has a folder."""

    name: str
    """The function, for errors."""
    kind: type[LaunchedConfig]
    config: Config | None = None
    model: Model | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[tuple[str | int, ...], OwnTasks] = field(default_factory=dict)
    """Where in the config → what is played there."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Further files of the run."""
    resume: Resume = False
    clean: bool = False
    is_rated: bool = True
    """Whether the rewards of episodes are wanted, beside their replies."""

    @property
    def all_files(self) -> dict[str, str]:
        files = dict(self.files)
        for source in self.sources.values():
            files |= source.files
        return files

    def in_words(self, text: str) -> str:
        """What is said of options, and of keys that no file has, in the keywords of the call."""
        if self.config is None:
            return in_keywords(self.kind, _SOURCES[self.kind], text)
        return text.replace("--resume", "resume=True").replace("--clean", "clean=True")

    def own(self, folder: Path) -> dict[str, Any]:
        """The part of the config that the arguments give, with files below `folder`."""
        values: dict[str, Any] = {}
        if self.model is not None:
            values["model"] = _model(self.model)
        if self.files:
            values["data"] = {"path": str(folder / _CONVERSATIONS)}
        for path, tasks in self.sources.items():
            table = values
            for part in path[:-2]:
                table = table.setdefault(str(part), {})
            table[str(path[-2])] = [tasks.source(folder)]
        return values


def train(
    config: Config | None = None,
    *,
    model: Model | None = None,
    tasks: Any = None,
    reward: Any = None,
    eval_tasks: Any = None,
    resume: Resume = False,
    clean: bool = False,
    **keys: Any,
) -> LoadedRun:
    """Train by reinforcement learning, as `gradus rl` does, and return the run.

    `tasks` are rows with a `prompt` (a list of dicts or texts, a data set, a data frame, a function
    that gives one), the path of a file of them, or the id of an environment. `reward` is a function
    of any of `prompt`, `reply`, `row`, `messages` and `trace`, by name, several in a list, or a
    table of them with weights; it returns a number, or a dict of numbers. `eval_tasks` are measured
    and never trained. `keys` are those of the config: `max_steps=30, lr=1e-5, group_size=8`.

    A config instead, or as the base of all this, is a TOML or JSON file, its content as a dict, or
    an object. With `resume` the run of that name continues, or the one in that folder. Call it from
    the main thread: Ctrl-C saves, ends the run and is raised as RunInterrupted.

        >>> train(model="Qwen/Qwen3-0.6B", tasks=["Say hi."], reward=score)  # doctest: +SKIP
    """
    if config is not None or isinstance(resume, bool):
        _refuse_unknown(train, _kind_of(config, resume, default=RunConfig), keys)
    kind = _kind_of(config, resume, default=RunConfig if tasks is not None else None)
    sources = _sources(_SOURCES[kind], tasks, reward, keys)
    if eval_tasks is not None:
        at = ("orchestrator", "eval", "env", 0) if kind is RunConfig else ("eval", "env", 0)
        sources |= _sources(at, eval_tasks, reward, keys, name=_HELD_OUT)
    elif reward is not None and tasks is None:
        raise ConfigError("reward: needs `tasks`, whose replies it rates")
    return _run(_Call("gradus.train", kind, config, model, keys, sources, {}, resume, clean))


def sft(
    config: Config | None = None,
    *,
    model: Model | None = None,
    data: Any = None,
    eval_tasks: Any = None,
    reward: Any = None,
    resume: Resume = False,
    clean: bool = False,
    **keys: Any,
) -> LoadedRun:
    """Train on conversations, as `gradus sft` does, and return the run.

    `data` are rows with `messages`, or with `prompt` and `completion`, in any of the forms of
    `gradus.train`'s tasks; a path, a run whose episodes are learned, or a table of keys, is
    `[data]` of the config. The rest is as in `gradus.train`; `eval_tasks` are played meanwhile.

        >>> sft(model="Qwen/Qwen3-0.6B", data=rows, max_steps=20)  # doctest: +SKIP
    """
    _refuse_unknown(sft, SftConfig, keys)
    files: dict[str, str] = {}
    if isinstance(data, LoadedRun):
        data = RunDirectory(data.path).episodes
    if isinstance(data, str | Path | Mapping):
        keys = {"data": data if isinstance(data, Mapping) else {"path": str(data)}, **keys}
    elif data is not None:
        files = {_CONVERSATIONS: lines_of(rows_of(data, "data"), "data")}
    sources = {}
    if eval_tasks is not None:
        sources = _sources(("eval", "env", 0), eval_tasks, reward, keys, name=_HELD_OUT)
    return _run(_Call("gradus.sft", SftConfig, config, model, keys, sources, files, resume, clean))


def evaluate(
    config: Config | None = None,
    *,
    model: Model | None = None,
    tasks: Any = None,
    reward: Any = None,
    resume: Resume = False,
    clean: bool = False,
    **keys: Any,
) -> LoadedRun:
    """Measure a model, as `gradus eval` does, and return the run; arguments as in `gradus.train`.

    A run as `model` is the model that it trained. ProcessError when every episode failed.

        >>> evaluate(model=run, tasks=rows, reward=score).evaluations()  # doctest: +SKIP
    """
    _refuse_unknown(evaluate, EvalConfig, keys)
    sources = _sources(_SOURCES[EvalConfig], tasks, reward, keys)
    call = _Call("gradus.evaluate", EvalConfig, config, model, keys, sources, {}, resume, clean)
    run = _run(call)
    failed = [row for row in run.rows() if row["error"]]
    if failed and len(failed) == len(run.rows()):
        raise ProcessError(
            f"{run.path}: every episode failed. The first: {failed[0]['error_message']}"
        )
    return run


def generate(
    config: Config | None = None,
    *,
    model: Model | None = None,
    tasks: Any = None,
    clean: bool = False,
    **keys: Any,
) -> list[dict[str, Any]]:
    """The replies of a model, in the order of the tasks: the keys of each row, `prompt`, `reply`
    and `error`, which is empty for a reply that came to its end.

    Tasks as in `gradus.train`; nothing rates them. `group_size=4` gives four replies of each.

        >>> generate(model=run, tasks=["Say hi."])[0]["reply"]  # doctest: +SKIP
    """
    _refuse_unknown(generate, EvalConfig, keys)
    path, sources = _SOURCES[EvalConfig], {}
    if tasks is not None:
        sources = {path: unrated(tasks, prompt_key=keys.get("prompt_key"))}
    call = _Call("gradus.generate", EvalConfig, config, model, keys, sources, clean=clean)
    call = replace(call, is_rated=False)
    told = ("prompt", "reply", "error")
    return [{**row["row"], **{key: row[key] for key in told}} for row in _run(call).rows()]


def _refuse_unknown(
    call: Callable[..., Any], kind: type[LaunchedConfig], keys: Mapping[str, Any]
) -> None:
    """ConfigError for keywords of a call that mean nothing, before others are missed."""
    arguments = inspect.signature(call).parameters.keys() - {"keys"}
    keyword_values(kind, {}, {}, keys, _SOURCES[kind], arguments)


def _sources(
    path: tuple[str | int, ...],
    tasks: Any,
    reward: Any,
    keys: Mapping[str, Any],
    *,
    name: str = _PLAYED,
) -> dict[tuple[str | int, ...], OwnTasks]:
    if tasks is None:
        return {}
    if name == _HELD_OUT and is_environment(tasks):
        reward = None  # that of the rows that train
    return {path: own_tasks(tasks, reward, name=name, prompt_key=keys.get("prompt_key"))}


def _kind_of(
    config: Config | None, resume: Resume, *, default: type[LaunchedConfig] | None
) -> type[LaunchedConfig]:
    """Which config it is: by the sections that only one kind has."""
    if isinstance(config, RunConfig | SftConfig):
        return type(config)
    keys: set[str] = set()
    if isinstance(config, Mapping):
        keys = set(config)
    elif config is not None:
        keys = top_level_keys(["@", str(config)])
    if "orchestrator" in keys:
        return RunConfig
    if "data" in keys:
        return SftConfig
    if default is not None:
        return default
    if config is None and not isinstance(resume, bool):
        return RunConfig
    raise ConfigError(
        "a run has `tasks`, or a config with a section 'orchestrator' (rl) or 'data' (sft); there "
        f"are {sorted(keys)}"
    )


def _run(call: _Call) -> LoadedRun:
    """Launch what a call asks for, to its end."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(f"{call.name} handles signals, so call it from the main thread")
    if LAUNCH_VARIABLE in os.environ:
        raise ConfigError(
            f"a process of a run imports a module that calls {call.name} at once; put the call "
            'below: if __name__ == "__main__":'
        )
    if not isinstance(call.resume, bool):
        call = _continued(call)
    try:
        job = _job(call)
    except GradusError as error:
        error.args = (call.in_words(str(error)),)
        raise
    folder = job.output_dir / job.name
    is_resumed = bool(call.resume)
    try:
        code = launch(job, resume=is_resumed, clean=call.clean)
    except GradusError as error:
        error.args = (call.in_words(str(error)),)
        if (folder / "logs").is_dir():
            error.add_note(f"the run: {folder}")
        raise
    if code == INTERRUPTED:
        run = load_run(folder)
        if call.kind is EvalConfig:
            raise RunInterrupted(run, "resume=True continues it")
        again = f'{call.name}(resume="{folder}")'
        if not run.checkpoints():
            raise RunInterrupted(run, f"nothing was saved yet, so {again} starts again at step 1")
        raise RunInterrupted(run, f"{again} continues it")
    if code == ExitCode.UNFIT:
        raise StalledError(call.in_words(read_json(folder / "summary.json")["cause"]))
    if code != ExitCode.DONE and not (call.kind is EvalConfig and load_run(folder).outcome):
        raise ProcessError(f"{folder} was stopped before its end (exit code {code})")
    return load_run(folder)


def _job(call: _Call) -> Job:
    """The job, with the config checked while the caller's files lie in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="gradus-from-python-") as staged:
        for name, text in call.all_files.items():
            (Path(staged) / name).write_text(text, encoding="utf-8")
        config = _checked(call, Path(staged))
        for tasks in call.sources.values() if call.is_rated else ():
            try_rewards(tasks, Path(staged))
    name = run_name(config, secrets.token_hex(4))
    if call.resume and config.name is None:
        raise ConfigError(
            "resume needs the name of the run: set `name` in the config, or give its folder"
        )
    if call.all_files:
        folder = RunDirectory(run_path(Path(config.output_dir), name)).from_python
        config = _checked(replace(call, keys={**call.keys, "name": name}), folder, is_there=False)
    job = job_of(config, resume=bool(call.resume), asks=True)
    if isinstance(job.workload, Episodes):
        asked = replace(job.workload, is_rated=call.is_rated, from_python=True)
        job = replace(job, workload=replace(asked, in_words=call.in_words))
    elif isinstance(job.workload, Steps):
        job = replace(job, workload=replace(job.workload, in_words=call.in_words))
    return replace(job, files=call.all_files, saves_when_interrupted=job.saves)


def _checked(call: _Call, folder: Path, *, is_there: bool = True) -> LaunchedConfig:
    """The config as an object; it works on this machine, once its files are there."""
    own = call.own(folder)
    if isinstance(call.config, LaunchedConfig) and not isinstance(call.config, call.kind):
        kinds = (type(call.config).__name__, call.kind.__name__)
        raise ConfigError(f"config: is of {kinds[0]}, and {call.name} takes a {kinds[1]}")
    if isinstance(call.config, LaunchedConfig) and not own and not call.keys:
        refuse(check(call.config))
        return call.config
    given = call.config or {}
    if isinstance(given, LaunchedConfig):
        given = given.model_dump(exclude_unset=True)
    if isinstance(given, str | Path) and not own and not call.keys:
        return load_config(call.kind, ["@", str(given)], check=check)
    values = keyword_values(call.kind, given, own, call.keys, _SOURCES[call.kind])
    how = check if is_there else None
    return load_config(call.kind, [], check=how, base=values, base_name=call.name)


def _continued(call: _Call) -> _Call:
    """The call with the config that the run in the folder was launched with."""
    run = call.resume if isinstance(call.resume, LoadedRun) else load_run(Path(str(call.resume)))
    folder = run.path.resolve()
    marker = read_marker(RunDirectory(folder))
    kind = _KINDS.get(marker.kind if marker else "")
    is_other = kind is not call.kind and bool(call.config or call.sources or call.files)
    if kind is None or is_other:
        raise ConfigError(f"resume: {folder} is no run that {call.name} continues")
    recorded = dict(read_launched(RunDirectory(folder)).written)
    if not recorded:
        raise ConfigError(f"resume: {folder} does not say how it was launched; give the config too")
    if call.config is None and (key := next(_named_variables(recorded), "")):
        raise ConfigError(
            f"resume: {folder} was launched with {key}, whose values no run writes down; give the "
            "config too"
        )
    where = {"name": folder.name, "output_dir": str(folder.parent)}
    config = call.config if call.config is not None else recorded
    return replace(call, kind=kind, config=config, keys={**call.keys, **where}, resume=True)


def _named_variables(written: Any, key: str = "") -> Iterator[str]:
    """Keys of a recorded config that set variables of a process; tables of the user's own are
    recorded whole."""
    members = written.items() if isinstance(written, Mapping) else enumerate(written)
    for name, member in members:
        below = f"{key}.{name}" if key else str(name)
        if name == "env_vars" and not member:
            yield below
        elif isinstance(member, Mapping | list):
            yield from _named_variables(member, below)


def _model(model: Model) -> dict[str, Any]:
    if isinstance(model, LoadedRun):
        if model.model is None:
            raise ConfigError(f"model: {model.path} has no final model; gradus export makes one")
        launched = read_launched(RunDirectory(model.path)).config
        return {**launched.get("model", {}), "name": str(model.model.resolve())}
    return dict(model) if isinstance(model, Mapping) else {"name": str(model)}
