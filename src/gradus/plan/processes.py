"""The configs of processes → what to start, stage by stage; pure, and the same for every run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gradus.config import (
    EnvironmentProcessConfig,
    InferenceProcessConfig,
    LaunchedConfig,
    ProcessConfigs,
    ReplayConfig,
    RunConfig,
    RunProcessConfig,
    SftProcessConfig,
    StrictConfig,
    TrackerProcessConfig,
    WorkingConfig,
    resolve,
)
from gradus.errors import ConfigError, refuse
from gradus.plan.gpus import NOT_ASKED, VISIBLE, FoundGpus, find_gpus
from gradus.plan.machine import placement_of
from gradus.plan.nodes import NodePlan, plan_nodes
from gradus.plan.placement import Placement
from gradus.plan.variables import (
    LOOPBACK,
    CoreShares,
    inference_variables,
    orchestrator_variables,
    share_cores,
    source_variables,
    tracker_variables,
    trainer_variables,
)
from gradus.processes.secured import trust_in
from gradus.processes.started import MEETING_ADDRESS, MEETING_PORT, Listens, ProcessSpec
from gradus.run.paths import RunDirectory

LAUNCHED = "run"
"""Stem of the config file that the processes that work share."""

JOINING = "server"
"""Stem of the config file with which others start an inference server of the run."""

_BACKEND = "--rdzv-backend=bound"
_ONE_MACHINE = (_BACKEND, "--rdzv-endpoint=127.0.0.1", "--local-addr=127.0.0.1")
_RANKS = "--nproc-per-node="
"""Options of torchrun."""
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
    """Stem of a config file → what it holds."""
    stages: tuple[tuple[ProcessSpec, ...], ...]
    """The processes of a stage start together, once all before them are ready."""

    def spec(self, name: str) -> ProcessSpec:
        return next(spec for stage in self.stages for spec in stage if spec.name == name)

    @property
    def servers(self) -> list[str]:
        return [spec.name for stage in self.stages for spec in stage if spec.listens is not None]

    @property
    def launched(self) -> StrictConfig:
        return self.configs[LAUNCHED]

    @property
    def other_nodes(self) -> list[int]:
        return sorted({spec.node for stage in self.stages for spec in stage} - {0})

    @property
    def environments(self) -> list[str]:
        played = [it for it in self.configs.values() if isinstance(it, EnvironmentProcessConfig)]
        return [str(it.verifiers["taskset"]["id"]) for it in played]

    @property
    def flush_seconds(self) -> float:
        """How long trackers may take once everything else has ended."""
        for config in self.configs.values():
            if isinstance(config, TrackerProcessConfig):
                return max(it.flush_seconds for it in config.monitor) + _CLOSE_SECONDS
        return 0.0


def config_file(run_dir: RunDirectory, stem: str) -> Path:
    return run_dir.config / f"{stem}.json"


def plan_config(
    config: LaunchedConfig | ReplayConfig,
    machine: Machine,
    run_dir: RunDirectory,
    term: int,
    resume_step: int | None = None,
    *,
    is_bench: bool = False,
) -> LaunchPlan:
    """The processes of a config, from the beginning or from the checkpoint of a step.

    What serves starts first, what works then. `is_bench` leaves only a trainer, which makes its own
    samples. ConfigError when the processes cannot have the GPUs that they want.
    """
    written = config.run if isinstance(config, ReplayConfig) else config
    is_alone = is_bench or isinstance(config, ReplayConfig)
    placement = placement_of(written, machine.gpus, is_served=not is_alone)
    nodes = None if is_alone else plan_nodes(written)
    machine = machine if nodes is None else replace(machine, gpus=nodes.found)
    refuse(placement.refusals)
    if isinstance(config, RunConfig):
        config = written = with_transfer(config, placement)
    configs = resolve(config, run_dir=run_dir.root, term=term, resume_step=resume_step)
    if is_bench:
        configs = ProcessConfigs(configs.launched, ("trainer",), configs.env_vars)
    cores, caller = cores_of(configs, machine), machine.environment
    trusted = trust_in(written.inference.authority)
    stages: tuple[list[ProcessSpec], ...] = ([], [])
    for name, process in configs.by_process().items():
        role = "bench-rank" if is_bench else role_of(name, process)
        kind, own = KINDS.get(role, _WORKER), configs.env_vars.get(name, {})
        is_environment = isinstance(process, EnvironmentProcessConfig)
        placed = placement.variables(name, machine.gpus, caller)
        temporary = "TMPDIR" if is_environment else kind.temporary_variable
        spec = ProcessSpec(
            name,
            role_command(
                getattr(process, "python", None) or machine.python,
                role,
                config_file(run_dir, _stem(name, process)),
                num_processes=_num_ranks(name, process),
                resume_step=resume_step if isinstance(process, WorkingConfig) else None,
            ),
            _variables(name, process, {**own, **trusted, **placed}, caller, cores),
            log=log_file(run_dir, name),
            ready_file=None if kind.is_companion else run_dir.ready_file(name),
            finishes=kind.finishes and not kind.is_companion,
            restarts=_restarts(process, written, kind),
            ends_its_children=isinstance(process, InferenceProcessConfig),
            temporary_variable=None if temporary in own else temporary,
            is_companion=kind.is_companion,
            blocked_seconds=_blocked_seconds(name, process),
            is_replaceable=_is_replaceable(name, process, written),
            listens=_listens(process),
        )
        stages[kind.finishes].extend([spec] if nodes is None else _on_nodes(spec, nodes, run_dir))
    files = {_stem(name, process): process for name, process in configs.by_process().items()}
    if configs.joining is not None:
        files[JOINING] = configs.joining
    return LaunchPlan(files, tuple(tuple(stage) for stage in stages if stage))


def _restarts(process: StrictConfig, written: LaunchedConfig, kind: ProcessKind) -> int:
    """Only the orchestrator of a run follows an environment to its new process."""
    follows = isinstance(process, EnvironmentProcessConfig) and isinstance(written, RunConfig)
    return written.launch.environment_restarts if follows else kind.restarts


def _on_nodes(spec: ProcessSpec, nodes: NodePlan, run_dir: RunDirectory) -> Iterator[ProcessSpec]:
    """The process on its node, or one process for each node of the trainer."""
    if spec.name != "trainer":
        yield replace(spec, node=nodes.node_of.get(spec.name, 0))
        return
    if len(nodes.trainer) == 1:
        yield replace(spec, node=nodes.trainer[0])
        return
    at = spec.argv.index(_ONE_MACHINE[0])
    after = at + len(_ONE_MACHINE)
    ranks = [word for word in spec.argv[after:] if not word.startswith(_RANKS)]
    env = {name: value for name, value in spec.env.items() if LOOPBACK.get(name) != value}
    for number, node in enumerate(nodes.trainer):
        meeting = (
            *(f"--nnodes={len(nodes.trainer)}", _BACKEND, f"--rdzv-endpoint={MEETING_ADDRESS}"),
            f"--rdzv-conf=rank={number},port={MEETING_PORT}",
            f"{_RANKS}{nodes.ranks_per_node}",
        )
        own = {VISIBLE: ",".join(map(str, nodes.gpus.get(("trainer", node), ())))}
        name = spec.name if number == 0 else f"{spec.name}_{number}"
        yield replace(
            spec,
            name=name,
            argv=(*spec.argv[:at], *meeting, *ranks),
            env=env | (own if VISIBLE in env and nodes.gpus_per_node else {}),
            log=log_file(run_dir, name),
            # Only its first rank says when all are ready, and when they are done.
            ready_file=spec.ready_file if number == 0 else None,
            is_replaceable=False,
            node=node,
            meets_at=nodes.trainer[0],
            beats_as=spec.name,
        )


def _blocked_seconds(name: str, config: StrictConfig) -> float:
    """How long code of others may hold the event loop: a score of an algorithm, an episode."""
    if isinstance(config, EnvironmentProcessConfig):
        return float(config.verifiers.get("timeout", {}).get("episode", 0.0))
    if name != "orchestrator" or not isinstance(config, RunProcessConfig):
        return 0.0
    return max((it.algo.scoring_timeout_seconds for it in config.sources), default=0.0)


def _is_replaceable(name: str, config: StrictConfig, written: LaunchedConfig) -> bool:
    """Whether the others may wait for a new process.

    A server of a run loads the version that was served from disk, where a broadcast leaves none;
    and one that takes turns on a GPU would start while the trainer has it.
    """
    if isinstance(config, InferenceProcessConfig):
        sends = isinstance(written, RunConfig) and written.trainer.weight_transfer == "broadcast"
        return not sends and config.inference.gpu_sharing != "turns"
    if not isinstance(config, RunProcessConfig):
        return False
    return {
        "trainer": config.is_trainer_replaceable,
        "orchestrator": config.is_orchestrator_replaceable,
    }.get(name, False)


def _listens(process: StrictConfig) -> Listens | None:
    if not isinstance(process, InferenceProcessConfig):
        return None
    own = process.inference
    return Listens(own.host, own.port, own.allow_public_bind)


def _stem(name: str, config: StrictConfig) -> str:
    return LAUNCHED if isinstance(config, WorkingConfig) else name


@dataclass(frozen=True)
class ProcessKind:
    """What all processes of a role have in common."""

    finishes: bool = True
    """Whether it ends by itself when its work is done; the others serve it and start before."""
    is_companion: bool = False
    """Whether the run continues without it; it ends after all others, when it is told to."""
    restarts: int = 0
    """How often within an hour it may be restarted."""
    temporary_variable: str | None = None
    """As in `ProcessSpec`."""


_WORKER = ProcessKind()
KINDS: Mapping[str, ProcessKind] = {
    "inference": ProcessKind(finishes=False, temporary_variable="VLLM_RPC_BASE_PATH"),
    "env-server": ProcessKind(finishes=False),
    "tracker": ProcessKind(is_companion=True, restarts=3),
}
"""Roles that do more or less than work until they are done."""


def role_of(process: str, config: StrictConfig) -> str:
    """The command, `gradus <role>`, that loads the config of a process and does its work."""
    if isinstance(config, EnvironmentProcessConfig):
        return "env-server"
    if isinstance(config, InferenceProcessConfig):
        return "inference"
    return f"sft-{process}" if isinstance(config, SftProcessConfig) else process


def cores_of(configs: ProcessConfigs, machine: Machine) -> CoreShares:
    """How trainer and engine share the cores; with GPUs, cores are not what they wait for."""
    return share_cores(
        machine.num_cores,
        trains="trainer" in configs.workers,
        num_engines=0 if machine.gpus.gpus else len(configs.inference),
    )


def with_transfer(config: RunConfig, placement: Placement) -> RunConfig:
    """The config with one word for both ends on how weights travel, in the places of "auto".

    Over nccl, from GPU to GPU, where trainer and engine have their own GPUs: that is all nccl
    needs, and all that a broadcast is worth its memory for.
    """
    served = config.inference.processes
    is_spread = config.launch.nodes is not None
    ours = set(placement.gpus.get("trainer", ()))
    theirs = {number for name in served for number in placement.gpus.get(name, ())}
    are_apart = bool(ours and theirs) and not ours & theirs
    given, lora = config.trainer, config.trainer.lora
    transfer, backend = given.weight_transfer, given.broadcast_backend
    if transfer == "auto":
        is_adapter = lora is not None and lora.serve == "adapter"
        can_send = are_apart and not is_spread and not is_adapter and len(served) == 1
        transfer = "broadcast" if can_send else "filesystem"
    if backend == "auto":
        backend = "nccl" if are_apart else "gloo"
    chosen = {"weight_transfer": transfer, "broadcast_backend": backend}
    copied: RunConfig = config.model_copy(update={"trainer": given.model_copy(update=chosen)})
    return copied


def _variables(
    process: str,
    config: StrictConfig,
    own: Mapping[str, str],
    caller: Mapping[str, str],
    cores: CoreShares,
) -> dict[str, str]:
    """The whole environment of a process; `own` is what the user sets for it, and its GPUs."""
    if isinstance(config, InferenceProcessConfig):
        return inference_variables(caller, own, num_cores=cores.engine)
    if process == "trainer":
        ranks = _num_ranks(process, config)
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
        named = [name for monitor in config.monitor for name in monitor.variables]
        return tracker_variables(caller, passed=named)
    algorithms = []
    if process == "orchestrator" and isinstance(config, RunProcessConfig):
        algorithms = [source.algo.model_dump() for source in config.sources]
    return orchestrator_variables(caller, own, config={"algorithms": algorithms})


def _num_ranks(process: str, config: StrictConfig) -> int:
    if process != "trainer":
        return 1
    assert isinstance(config, RunProcessConfig | SftProcessConfig)
    section = config.trainer if isinstance(config, RunProcessConfig) else config
    return section.num_processes


def role_command(
    python: str,
    role: str,
    config: Path,
    *,
    num_processes: int = 1,
    resume_step: int | None = None,
) -> tuple[str, ...]:
    """The command line of a role; more than one process start under torchrun, on loopback."""
    launcher: tuple[str, ...] = ()
    if num_processes > 1:
        ranks = f"{_RANKS}{num_processes}"
        # The ranks write to the log of the group; torchrun would leave folders behind.
        no_folders = f"--log-dir={os.devnull}"
        options = (*_ONE_MACHINE, no_folders, ranks)
        launcher = ("-m", "gradus.trainer.entry.ranks", *options)
    at = () if resume_step is None else ("--resume-step", str(resume_step))
    return (python, "-P", *launcher, "-m", "gradus.cli.main", role, "@", str(config), *at)


def describe_processes(plan: LaunchPlan) -> list[str]:
    """The plan for a person; names of variables only, never their values."""
    lines = []
    for number, stage in enumerate(plan.stages, 1):
        lines.append(f"stage {number}, started together:")
        for spec in stage:
            lines.append(f"  {spec.name}" + (f", on node {spec.node}" if spec.node else ""))
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
