"""The config of each process, derived from what the user wrote; nothing else derives one.

Pure, but for one question: which plug-ins are installed, since an id of ours may be a short one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from gradus.config.check import contradictions
from gradus.config.processes import (
    EVERY_ROLE,
    EnvironmentProcessConfig,
    EvalProcessConfig,
    InferenceProcessConfig,
    RunProcessConfig,
    SftProcessConfig,
    TrackerProcessConfig,
    WorkingConfig,
)
from gradus.config.schema.base import StrictConfig
from gradus.config.schema.environment import (
    CHAT_HARNESS,
    EnvironmentConfig,
    RoleConfig,
    SeatConfig,
)
from gradus.config.schema.eval import EvalConfig
from gradus.config.schema.inference import SamplingConfig
from gradus.config.schema.run import CheckpointConfig, RunConfig
from gradus.config.schema.sft import SftConfig
from gradus.config.sources import (
    EvaluatedSource,
    LaunchedConfig,
    Sources,
    TrainSource,
    resolve_sources,
)
from gradus.errors import refuse
from gradus.installed import BUILTIN_HARNESSES, CHAT_HARNESS_MODULE, installed_id
from gradus.processes.started import NO_SECRETS
from gradus.run.model_files import reads_images

NO_KEY_VARIABLE = "GRADUS_NO_KEY"
"""Never set. Named for endpoints without a key, so that no key of another service is sent."""

_MAX_ENVS_LENGTH = 28
_MAX_MODEL_LENGTH = 24

_SPEED_ONLY = {
    *("env_vars", "host", "port", "allow_public_bind"),
    *("max_num_seqs", "kv_cache_gib", "gpu_memory_utilization"),
    *("addresses", "authority", "replicas", "gpus", "gpu_sharing"),
}
"""Settings of the server that leave what it answers as it is."""
_AS_WRITTEN = (
    *("python", "num_threads", "max_tool_servers", "tasks", "headers_from", "warm_containers"),
    "prepare",
)
"""Keys of a source that its process has too."""


@dataclass(frozen=True)
class ReplayConfig:
    """A recorded run that is trained again."""

    run: RunConfig
    """The recorded config, with the changes of the command line."""
    recorded: Path
    """Folder of the recorded run."""
    num_steps: int
    """Steps to replay."""


@dataclass(frozen=True)
class ProcessConfigs:
    """The config of every process that a command starts; None for one that it does not need."""

    launched: WorkingConfig
    """What `workers` read, all of them the same."""
    workers: tuple[str, ...]
    """The processes that work and end by themselves, in starting order."""
    env_vars: Mapping[str, Mapping[str, str]]
    """Process name → variables that the config sets for it."""
    inference: tuple[InferenceProcessConfig, ...] = ()
    """One for each replica."""
    joining: InferenceProcessConfig | None = None
    """Of a server that others start, where the run starts none."""
    environments: tuple[EnvironmentProcessConfig, ...] = ()
    """The processes of each source that the user does not run at an address."""
    tracker: TrackerProcessConfig | None = None

    def by_process(self) -> dict[str, StrictConfig]:
        """Process name → its config, in starting order; `without_secrets` makes files of them."""
        named = {
            **{config.process: config for config in self.inference},
            **{config.process: config for config in self.environments},
            **dict.fromkeys(self.workers, self.launched),
            "tracker": self.tracker,
        }
        return {name: config for name, config in named.items() if config is not None}


def resolve(
    config: LaunchedConfig | ReplayConfig,
    *,
    run_dir: Path,
    term: int,
    resume_step: int | None = None,
) -> ProcessConfigs:
    """The processes of a run, an evaluation or a replay; refuses a config that contradicts itself.

    >>> list(resolve(config, run_dir=Path("runs/x"), term=0).by_process())
    ['inference', 'env_gradus-reverse-text', 'trainer', 'orchestrator']
    """
    written = config.run if isinstance(config, ReplayConfig) else config
    sources = resolve_sources(written)
    refuse(contradictions(written, sources))
    place: dict[str, Any] = {"run_dir": str(run_dir), "term": term}
    launched, workers = _launched(config, sources, {**place, "resume_step": resume_step})
    tracker = TrackerProcessConfig(**place, monitor=written.monitor) if written.monitor else None
    own = _own_variables(written)
    if isinstance(config, ReplayConfig) or (isinstance(config, SftConfig) and config.eval is None):
        return ProcessConfigs(launched, workers, own, tracker=tracker)
    is_elsewhere = isinstance(config, EvalConfig) and config.base_url is not None
    key = config.api_key_var if isinstance(config, EvalConfig) else None
    played = [source for source in sources.all if source.given.address is None]
    return ProcessConfigs(
        launched,
        workers,
        env_vars={
            **own,
            **dict.fromkeys(config.inference.processes, config.inference.env_vars),
            **{process: given.env_vars for process, given in sources.by_process.items()},
        },
        inference=() if is_elsewhere else tuple(_inference(config, place)),
        joining=_joining(config, place),
        environments=tuple(
            _environment(source, {**place, "number": number}, key, config)
            for source in played
            for number in range(source.given.num_workers)
        ),
        tracker=tracker,
    )


def _launched(
    config: LaunchedConfig | ReplayConfig, sources: Sources, own: Mapping[str, Any]
) -> tuple[WorkingConfig, tuple[str, ...]]:
    """What the processes that work read, and their names."""
    evaluated = [source.complete for source in sources.evaluated]
    if isinstance(config, EvalConfig | SftConfig):
        values = {**_fields(config), **own, "evaluation_sources": evaluated}
        if isinstance(config, EvalConfig):
            values["identity"] = _identity(config, sources)
            return EvalProcessConfig(**values), ("evaluator",)
        if config.eval is None:
            return SftProcessConfig(**values), ("trainer",)
        values["identity"] = _identity(config, sources)
        return SftProcessConfig(**values), ("trainer", "evaluator")
    run = config.run if isinstance(config, ReplayConfig) else config
    launched = RunProcessConfig(
        **_fields(run),
        **own,
        sources=[source.complete for source in sources.train],
        evaluation_sources=evaluated,
    )
    if not isinstance(config, ReplayConfig):
        return launched, ("trainer", "orchestrator")
    changes = {
        "recorded": str(config.recorded),
        "num_steps": config.num_steps,
        "checkpoint": CheckpointConfig(interval_steps=None, interval_minutes=None),
        # No process would fetch a broadcast.
        "trainer": run.trainer.model_copy(update={"weight_transfer": "filesystem"}),
    }
    return launched.model_copy(update=changes), ("trainer", "replayer")


def _fields(config: StrictConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in type(config).model_fields}


def _own_variables(config: LaunchedConfig) -> dict[str, Mapping[str, str]]:
    if isinstance(config, RunConfig):
        trainer, orchestrator = config.trainer.env_vars, config.orchestrator.env_vars
        return {"trainer": trainer, "orchestrator": orchestrator}
    return {"trainer": config.env_vars} if isinstance(config, SftConfig) else {}


def _inference(
    config: LaunchedConfig, place: Mapping[str, Any]
) -> Iterator[InferenceProcessConfig]:
    own: dict[str, Any] = {"awaits_version": not isinstance(config, EvalConfig)}
    if isinstance(config, RunConfig):
        lora, backend = config.trainer.lora, config.trainer.broadcast_backend
        own["lora_rank"] = lora.rank if lora is not None and lora.serve == "adapter" else None
        own["tells_experts"] = config.trainer.router_replay == "engine"
        own |= {} if backend == "auto" else {"broadcast_backend": backend}
    for number, process in enumerate(config.inference.processes):
        port = config.inference.port and config.inference.port + number
        section = config.inference.model_copy(update={"port": port})
        own |= {"inference": section, "process": process}
        yield InferenceProcessConfig(**place, **own, model=config.model, seed=config.seed)


def _joining(config: LaunchedConfig, place: Mapping[str, Any]) -> InferenceProcessConfig | None:
    """What a server that others start is started with; None where the run starts its own."""
    if config.inference.addresses is None:
        return None
    section = config.inference.model_copy(update={"addresses": None, "authority": None})
    (own,) = _inference(config.model_copy(update={"inference": section}), place)
    return own.model_copy(update={"process": "server"})


def _environment(
    source: TrainSource | EvaluatedSource,
    place: Mapping[str, Any],
    key: str | None,
    config: LaunchedConfig,
) -> EnvironmentProcessConfig:
    """The process that plays a source; `key` names a variable that it gets besides its own."""
    given = source.given
    learning = source.complete if isinstance(source, TrainSource) else None
    names = {*given.env_vars, *given.pass_env, *([] if key is None else [key])}
    return EnvironmentProcessConfig(
        **place,
        **{it: getattr(given, it) for it in _AS_WRITTEN},
        prepare_seconds=config.launch.ready_timeout_seconds / 2,
        name=source.complete.name,
        verifiers=verifiers_config(given),
        env_var_names=sorted(names),
        passed_env=sorted({*given.pass_env} - given.env_vars.keys()),
        inherited_env=sorted({*given.env_vars, *(NO_SECRETS & {*given.pass_env})}),
        reads_images=reads_images(config.model.name),
        purpose=source.purpose,
        algo=None if learning is None else learning.algo,
        untrained_agents=[] if learning is None else learning.untrained_agents,
    )


def _identity(config: SftConfig | EvalConfig, sources: Sources) -> dict[str, Any]:
    """What the episodes already played depend on. How many are played is not part of it."""
    played = {
        source.complete.name: {
            "environment": verifiers_config(source.given),
            "tasks": source.given.tasks.model_dump(mode="json"),
            "sampling": source.complete.sampling.model_dump(mode="json"),
            "unmeasured_agents": source.complete.unmeasured_agents,
            "headers_from": source.given.headers_from,
        }
        for source in sources.evaluated
    }
    identity: dict[str, Any] = {"model": config.model.model_dump(mode="json"), "sources": played}
    if isinstance(config, SftConfig):
        return identity
    identity["base_url"] = config.base_url
    if config.base_url is None:
        identity["seed"] = config.seed
        identity["inference"] = config.inference.model_dump(mode="json", exclude=_SPEED_ONLY)
    return identity


def run_name(config: LaunchedConfig, suffix: str) -> str:
    """The name that was given, or `<envs>--<model>--<suffix>`; `suffix` is 8 hex digits.

    >>> run_name(config, "0123abcd")
    'gradus-reverse-text--tiny--0123abcd'
    """
    if config.name is not None:
        return config.name
    if isinstance(config, SftConfig):
        what = PurePath(config.data.path).stem
    elif isinstance(config, EvalConfig):
        what = "_".join(source.unique_name for source in config.env)
    else:
        what = "_".join(source.unique_name for source in config.orchestrator.train.env)
    model = PurePath(config.model.name).name
    return f"{_name_part(what, _MAX_ENVS_LENGTH)}--{_name_part(model, _MAX_MODEL_LENGTH)}--{suffix}"


def _name_part(text: str, max_length: int) -> str:
    """`text` as a part of a name: only safe characters, none of them at the ends."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:max_length].strip("._-")
    return safe or "x"


def verifiers_config(source: EnvironmentConfig) -> dict[str, Any]:
    """verifiers' own EnvConfig for a source, as a dict.

    `id` names a taskset; with `taskset.id` given, it names the environment that plays that
    taskset. EVERY_ROLE holds what is known of the seats: `seat` is a role's seat with all defaults,
    `written` the part of it that the user wrote, `roles` what is written for each role.
    """
    taskset_id = source.taskset.get("id", source.id)
    if isinstance(taskset_id, str):
        taskset_id = installed_id(taskset_id)
    written = _seat(source.agent)
    seat = {**_USUAL_SEAT, **written, "timeout": {**_USUAL_DEADLINES, **written.get("timeout", {})}}
    result: dict[str, Any] = {
        **source.settings,
        "taskset": {**source.taskset, "id": taskset_id},
        "timeout": {
            "episode": source.timeout.episode_seconds,
            "finalize": seat["timeout"]["finalize"],
        },
    }
    if "id" in source.taskset:
        result["id"] = installed_id(source.id)
    roles = {name: _seat(role) for name, role in source.agents.items()}
    result[EVERY_ROLE] = {"seat": seat, "written": written, "roles": roles}
    return result


_LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens")
_USUAL_SEAT: Mapping[str, Any] = {
    "harness": {"id": CHAT_HARNESS_MODULE},
    "runtime": {"type": "subprocess"},
    **dict.fromkeys(_LIMITS),
}
_USUAL_DEADLINES = {"setup": 120.0, "rollout": 600.0, "finalize": 60.0, "scoring": 120.0}
"""The defaults of a seat."""


def _seat(seat: SeatConfig) -> dict[str, Any]:
    """What the config says of a seat or a role, as keys of verifiers' AgentConfig."""
    kept = {"harness", "runtime", "timeout", *_LIMITS}
    given = seat.model_dump(include=kept, exclude_unset=True)
    is_role = isinstance(seat, RoleConfig)
    found = {k: v for k, v in given.items() if v is not None or (k in _LIMITS and not is_role)}
    if not found.get("timeout", True):
        del found["timeout"]
    if "harness" in found:
        found["harness"] = _harness(found["harness"])
    if not isinstance(seat, RoleConfig):
        return found
    if seat.sampling is not None:
        found["sampling"] = _sampling(seat.sampling)
    if seat.base_url is not None:
        # A null takes the key out: only vLLM knows it, and only the policy has versions.
        found["sampling"] = {"cache_salt": None, **found.get("sampling", {})}
        found["model"] = seat.model
        found["client"] = {
            "type": "eval",
            "base_url": seat.base_url,
            "api_key_var": seat.api_key_var or NO_KEY_VARIABLE,
        }
    return found


def _harness(harness: Mapping[str, Any]) -> dict[str, Any]:
    name = harness.get("id", CHAT_HARNESS)
    found = (
        CHAT_HARNESS_MODULE if name == CHAT_HARNESS else installed_id(name, (BUILTIN_HARNESSES,))
    )
    return {**harness, "id": found}


def _sampling(sampling: SamplingConfig) -> dict[str, Any]:
    values = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_completion_tokens,
    }
    given = {key: value for key, value in values.items() if value is not None}
    return {**sampling.extra_body, **given}
