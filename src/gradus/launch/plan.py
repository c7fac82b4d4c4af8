"""A config → the processes to start, stage by stage; pure, and the same for every launcher."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gradus.config.base import StrictConfig
from gradus.config.resolve import environment_process, resolve_run, resolve_sft
from gradus.config.run import RunConfig
from gradus.config.sft import SftConfig
from gradus.launch.environment import (
    inference_environment,
    orchestrator_environment,
    source_environment,
    trainer_environment,
)
from gradus.run_dir import RunDirectory
from gradus.supervise import ProcessSpec


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
    [['inference', 'env_reverse-text'], ['trainer', 'orchestrator']]
    """

    configs: Mapping[str, StrictConfig]
    """Process name → what its config file holds."""
    stages: tuple[tuple[ProcessSpec, ...], ...]
    """The processes of a stage start together, once all before them are ready."""


def config_file(run_dir: RunDirectory, process: str) -> Path:
    """Where the config of a process lies."""
    return run_dir.config / f"{process}.json"


def plan_rl(
    config: RunConfig,
    run_dir: RunDirectory,
    epoch: int,
    machine: Machine,
    *,
    resume_step: int | None = None,
) -> LaunchPlan:
    """Inference and the environments together, then the trainer and the orchestrator."""
    configs = resolve_run(config, run_dir=run_dir.root, epoch=epoch, resume_step=resume_step)
    caller, own = machine.environment, configs.env_vars
    inference = _spec(
        "inference",
        role_command(machine, "inference", config_file(run_dir, "inference")),
        inference_environment(caller, own["inference"]),
        run_dir,
    )
    environments = []
    for environment in configs.environments:
        name = environment_process(environment.name)
        variables = source_environment(caller, own[name], verifiers=environment.verifiers)
        command = role_command(machine, "env-server", config_file(run_dir, name))
        environments.append(_spec(name, command, variables, run_dir))
    trainer = _trainer_spec(
        "trainer", own["trainer"], run_dir, machine, num_processes=config.trainer.num_processes
    )
    orchestrator = _spec(
        "orchestrator",
        role_command(machine, "orchestrator", config_file(run_dir, "orchestrator")),
        orchestrator_environment(caller, own["orchestrator"]),
        run_dir,
        finishes=True,
    )
    return LaunchPlan(
        configs=configs.by_process(),
        stages=((inference, *environments), (trainer, orchestrator)),
    )


def plan_sft(
    config: SftConfig,
    run_dir: RunDirectory,
    epoch: int,
    machine: Machine,
    *,
    resume_step: int | None = None,
) -> LaunchPlan:
    """One trainer process, or one group of ranks."""
    trainer = _trainer_spec(
        "sft-trainer", config.env_vars, run_dir, machine, num_processes=config.num_processes
    )
    resolved = resolve_sft(config, run_dir=run_dir.root, epoch=epoch, resume_step=resume_step)
    return LaunchPlan(
        configs={"trainer": resolved},
        stages=((trainer,),),
    )


def role_command(
    machine: Machine, role: str, config: Path, *, num_processes: int = 1
) -> tuple[str, ...]:
    """The command line of a role; more than one process start under torchrun, on loopback."""
    launcher: tuple[str, ...] = ()
    if num_processes > 1:
        ranks = f"--nproc-per-node={num_processes}"
        launcher = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", ranks)
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


def _trainer_spec(
    role: str,
    own: Mapping[str, str],
    run_dir: RunDirectory,
    machine: Machine,
    *,
    num_processes: int,
) -> ProcessSpec:
    variables = trainer_environment(
        machine.environment, own, num_cores=machine.num_cores, num_processes=num_processes
    )
    config = config_file(run_dir, "trainer")
    command = role_command(machine, role, config, num_processes=num_processes)
    return _spec("trainer", command, variables, run_dir, finishes=True)


def _spec(
    name: str,
    argv: tuple[str, ...],
    env: Mapping[str, str],
    run_dir: RunDirectory,
    *,
    finishes: bool = False,
) -> ProcessSpec:
    log, ready_file = log_file(run_dir, name), run_dir.ready_file(name)
    return ProcessSpec(name, argv, env, log, ready_file, finishes)


def log_file(run_dir: RunDirectory, process: str) -> Path:
    """`logs/<process>.log`; of an environment `logs/envs/train/<name>.log`."""
    source = process.removeprefix("env_")
    if source != process:
        return run_dir.logs / "envs" / "train" / f"{source}.log"
    return run_dir.logs / f"{process}.log"
