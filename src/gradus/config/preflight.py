"""What the machine must have before anything starts: models, environments, data, free ports."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from gradus.config.algorithm import AlgorithmConfig
from gradus.config.checks import run_problems, sft_problems
from gradus.config.environment import EnvironmentConfig, HarnessChoice
from gradus.config.eval import EvalConfig
from gradus.config.evaluation_checks import (
    eval_problems,
    run_evaluation_problems,
    sft_evaluation_problems,
)
from gradus.config.inference import InferenceConfig
from gradus.config.installed import (
    BUILTIN_ENVIRONMENTS,
    BUILTIN_HARNESSES,
    BUILTIN_TASKSETS,
    builtin_plugins,
    has_module,
    has_plugin,
    plugin_module,
)
from gradus.config.model import ModelConfig
from gradus.config.parallel_machine import machine_problems
from gradus.config.problems import Problem
from gradus.config.resolve import CHAT_HARNESS
from gradus.config.run import RunConfig
from gradus.config.schema import KeyPath
from gradus.config.serve import ServeConfig
from gradus.config.sft import SftConfig

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_PATH_STARTS = (".", "/", "~")
_DATA_SUFFIXES = (".json", ".jsonl")


def check_run(config: RunConfig) -> list[Problem]:
    """Everything that keeps this RL run from working on this machine; creates nothing.

    Pass it to `load_config` as `check`, so that each problem names its file and line.
    """
    sources = config.orchestrator.train.env
    return [
        *run_problems(config),
        *run_evaluation_problems(config),
        *_evaluated_problems(config),
        *_model_problems(config.model),
        *machine_problems(
            ("trainer", "parallel"), config.trainer.parallel, config.model, os.environ
        ),
        *_output_problems(config.output_dir),
        *_port_problems(config.inference),
        *(problem for path, name in _plugins(config) for problem in _plugin_problems(path, name)),
        *(
            problem
            for index, source in enumerate(sources)
            for problem in _source_problems(source, ("orchestrator", "train", "env", index))
        ),
    ]


def _plugins(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Every place that may name a class or a function of the user's own, and what it names."""
    train: KeyPath = ("orchestrator", "train")
    yield ("trainer", "loss", "type"), config.trainer.loss.type
    yield from _algorithm_plugins((*train, "algo"), config.orchestrator.train.algo)
    for index, chosen in enumerate(config.orchestrator.filters):
        yield ("orchestrator", "filters", index, "type"), chosen.type
    for index, source in enumerate(config.orchestrator.train.env):
        path: KeyPath = (*train, "env", index)
        if source.algo is not None:
            yield from _algorithm_plugins((*path, "algo"), source.algo)
        yield (*path, "curriculum", "type"), source.curriculum.type
        yield (*path, "errors", "type"), source.errors.type


def _algorithm_plugins(path: KeyPath, algo: AlgorithmConfig) -> Iterator[tuple[KeyPath, str]]:
    yield (*path, "type"), algo.type
    chosen = algo.options.get("filter")
    if algo.type == "echo" and isinstance(chosen, str):
        yield (*path, "options", "filter"), chosen


def _evaluated_problems(config: RunConfig) -> Iterator[Problem]:
    if config.orchestrator.eval is None:
        return
    for index, source in enumerate(config.orchestrator.eval.env):
        yield from _source_problems(source, ("orchestrator", "eval", "env", index))


def check_sft(config: SftConfig) -> list[Problem]:
    """Everything that keeps this supervised run from working on this machine."""
    return [
        *sft_problems(config),
        *_model_problems(config.model),
        *machine_problems(("parallel",), config.parallel, config.model, os.environ),
        *_output_problems(config.output_dir),
        *_data_problems(("data", "path"), config.data.path),
        *(
            _data_problems(("validation", "path"), config.validation.path)
            if config.validation is not None
            else ()
        ),
        *sft_evaluation_problems(config),
        *(() if config.eval is None else _port_problems(config.inference)),
        *(
            problem
            for index, source in enumerate(config.eval.env if config.eval else ())
            for problem in _source_problems(source, ("eval", "env", index))
        ),
    ]


def check_eval(config: EvalConfig) -> list[Problem]:
    """Everything that keeps this evaluation from working on this machine."""
    return [
        *eval_problems(config),
        *(() if config.base_url is not None else _model_problems(config.model)),
        *(() if config.base_url is not None else _port_problems(config.inference)),
        *_output_problems(config.output_dir),
        *(
            problem
            for index, source in enumerate(config.env)
            for problem in _source_problems(source, ("env", index))
        ),
    ]


def check_serve(config: ServeConfig) -> list[Problem]:
    """Why neither the model nor the tokenizer is a folder, nor can be a name on the hub."""
    tokenizer = config.tokenizer
    return [
        *_place_problems(("model",), config.model),
        *(() if tokenizer is None else _place_problems(("tokenizer",), tokenizer)),
    ]


def _model_problems(model: ModelConfig) -> Iterator[Problem]:
    """The model and the tokenizer are directories, or names on the hub."""
    path: KeyPath = ("model", "name")
    yield from _place_problems(path, model.name)
    folder = Path(model.name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            yield Problem(path, f"{model.name!r} is no model directory: it has no config.json")
        elif not any(folder.glob("*.safetensors")):
            yield Problem(path, f"{model.name!r} has no *.safetensors file; save the model as such")
    if model.tokenizer is not None:
        yield from _place_problems(("model", "tokenizer"), model.tokenizer)


def _place_problems(path: KeyPath, name: str) -> Iterator[Problem]:
    """Why a name is neither a directory nor, as far as known here, a name on the hub."""
    if name.startswith("~"):
        yield Problem(path, f"{name!r}: '~' is not replaced in files; write the whole path")
    elif _is_directory_name(name):
        if not Path(name).is_dir():
            yield Problem(path, f"{name!r}: no such directory (seen from {Path.cwd()})")
    elif not _HUB_NAME.fullmatch(name):
        text = "is no directory here, and no name on the hub such as 'Qwen/Qwen3-0.6B'"
        yield Problem(path, f"{name!r} {text}")
    elif os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") and not _is_cached(name):
        text = f"{name!r} is no directory, and HF_HUB_OFFLINE is set but the hub's cache has it not"
        yield Problem(path, text)


def is_on_this_machine(name: str) -> bool:
    """Whether a model lies in a directory here or in the hub's cache."""
    return Path(name).is_dir() or _is_cached(name)


def _is_directory_name(name: str) -> bool:
    """Whether a name means a directory here: it looks like a path, or begins with one."""
    if name.startswith(_PATH_STARTS) or name.count("/") > 1 or name.endswith("/"):
        return True
    return Path(name).exists() or ("/" in name and Path(name).parent.is_dir())


def _is_cached(name: str) -> bool:
    """Whether the hub's cache on this machine holds a model."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    return (cache / f"models--{name.replace('/', '--')}").is_dir()


def _output_problems(output_dir: str) -> Iterator[Problem]:
    """The run's folder can be made."""
    folder = Path(output_dir).absolute()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not existing.is_dir():
        yield Problem(("output_dir",), f"{str(existing)!r} is not a directory")
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Problem(("output_dir",), f"{str(existing)!r} cannot be written by this user")


def _port_problems(config: InferenceConfig) -> Iterator[Problem]:
    """A port that the user chose is free right now; port 0 always is."""
    if config.port == 0:
        return
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((config.host, config.port))
    except OSError as error:
        text = f"cannot listen on {config.host}:{config.port} ({error.strerror or error}); "
        yield Problem(("inference", "port"), f"{text}use 0, and the system chooses a free port")


def _data_problems(key: KeyPath, data: str) -> Iterator[Problem]:
    """The conversations are there, unless they come from the hub."""
    path = Path(data)
    is_file_name = data.endswith(_DATA_SUFFIXES) or data.startswith(_PATH_STARTS)
    if not is_file_name and not path.exists():
        return
    if path.is_dir():
        if not any(path.glob("step_*/train.jsonl")):
            text = "holds no step_N/train.jsonl; name a file, or the episodes folder of a run"
            yield Problem(key, f"{data!r} {text}")
    elif not path.is_file():
        yield Problem(key, f"{data!r}: no such file (seen from {Path.cwd()})")
    elif path.stat().st_size == 0:
        yield Problem(key, f"{data!r} is empty; it must hold one JSON object per line")


def _plugin_problems(path: KeyPath, name: str) -> Iterator[Problem]:
    """The module of "package.module:Class" or "package.module:function" can be found."""
    module, separator, _ = name.partition(":")
    if separator and not has_module(module):
        yield Problem(path, f"{name!r}: module {module!r} is not installed; install it or fix it")


def _source_problems(source: EnvironmentConfig, path: KeyPath) -> Iterator[Problem]:
    """The taskset, the environment and the harnesses of a source are installed."""
    if source.address is not None:
        return
    kinds = (BUILTIN_TASKSETS, BUILTIN_ENVIRONMENTS)
    if not has_plugin(source.id, kinds):
        yield Problem((*path, "id"), _not_installed("environment", source.id))
    taskset = source.taskset.get("id")
    if isinstance(taskset, str) and not has_plugin(taskset, kinds):
        yield Problem((*path, "taskset", "id"), _not_installed("taskset", taskset))
    yield from _harness_problems((*path, "harness", "id"), source.harness)
    for role, agent in source.agents.items():
        if agent.harness is not None:
            yield from _harness_problems((*path, "agents", role, "harness", "id"), agent.harness)


def _harness_problems(path: KeyPath, harness: HarnessChoice) -> Iterator[Problem]:
    """The harness is ours, one of verifiers, or an installed module."""
    if harness.id == CHAT_HARNESS or has_plugin(harness.id, (BUILTIN_HARNESSES,)):
        return
    known = ", ".join([CHAT_HARNESS, *builtin_plugins(BUILTIN_HARNESSES)])
    yield Problem(path, f"{_not_installed('harness', harness.id)}. Known: {known}")


def _not_installed(kind: str, plugin_id: str) -> str:
    """Says which module was looked for."""
    module = plugin_module(plugin_id)
    if not module.isidentifier():
        return f"{plugin_id!r} cannot name a module; the id of a {kind} has no dots or spaces"
    looked = f"looked for module {module!r}, also in {Path.cwd()}"
    return f"{kind} {plugin_id!r} is not installed ({looked})"
