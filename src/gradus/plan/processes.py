"""The configs of processes → what to start, stage by stage; pure, and the same for every run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gradus.config import (
    EnvironmentProcessConfig,
    EvaluatorProcessConfig,
    InferenceProcessConfig,
    LaunchedConfig,
    OrchestratorProcessConfig,
    ReplayConfig,
    ReplayProcessConfig,
    RunConfig,
    SftEvaluatorProcessConfig,
    SftProcessConfig,
    StrictConfig,
    TrackerProcessConfig,
    TrainerProcessConfig,
    refuse,
    resolve,
)
from gradus.errors import ConfigError
from gradus.plan.gpus import NOT_ASKED, FoundGpus, find_gpus
from gradus.plan.placement import GpuWish, Placement, place
from gradus.plan.variables import (
    CoreShares,
    inference_variables,
    orchestrator_variables,
    share_cores,
    source_variables,
    tracker_variables,
    trainer_variables,
)
from gradus.processes.started import ProcessSpec
from gradus.run.paths import RunDirectory

_CLOSE_SECONDS = 3.0
"""For the tracker process to see that the time is over, and to end."""


@dataclass(frozen=True)
class Machine:
    """What a plan needs to know about where it runs."""

    python: str
    """Interpreter of every process."""
    num_cores: int
    environment: Mapping[str, str]
    """The caller's variables; each process gets only those on its allow-list."""
    gpus: FoundGpus = NOT_ASKED
    """Those that the caller's shell may use."""

    @classmethod
    def current(cls) -> Machine:
        """This machine."""
        variables = dict(os.environ)
        cores = len(os.sched_getaffinity(0))
        return cls(sys.executable, cores, variables, find_gpus(variables))


@dataclass(frozen=True)
class LaunchPlan:
    """Processes in starting order.

    >>> [[spec.name for spec in stage] for stage in plan.stages]
    [['inference', 'env_gradus-reverse-text'], ['trainer', 'orchestrator']]
    """

    configs: Mapping[str, StrictConfig]
    """Process name → what its config file holds."""
    stages: tuple[tuple[ProcessSpec, ...], ...]
    """The processes of a stage start together, once all before them are ready."""

    @property
    def flush_seconds(self) -> float:
        """How long trackers may take once everything else has ended."""
        for config in self.configs.values():
            if isinstance(config, TrackerProcessConfig):
                return max(it.flush_seconds for it in config.monitor) + _CLOSE_SECONDS
        return 0.0


def config_file(run_dir: RunDirectory, process: str) -> Path:
    """Where the config of a process lies."""
    return run_dir.config / f"{process}.json"


def plan_config(
    config: LaunchedConfig | ReplayConfig,
    machine: Machine,
    run_dir: RunDirectory,
    term: int,
    resume_step: int | None = None,
) -> LaunchPlan:
    """The processes of a config, from the beginning or from the checkpoint of a step."""
    configs = resolve(config, run_dir=run_dir.root, term=term, resume_step=resume_step)
    # Only the orchestrator of a run follows an environment to its new process.
    restarts = config.launch.environment_restarts if isinstance(config, RunConfig) else 0
    return plan_processes(
        *(configs.by_process(), configs.env_vars, run_dir, machine), environment_restarts=restarts
    )


def plan_processes(
    configs: Mapping[str, StrictConfig],
    own: Mapping[str, Mapping[str, str]],
    run_dir: RunDirectory,
    machine: Machine,
    *,
    environment_restarts: int = 0,
    roles: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """How the processes of `configs` start; `own` holds the variables that the user sets for each.

    What serves starts first, what works then. `environment_restarts` says how often an environment
    that ends is restarted, `roles` which processes take another role than their config has.
    """
    stages: tuple[list[ProcessSpec], ...] = ([], [])
    placement, cores = placement_of(configs, machine.gpus), cores_of(configs, machine)
    configs = with_transfer(configs, placement)
    for name, config in configs.items():
        kind, set_by_user = KINDS[type(config)], own.get(name, {})
        is_environment = isinstance(config, EnvironmentProcessConfig)
        spec = ProcessSpec(
            name,
            role_command(
                machine,
                (roles or {}).get(name, kind.role),
                config_file(run_dir, name),
                num_processes=_num_ranks(config),
            ),
            _variables(
                config,
                set_by_user,
                machine,
                placement.variables(name, machine.gpus, machine.environment),
                cores,
            ),
            log=log_file(run_dir, name),
            ready_file=None if kind.is_companion else run_dir.ready_file(name),
            finishes=kind.finishes and not kind.is_companion,
            restarts=environment_restarts if is_environment else kind.restarts,
            ends_its_children=isinstance(config, InferenceProcessConfig),
            has_own_temporary_folder=is_environment and "TMPDIR" not in set_by_user,
            is_companion=kind.is_companion,
        )
        stages[kind.finishes].append(spec)
    return LaunchPlan(configs, tuple(tuple(stage) for stage in stages if stage))


@dataclass(frozen=True)
class ProcessKind:
    """What all processes with one kind of config have in common."""

    role: str
    """`gradus <role>` loads its config and does its work."""
    finishes: bool = True
    """Whether it ends by itself when its work is done; the others serve it and start before."""
    is_companion: bool = False
    """Whether the run goes on without it; it ends after all others, when it is told to."""
    restarts: int = 0
    """How often within an hour it may be started anew."""


KINDS: Mapping[type[StrictConfig], ProcessKind] = {
    InferenceProcessConfig: ProcessKind("inference", finishes=False),
    EnvironmentProcessConfig: ProcessKind("env-server", finishes=False),
    TrainerProcessConfig: ProcessKind("trainer"),
    SftProcessConfig: ProcessKind("sft-trainer"),
    OrchestratorProcessConfig: ProcessKind("orchestrator"),
    EvaluatorProcessConfig: ProcessKind("evaluator"),
    SftEvaluatorProcessConfig: ProcessKind("sft-evaluator"),
    ReplayProcessConfig: ProcessKind("replayer"),
    TrackerProcessConfig: ProcessKind("tracker", is_companion=True, restarts=3),
}
"""Config of a process → its kind."""


def _num_ranks(config: StrictConfig) -> int:
    if isinstance(config, TrainerProcessConfig):
        return config.trainer.num_processes
    return config.sft.num_processes if isinstance(config, SftProcessConfig) else 1


def placement_of(configs: Mapping[str, StrictConfig], gpus: FoundGpus) -> Placement:
    """Which of these processes gets which GPUs; ConfigError when they cannot have them."""
    wishes, may_share = {}, False
    for name, config in configs.items():
        if isinstance(config, InferenceProcessConfig):
            wishes[name] = GpuWish.of(config.inference)
            may_share = config.inference.gpu_sharing != "never"
        elif isinstance(config, TrainerProcessConfig):
            wishes[name] = GpuWish.of(config.trainer)
        elif isinstance(config, SftProcessConfig):
            wishes[name] = GpuWish.of(config.sft)
    placement = place(wishes, gpus, may_share=may_share)
    refuse(f"{'.'.join(map(str, key))}: {message}" for key, message in placement.refusals)
    return placement


def cores_of(configs: Mapping[str, StrictConfig], machine: Machine) -> CoreShares:
    """How trainer and engine share the cores; with GPUs, cores are not what they wait for."""
    kinds = set(map(type, configs.values()))
    return share_cores(
        machine.num_cores,
        trains=bool(kinds & {TrainerProcessConfig, SftProcessConfig}),
        serves=InferenceProcessConfig in kinds and not machine.gpus.gpus,
    )


def with_transfer(
    configs: Mapping[str, StrictConfig], placement: Placement
) -> Mapping[str, StrictConfig]:
    """The configs with one word for both ends on how weights travel, in the places of "auto".

    Over nccl, from GPU to GPU, where trainer and engine have GPUs of their own: that is all nccl
    needs, and all that a broadcast is worth its memory for.
    """
    trainer, engine = configs.get("trainer"), configs.get("inference")
    if not isinstance(trainer, TrainerProcessConfig):
        return configs
    ours, theirs = (set(placement.gpus.get(name, ())) for name in ("trainer", "inference"))
    are_apart = bool(ours and theirs) and not ours & theirs
    given, lora = trainer.trainer, trainer.trainer.lora
    transfer, backend = given.weight_transfer, given.broadcast_backend
    if transfer == "auto":
        is_adapter = lora is not None and lora.serve == "adapter"
        transfer = "broadcast" if are_apart and not is_adapter else "filesystem"
    if backend == "auto":
        backend = "nccl" if are_apart else "gloo"
    chosen = given.model_copy(update={"weight_transfer": transfer, "broadcast_backend": backend})
    told = {**configs, "trainer": trainer.model_copy(update={"trainer": chosen})}
    if isinstance(engine, InferenceProcessConfig):
        told["inference"] = engine.model_copy(update={"broadcast_backend": backend})
    return told


def _variables(
    config: StrictConfig,
    user: Mapping[str, str],
    machine: Machine,
    placed: Mapping[str, str],
    cores: CoreShares,
) -> dict[str, str]:
    """The whole environment of a process: what `user` sets for it, and which GPUs it sees."""
    caller, own = machine.environment, {**user, **placed}
    if isinstance(config, InferenceProcessConfig):
        return inference_variables(caller, own, num_cores=cores.engine)
    if isinstance(config, TrainerProcessConfig | SftProcessConfig):
        ranks = _num_ranks(config)
        return trainer_variables(caller, own, num_cores=cores.trainer, num_processes=ranks)
    if isinstance(config, EnvironmentProcessConfig):
        if missing := sorted(set(config.passed_env) - caller.keys()):
            raise ConfigError(
                f"source {config.name!r}: pass_env names {', '.join(missing)}, which this shell "
                "does not have; export it, or remove the name"
            )
        passed = config.env_var_names
        return source_variables(caller, own, verifiers=config.verifiers, passed=passed)
    if isinstance(config, TrackerProcessConfig):
        named = [name for monitor in config.monitor for name in monitor.pass_env]
        return tracker_variables(caller, passed=named)
    sources = config.sources if isinstance(config, OrchestratorProcessConfig) else []
    asked = {"algorithms": [source.algo.model_dump() for source in sources]}
    return orchestrator_variables(caller, own, config=asked)


def role_command(
    machine: Machine, role: str, config: Path, *, num_processes: int = 1
) -> tuple[str, ...]:
    """The command line of a role; more than one process start under torchrun, on loopback."""
    launcher: tuple[str, ...] = ()
    if num_processes > 1:
        ranks = f"--nproc-per-node={num_processes}"
        # The ranks write to the log of the group; torchrun would leave folders behind.
        no_folders = f"--log-dir={os.devnull}"
        options = ("--standalone", "--local-addr=127.0.0.1", no_folders, ranks)
        launcher = ("-m", "torch.distributed.run", *options)
    return (machine.python, *launcher, "-m", "gradus.cli.main", role, "@", str(config))


def describe(plan: LaunchPlan) -> list[str]:
    """The plan for a person; names of variables only, never their values."""
    lines = []
    for number, stage in enumerate(plan.stages, 1):
        lines.append(f"stage {number}, started together:")
        for spec in stage:
            lines.append(f"  {spec.name}")
            lines.append(f"    command      {shlex.join(spec.argv)}")
            lines.append(f"    log          {spec.log}")
            lines.append(f"    environment  {' '.join(sorted(spec.env))}")
    return lines


def log_file(run_dir: RunDirectory, process: str) -> Path:
    """`logs/<process>.log`; of an environment `logs/envs/{train,eval}/<name>.log`."""
    for prefix, purpose in (("env_", "train"), ("eval_", "eval")):
        source = process.removeprefix(prefix)
        if source != process:
            return run_dir.environment_log(purpose, source)
    return run_dir.logs / f"{process}.log"
