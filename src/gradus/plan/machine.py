"""What this machine must have before anything starts: models, plug-ins, data, free ports."""

from __future__ import annotations

import ast
import ctypes
import inspect
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradus.config.check import contradictions, inference_problems
from gradus.config.families import (
    adapter_problems,
    family_note,
    family_problems,
    image_problems,
    mixture_problems,
    turned_problem,
    unserved_problems,
)
from gradus.config.keys import KeyPath
from gradus.config.problems import Problem
from gradus.config.schema.algorithms import EchoAlgorithmConfig
from gradus.config.schema.base import PluginConfig
from gradus.config.schema.environment import CHAT_HARNESS, EnvironmentConfig
from gradus.config.schema.eval import EvalConfig
from gradus.config.schema.inference import InferenceConfig, ServeConfig
from gradus.config.schema.model import ModelConfig
from gradus.config.schema.monitor import MonitorConfig
from gradus.config.schema.run import RunConfig
from gradus.config.schema.sft import SftConfig
from gradus.config.schema.trainer import ParallelConfig
from gradus.config.sources import LaunchedConfig, Sources, keeps_reference, resolve_sources
from gradus.errors import nearest
from gradus.installed import (
    BUILTIN_HARNESSES,
    PLAYED,
    has_module,
    has_plugin,
    is_module_name,
    known_ids,
    own_code,
    plugin_module,
)
from gradus.plan.gpus import GIB, FoundGpus, find_gpus
from gradus.plan.hardware import Hardware, context_problem, has_cpu_engine
from gradus.plan.memory import (
    Footprint,
    footprint_of,
    memory_problems,
    read_model_shape,
    stored_experts,
)
from gradus.plan.nodes import plan_nodes, serves
from gradus.plan.placement import GpuWish, Placement, place
from gradus.plan.variables import runtime_problem
from gradus.plugins import REWARD_ARGUMENTS, refuse_argument, unknown_argument
from gradus.processes.secured import authority_problem
from gradus.rows.reading import is_file_name
from gradus.run.model_files import (
    is_on_this_machine,
    json_table,
    model_config,
    model_folder,
    text_part,
)
from gradus.run.ready import read_servers

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_PATH_STARTS = (".", "/", "~")
_NODES = Path("/sys/devices/system/node")
_NUMA_LIBRARY = "libnuma.so.1"
"""What the compiled part of vLLM's build for processors needs, and no package brings."""
_ROWS = ("jsonl", "gradus-jsonl")
"""The task set of rows that functions of the user's rate."""
_EITHER_WAY = inspect.Parameter.POSITIONAL_OR_KEYWORD
_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""With it, vLLM takes a context that is longer than the model's own."""
_MOST_SOCKET_BYTES = 107
_SOCKET_BYTES = len("/gradus-rl-12345678/env-12345678/run")


def check(
    config: LaunchedConfig | ServeConfig,
    *,
    gpus: FoundGpus | None = None,
    is_served: bool = True,
) -> list[Problem]:
    """Everything that keeps a config from working on this machine; creates nothing.

    Pass it to `load_config`, so that each problem names its file and line. `gpus` are those of this
    shell, which is asked without them; `is_served` is false for a trainer that runs by itself.
    """
    found = find_gpus(os.environ) if gpus is None else gpus
    if isinstance(config, ServeConfig):
        return serve_problems(config, found)
    sources = resolve_sources(config)
    on_this_machine = machine_problems(config, sources, found, is_served=is_served)
    return [*contradictions(config, sources), *on_this_machine]


def machine_problems(
    config: LaunchedConfig, sources: Sources, gpus: FoundGpus, *, is_served: bool = True
) -> list[Problem]:
    """What a config needs and this machine does not have; creates nothing."""
    problems, is_rl = list(_output_problems(config.output_dir)), isinstance(config, RunConfig)
    problems += _gpu_problems(config, sources, gpus, is_served=is_served)
    if not (isinstance(config, EvalConfig) and config.base_url is not None):
        problems += model_problems(config.model)
        if not isinstance(config, SftConfig) or config.eval is not None:
            problems += _server_problems(config, gpus)
    found = model_config(config.model.name)
    is_ours = is_served and serves(config) and config.inference.addresses is None
    if is_ours and not is_rl and not gpus.gpus and config.launch.nodes is None:
        problems += unserved_problems(config.model.name, found)
    if is_ours:
        problems += _layout_problems(("model", "name"), config.model.name)
    if isinstance(config, RunConfig | SftConfig):
        has: Any = {"has_gpus": bool(gpus.gpus), "has_engine": is_served and is_rl}
        has["dtype"] = config.inference.dtype
        if isinstance(config, RunConfig) and has["dtype"] == "auto":  # takes the trainer's
            has["dtype"] = config.trainer.compute_dtype
        if has["dtype"] == "auto" and Hardware.current(gpus).dtype() == "float32":
            has["dtype"] = "float32"
        problems += family_problems(config.model.name, found, **has)
        path: KeyPath = ("trainer",) if isinstance(config, RunConfig) else ()
        own = config.trainer if isinstance(config, RunConfig) else config
        problems += mixture_problems(path, own, config.model.name, found)
        problems += image_problems(path, own, config.model.name, found)
        where = (*path, "parallel")
        problems += parallel_machine_problems(where, own.parallel, config.model, os.environ)
    if isinstance(config, RunConfig):
        if is_ours and (has_cpu_engine() or not gpus.gpus) and config.launch.nodes is None:
            problems += adapter_problems(path, config.trainer, config.model.name, found)
        for key, name in _plugins(config, sources):
            problems += _module_problems(key, name)
    if isinstance(config, SftConfig):
        problems += _data_problems(("data", "path"), config.data.path)
        for number, mixed in enumerate(config.data.mix):
            problems += _data_problems(("data", "mix", number, "path"), mixed.path)
        if config.validation is not None:
            problems += _data_problems(("validation", "path"), config.validation.path)
    for source in sources.all:
        problems += _installation_problems(source.given, source.path)
    problems += [*_own_code_problems(config), *_temporary_problems()]
    return [*problems, *_tracker_problems(config.monitor)]


def _server_problems(config: LaunchedConfig, gpus: FoundGpus) -> Iterator[Problem]:
    """What the servers of the policy need here, or the file that names those of others."""
    own = config.inference
    if own.addresses is None:
        yield from _port_problems(own)
        yield from _engine_problems(own, gpus)
        yield from _length_problems(config.model, own)
        return
    try:
        is_checked = own.authority is not None
        read_servers(Path(own.addresses).read_text("utf-8"), only_encrypted=is_checked)
    except FileNotFoundError:
        text = f"there is no file {own.addresses!r}; make it, empty while there is no server"
        yield Problem(("inference", "addresses"), text)
    except (OSError, ValueError) as error:
        yield Problem(("inference", "addresses"), f"{own.addresses}: {error}")
    if own.authority is not None and (found := authority_problem(own.authority)):
        yield Problem(("inference", "authority"), f"{own.authority}: {found}")


def _temporary_problems() -> Iterator[Problem]:
    """A folder for temporary files in which no socket can be made: its path takes 107 bytes."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) + _SOCKET_BYTES > _MOST_SOCKET_BYTES:
        text = f"sockets of a run lie below TMPDIR, and {folder} is too long for their paths"
        yield Problem(("launch",), f"{text}; set TMPDIR to a shorter one, such as /tmp")


def _own_code_problems(config: LaunchedConfig) -> Iterator[Problem]:
    """Code from modules that are not on the list of those that may be named."""
    allowed = config.launch.plugins
    if allowed is None:
        return
    for number, name in enumerate(allowed):
        if not is_module_name(name):
            text = f"{name!r} is not the name of a module; write it as in an import, 'my_tasks'"
            yield Problem(("launch", "plugins", number), text)
    for path, module in own_code(config.without_secrets()):
        if not any(f"{module}.".startswith(f"{it}.") for it in allowed):
            yield Problem(
                path,
                f"the module {module!r} is not on the list launch.plugins; add it there if you "
                "trust its code",
            )


def _tracker_problems(monitors: Sequence[MonitorConfig]) -> Iterator[Problem]:
    """Trackers whose library is not installed, and variables that they are to get."""
    for number, monitor in enumerate(monitors):
        key: KeyPath = ("monitor", number, "type")
        if monitor.library and not has_module(monitor.library):
            yield Problem(
                key,
                f"{monitor.type!r} needs a library that is not installed: "
                f"pip install 'gradus-rl[{monitor.extra}]'",
            )
        if not monitor.implementation:
            yield from _module_problems(key, monitor.type)
        missing = sorted(set(monitor.variables) - os.environ.keys())
        if missing:
            is_own = set(missing) - set(monitor.pass_env)
            yield Problem(
                ("monitor", number, "url_var" if is_own else "pass_env"),
                f"this shell has no {', '.join(missing)}; export it, or remove the name",
            )


def placement_of(config: LaunchedConfig, gpus: FoundGpus, *, is_served: bool = True) -> Placement:
    """Which process of a config gets which of these GPUs; `is_served` is false for a trainer that
    is started by itself."""
    if is_served and (nodes := plan_nodes(config)) is not None:
        return nodes.placement()
    wishes = {}
    has_engine = is_served and serves(config) and config.inference.addresses is None
    if has_engine:
        wishes["inference"] = GpuWish.of(config.inference)
    if isinstance(config, RunConfig):
        wishes["trainer"] = GpuWish.of(config.trainer)
    elif isinstance(config, SftConfig):
        wishes["trainer"] = GpuWish.of(config)
    may_share = has_engine and config.inference.gpu_sharing != "never"
    placement = place(wishes, gpus, may_share=may_share)
    return placement.split("inference", config.inference.processes)


def _gpu_problems(
    config: LaunchedConfig, sources: Sources, gpus: FoundGpus, *, is_served: bool
) -> Iterator[Problem]:
    """GPUs that are not there, or that two processes would have."""
    placement = placement_of(config, gpus, is_served=is_served)
    yield from placement.refusals
    is_elsewhere = config.launch.nodes is not None
    if placement.refusals or not placement.gpus or isinstance(config, EvalConfig) or is_elsewhere:
        return
    settings = config.trainer if isinstance(config, RunConfig) else config
    footprint = trainer_footprint(config, sources, on_gpu=True)
    if footprint is not None:
        path = GpuWish.of(settings).key
        yield from memory_problems(footprint, config.inference, placement, gpus, path)


def trainer_footprint(
    config: RunConfig | SftConfig, sources: Sources, *, on_gpu: bool
) -> Footprint | None:
    """What a rank holds at least; None when the model's files are not here, or do not say."""
    settings = config.trainer if isinstance(config, RunConfig) else config
    folder, keeps = model_folder(config.model.name), keeps_reference(config, sources)
    shape = None if folder is None else read_model_shape(folder)
    if shape is None:
        return None
    return footprint_of(shape, settings, on_gpu=on_gpu, keeps_reference=keeps)


def _plugins(config: RunConfig, sources: Sources) -> Iterator[tuple[KeyPath, str]]:
    """Every place that names a class or a function of the user's own, and what it names."""
    orchestrator = config.orchestrator
    chosen: list[tuple[KeyPath, PluginConfig]] = [
        (("trainer", "loss"), config.trainer.loss),
        (("orchestrator", "train", "algo"), orchestrator.train.algo),
        *((("orchestrator", "filters", i), it) for i, it in enumerate(orchestrator.filters)),
    ]
    for source in sources.train:
        if source.given.algo is not None:
            chosen.append((source.algo_path, source.given.algo))
        chosen.append(((*source.path, "curriculum"), source.given.curriculum))
    for path, plugin in chosen:
        yield (*path, "type"), plugin.type
        if isinstance(plugin, EchoAlgorithmConfig) and plugin.filter is not None:
            yield (*path, "filter"), plugin.filter


def serve_problems(config: ServeConfig, gpus: FoundGpus) -> list[Problem]:
    """Why neither the model nor the tokenizer is a folder, nor can be a name on the hub; GPUs that
    are not there, or that no process would share."""
    tokenizer, sharing = config.tokenizer, config.inference.gpu_sharing
    alone = f"{sharing!r}: a server that stands alone shares its GPUs with no trainer; remove it"
    wish = GpuWish.of(config.inference)
    placement = place({"inference": wish}, gpus, may_share=False)
    return [
        *placement.refusals,
        *(() if sharing == "never" else (Problem(("inference", "gpu_sharing"), alone),)),
        *inference_problems(config.inference),
        *_place_problems(("model",), config.model),
        *_layout_problems(("model",), config.model),
        *(() if tokenizer is None else _place_problems(("tokenizer",), tokenizer)),
        *_engine_problems(config.inference, gpus),
    ]


def _layout_problems(path: KeyPath, name: str) -> Iterator[Problem]:
    """Weights that vLLM would read otherwise than they are meant."""
    if folder := model_folder(name):
        yield from turned_problem(path, name, model_config(name), stored_experts(folder))


def model_problems(model: ModelConfig) -> Iterator[Problem]:
    """The model and the tokenizer are directories, or names on the hub."""
    path: KeyPath = ("model", "name")
    yield from _place_problems(path, model.name)
    folder = Path(model.name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            yield Problem(path, f"{model.name!r} is not a model directory: it has no config.json")
        elif not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin")):
            yield Problem(path, f"{model.name!r} has no *.safetensors file; save the model as such")
    if model.tokenizer is not None:
        yield from _place_problems(("model", "tokenizer"), model.tokenizer)
    yield from _remote_code_problems(model)


def model_note(name: str) -> str:
    return family_note(model_config(name))


def _remote_code_problems(model: ModelConfig) -> Iterator[Problem]:
    """Code of others must stay what somebody has read: a folder here, which no push changes."""
    path: KeyPath = ("model", "trust_remote_code")
    for name in (model.name, model.tokenizer):
        if name is None or not model.trust_remote_code:
            continue
        if not Path(name).is_dir():
            yield Problem(
                path,
                f"true would run whatever code {name!r} holds on the hub that day; download one "
                f"revision, `hf download {name} --revision COMMIT --local-dir FOLDER`, read its "
                "*.py files, and write the folder in place of the name",
            )
            continue
        for file in ("config.json", "tokenizer_config.json"):
            text = json.dumps(json_table(Path(name) / file).get("auto_map"))
            if found := re.search(r'"([^"]+)--', text):
                yield Problem(
                    path,
                    f"true, and {file} of {name!r} takes its code from {found[1]!r} on the hub; "
                    f"copy the *.py files from there into the folder and remove '{found[1]}--' "
                    "in that file",
                )


def _length_problems(model: ModelConfig, inference: InferenceConfig) -> Iterator[Problem]:
    """A context beyond the model's positions, which vLLM refuses when it has started.

    Left to vLLM where the user overrides its config, and where scaled positions reach further than
    the number in the file.
    """
    is_overridden = "hf_overrides" in inference.extra_args
    if is_overridden or _LONGER in {**os.environ, **inference.env_vars}:
        return
    config = text_part(model_config(model.name))
    limit = config.get("max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    # Some models have a table for each kind of layer.
    is_plain = isinstance(rope, dict) and not any(isinstance(v, dict) for v in rope.values())
    if not is_plain or rope.get("rope_type", rope.get("type", "default")) != "default":
        return
    if isinstance(limit, int) and model.max_length_tokens > limit:
        text = f"{model.max_length_tokens} is more than the {limit} positions of {model.name!r}"
        yield Problem(("model", "max_length_tokens"), f"{text}; lower it")


def _place_problems(path: KeyPath, name: str) -> Iterator[Problem]:
    """Why a name is neither a directory nor, as far as known here, a name on the hub."""
    if name.startswith("~"):
        yield Problem(path, f"{name!r}: '~' is not replaced in files; write the whole path")
    elif _is_directory_name(name):
        if not Path(name).is_dir():
            yield Problem(path, f"{name!r}: no such directory (seen from {Path.cwd()})")
    elif not _HUB_NAME.fullmatch(name):
        text = "is neither a directory here nor a name on the hub such as 'Qwen/Qwen3-0.6B'"
        yield Problem(path, f"{name!r} {text}")
    elif os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") and not is_on_this_machine(name):
        text = f"{name!r} is not a directory, nor in the hub's cache, and HF_HUB_OFFLINE is set"
        yield Problem(path, text)


def _is_directory_name(name: str) -> bool:
    """Whether a name means a directory here: it looks like a path, or begins with one."""
    if name.startswith(_PATH_STARTS) or name.count("/") > 1 or name.endswith("/"):
        return True
    return Path(name).exists() or ("/" in name and Path(name).parent.is_dir())


def _output_problems(output_dir: str) -> Iterator[Problem]:
    """The run's folder can be made; nothing is left of the attempt."""
    if output_dir.startswith("~"):
        text = f"{output_dir!r}: '~' is the shell's; write the whole path"
        yield Problem(("output_dir",), text)
        return
    folder = Path(output_dir).absolute()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not existing.is_dir():
        yield Problem(("output_dir",), f"{str(existing)!r} is not a directory")
        return
    try:
        # Only trying tells it for root, and of file systems that hold no files of a user.
        os.rmdir(tempfile.mkdtemp(prefix=".gradus-", dir=existing))
    except OSError as error:
        text = f"{str(existing)!r} cannot be written by this user ({error.strerror or error})"
        yield Problem(("output_dir",), text)


def _port_problems(config: InferenceConfig) -> Iterator[Problem]:
    """Ports that the user chose are free right now; port 0 always is."""
    if config.port == 0:
        return
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    for port in range(config.port, min(config.port + config.replicas, 65536)):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((config.host, port))
        except OSError as error:
            text = f"cannot listen on {config.host}:{port} ({error.strerror or error}); "
            text += "use 0, and the system chooses a free port"
            yield Problem(("inference", "port"), text)


def _engine_problems(config: InferenceConfig, gpus: FoundGpus) -> Iterator[Problem]:
    """A cache or parts of the model that an engine on the processors has no place for.

    Only vLLM's build for processors runs there; others may have accelerators that are not asked.
    """
    if has_cpu_engine() and not _loads(_NUMA_LIBRARY):
        text = f"vLLM cannot be loaded, since this system has no {_NUMA_LIBRARY}; install it"
        yield Problem(("inference",), f"{text} (Debian: apt-get install libnuma1)")
    if gpus.gpus or not has_cpu_engine() or has_own_binding({**os.environ, **config.env_vars}):
        return
    nodes, size = len(list(_NODES.glob("node[0-9]*"))) or 1, config.num_gpus
    if size > nodes:
        text = f"{size}: no GPU was found, and an engine on processors needs a NUMA node for each"
        yield Problem(("inference", "tensor_parallel_size"), f"{text} part: at most {nodes} here")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    if config.kv_cache_gib is not None and config.replicas * config.kv_cache_gib > total:
        each = "" if config.replicas == 1 else f" for each of {config.replicas} replicas"
        text = f"{config.kv_cache_gib:g} GiB{each} is more than the {total:.0f} GiB of this machine"
        yield Problem(("inference", "kv_cache_gib"), f"{text}; lower it, or leave it out")


def _loads(library: str) -> bool:
    with suppress(OSError):
        return bool(ctypes.CDLL(library))
    return False


def has_own_binding(variables: Mapping[str, str]) -> bool:
    """Whether the user gives each part of the model its processors; vLLM wants a NUMA node."""
    by_hand = variables.get("VLLM_CPU_OMP_THREADS_BIND", "auto") != "auto"
    return by_hand or variables.get("VLLM_CPU_SIM_MULTI_NUMA", "0") != "0"


def _data_problems(key: KeyPath, data: str) -> Iterator[Problem]:
    """The conversations are there, unless they come from the hub."""
    path = Path(data)
    if not is_file_name(data) and not path.exists():
        return
    if path.is_dir():
        if (path / "episodes").is_dir():
            text = "is a run, and no data; name its episodes folder"
            yield Problem(key, f"{data!r} {text}: {path / 'episodes'}")
    elif not path.is_file():
        yield Problem(key, f"{data!r}: no such file (seen from {Path.cwd()})")
    elif path.stat().st_size == 0:
        yield Problem(key, f"{data!r} is empty; it must hold rows")


def _module_problems(path: KeyPath, name: str) -> Iterator[Problem]:
    """The module of "package.module:Class" or "package.module:function" can be found."""
    module, separator, _ = name.partition(":")
    if separator and not has_module(module):
        yield Problem(path, f"{name!r}: module {module!r} is not installed; install it or fix it")


def _installation_problems(source: EnvironmentConfig, path: KeyPath) -> Iterator[Problem]:
    if source.python is not None and shutil.which(source.python) is None:
        text = f"{source.python!r}: no program (seen from {Path.cwd()}); name the `bin/python`"
        yield Problem((*path, "python"), f"{text} of a virtual environment")
    if source.address is None:
        for at, seat in source.seats.items():
            if wrong := runtime_problem(seat.runtime or {}, source, os.environ):
                yield Problem((*path, *at, "runtime", "type"), wrong)
    if source.python is not None or source.address is not None:
        return
    if not has_plugin(source.id, PLAYED):
        yield Problem((*path, "id"), _not_installed("environment", source.id, PLAYED))
    taskset = source.taskset.get("id")
    if isinstance(taskset, str) and not has_plugin(taskset, PLAYED):
        yield Problem((*path, "taskset", "id"), _not_installed("taskset", taskset, PLAYED))
    if source.id in _ROWS:
        given = source.taskset.get("reward", ())
        for name in [given] if isinstance(given, str) else given:
            yield from _reward_problems((*path, "taskset", "reward"), str(name))
    for at, seat in source.seats.items():
        yield from _uninstalled_harness((*path, *at, "harness", "id"), seat.harness or {})


def _reward_problems(path: KeyPath, reward: str) -> Iterator[Problem]:
    """What is wrong with a function of a file, as far as reading it says; nothing is imported."""
    where, _, function = reward.rpartition(":")
    if not where.endswith(".py"):
        return
    file = Path(where).expanduser()
    if not file.is_file():
        yield Problem(path, f"{reward!r}: no such file (seen from {Path.cwd()})")
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        yield Problem(path, f"{reward!r}: {file}, line {line} is not Python: {error}")
        return
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    defined = [it for it in tree.body if isinstance(it, kinds) and it.name == function]
    for node in defined:
        strange = unknown_argument(_parameters(node.args), REWARD_ARGUMENTS)
        if strange is not None:
            yield Problem(path, str(refuse_argument(reward, strange, REWARD_ARGUMENTS)))


def _parameters(given: ast.arguments) -> Iterator[inspect.Parameter]:
    """Those of a definition, as far as `unknown_argument` looks at them."""
    plain = [*given.posonlyargs, *given.args]
    first_default = len(plain) - len(given.defaults)
    for number, it in enumerate(plain):
        is_only = number < len(given.posonlyargs)
        kind = inspect.Parameter.POSITIONAL_ONLY if is_only else _EITHER_WAY
        default = None if number >= first_default else inspect.Parameter.empty
        yield inspect.Parameter(it.arg, kind, default=default)
    for it, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        default = inspect.Parameter.empty if value is None else None
        yield inspect.Parameter(it.arg, inspect.Parameter.KEYWORD_ONLY, default=default)


def _uninstalled_harness(path: KeyPath, harness: Mapping[str, Any]) -> Iterator[Problem]:
    """The harness is ours, one of verifiers, or an installed module."""
    kinds, name = (BUILTIN_HARNESSES,), harness.get("id", CHAT_HARNESS)
    if isinstance(name, str) and name != CHAT_HARNESS and not has_plugin(name, kinds):
        yield Problem(path, _not_installed("harness", name, kinds))


def _not_installed(kind: str, plugin_id: str, kinds: Sequence[str]) -> str:
    """Says which module was looked for, and what is installed."""
    module = plugin_module(plugin_id)
    if not is_module_name(module):
        return f"{plugin_id!r} cannot name a module; write the id of a {kind} without spaces"
    looked = f"looked for modules {module!r} and 'gradus_{module}', also in {Path.cwd()}"
    known = known_ids(kinds)
    near = nearest(module.replace("_", "-").removeprefix("gradus-"), known)
    meant = f"did you mean {near!r}? " if near else ""
    return f"{kind} {plugin_id!r} is not installed ({looked}); {meant}Installed: {', '.join(known)}"


_NO_COMPILER = (
    "torch.compile needs a C compiler and none is here (looked for $CXX, $CC, g++, gcc, clang++, "
    "clang, cc); install one, or turn compile off"
)


def parallel_machine_problems(
    path: KeyPath, parallel: ParallelConfig, model: ModelConfig, variables: Mapping[str, str]
) -> Iterator[Problem]:
    """A compiler for `compile`, a package for `float8`, heads for `context_parallel_size`.

    Reads the config.json of a model that is on this machine; of any other the trainer says the same
    once it has loaded it.
    """
    if parallel.float8 and not has_module("torchao"):
        text = "needs the package 'torchao'; pip install 'gradus-rl[float8]', or turn float8 off"
        yield Problem((*path, "float8"), text)
    if parallel.compile is True and (problem := compiler_problem(variables)):
        yield Problem((*path, "compile"), problem)
    if shared := context_problem(text_part(model_config(model.name)), parallel):
        yield Problem((*path, "context_parallel_size"), shared)


def compiler_problem(variables: Mapping[str, str]) -> str | None:
    """Why torch.compile cannot work here, for want of a C compiler; None when there is one."""
    chosen = [variables[name] for name in ("CXX", "CC") if variables.get(name)]
    names = [*chosen, "g++", "gcc", "clang++", "clang", "cc"]
    is_here = any(shutil.which(name, path=variables.get("PATH")) for name in names)
    return None if is_here else _NO_COMPILER
