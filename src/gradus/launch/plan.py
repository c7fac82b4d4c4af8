"""The configs of processes → what to start, stage by stage; pure, and the same for every run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
    TrainerProcessConfig,
    resolve,
)
from gradus.errors import ConfigError
from gradus.launch.variables import (
    inference_variables,
    orchestrator_variables,
    source_variables,
    trainer_variables,
)
from gradus.processes.started import ProcessSpec
from gradus.run.paths import RunDirectory


@dataclass(frozen=True)
class Machine:
    """What a plan needs to know about where it runs."""

    python: str
    """Interpreter of every process."""
    num_cores: int
    environment: Mapping[str, str]
    """The caller's variables; each process gets only those on its allow-list."""

    @classmethod
    def current(cls) -> Machine:
        """This machine."""
        return cls(sys.executable, len(os.sched_getaffinity(0)), dict(os.environ))


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
    that ends is started anew, `roles` which process takes another role than its config has.
    """
    stages: tuple[list[ProcessSpec], ...] = ([], [])
    for name, config in configs.items():
        needs = NEEDS[type(config)]
        variables = needs.variables(config, own.get(name, {}), machine)
        command = role_command(
            machine,
            (roles or {}).get(name, needs.role),
            config_file(run_dir, name),
            num_processes=needs.num_processes(config),
        )
        spec = ProcessSpec(
            name,
            command,
            variables,
            log=log_file(run_dir, name),
            ready_file=run_dir.ready_file(name),
            finishes=needs.finishes,
        )
        if isinstance(config, EnvironmentProcessConfig):
            has_own_folder = "TMPDIR" not in own.get(name, {})
            spec = replace(
                spec, restarts=environment_restarts, has_own_temporary_folder=has_own_folder
            )
        stages[needs.finishes].append(spec)
    return LaunchPlan(configs, tuple(tuple(stage) for stage in stages if stage))


@dataclass(frozen=True)
class Needs:
    """What the processes with one kind of config need."""

    role: str
    """The word of `gradus` that runs it."""
    variables: Callable[[Any, Mapping[str, str], Machine], dict[str, str]]
    """Its config, the variables that the user sets for it, the machine → all its variables."""
    finishes: bool = True
    """Whether it ends by itself when its work is done; all others serve it and start before."""
    num_processes: Callable[[Any], int] = lambda _: 1
    """More than one start under torchrun."""


def _inference(
    _: InferenceProcessConfig, own: Mapping[str, str], machine: Machine
) -> dict[str, str]:
    return inference_variables(machine.environment, own)


def _environment(
    config: EnvironmentProcessConfig, own: Mapping[str, str], machine: Machine
) -> dict[str, str]:
    missing = sorted(set(config.passed_env) - machine.environment.keys())
    if missing:
        raise ConfigError(
            f"source {config.name!r}: pass_env names {', '.join(missing)}, which this shell "
            "does not have; export it, or remove the name"
        )
    return source_variables(
        machine.environment, own, verifiers=config.verifiers, passed=config.env_var_names
    )


def _ranks(num_processes: int, own: Mapping[str, str], machine: Machine) -> dict[str, str]:
    return trainer_variables(
        machine.environment, own, num_cores=machine.num_cores, num_processes=num_processes
    )


def _orchestrator(
    config: OrchestratorProcessConfig, own: Mapping[str, str], machine: Machine
) -> dict[str, str]:
    named = {"algorithms": [source.algo.model_dump() for source in config.sources]}
    return orchestrator_variables(machine.environment, own, config=named)


def _player(_: StrictConfig, own: Mapping[str, str], machine: Machine) -> dict[str, str]:
    return orchestrator_variables(machine.environment, own, config={})


NEEDS: Mapping[type[StrictConfig], Needs] = {
    InferenceProcessConfig: Needs("inference", _inference, finishes=False),
    EnvironmentProcessConfig: Needs("env-server", _environment, finishes=False),
    TrainerProcessConfig: Needs(
        "trainer",
        lambda config, own, machine: _ranks(config.trainer.num_processes, own, machine),
        num_processes=lambda config: config.trainer.num_processes,
    ),
    SftProcessConfig: Needs(
        "sft-trainer",
        lambda config, own, machine: _ranks(config.sft.num_processes, own, machine),
        num_processes=lambda config: config.sft.num_processes,
    ),
    OrchestratorProcessConfig: Needs("orchestrator", _orchestrator),
    EvaluatorProcessConfig: Needs("evaluator", _player),
    SftEvaluatorProcessConfig: Needs("sft-evaluator", _player),
    ReplayProcessConfig: Needs("replayer", _player),
}
"""Config of a process → what it needs."""


def role_command(
    machine: Machine, role: str, config: Path, *, num_processes: int = 1
) -> tuple[str, ...]:
    """The command line of a role; more than one process start under torchrun, on loopback."""
    launcher: tuple[str, ...] = ()
    if num_processes > 1:
        ranks = f"--nproc-per-node={num_processes}"
        # The ranks write to the log of the group; torchrun would make folders that stay behind.
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
