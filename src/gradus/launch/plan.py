"""A config → the processes to start, stage by stage; pure, and the same for every launcher."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gradus.config import (
    EnvironmentProcessConfig,
    EvalConfig,
    ReplayConfig,
    RunConfig,
    SftConfig,
    StrictConfig,
    resolve,
    resolve_sources,
)
from gradus.errors import ConfigError
from gradus.launch.environment import (
    inference_environment,
    orchestrator_environment,
    source_environment,
    trainer_environment,
)
from gradus.processes.supervisor import ProcessSpec
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


def plan_rl(
    config: RunConfig,
    run_dir: RunDirectory,
    term: int,
    machine: Machine,
    *,
    resume_step: int | None = None,
) -> LaunchPlan:
    """Inference and the environments together, then the trainer and the orchestrator."""
    configs = resolve(config, run_dir=run_dir.root, term=term, resume_step=resume_step)
    sources = resolve_sources(config)
    caller, own = machine.environment, configs.env_vars
    inference = _spec(
        "inference",
        role_command(machine, "inference", config_file(run_dir, "inference")),
        inference_environment(caller, own["inference"]),
        run_dir,
    )
    environments = [
        _environment_spec(environment, own[environment.process], run_dir, machine)
        for environment in configs.environments
    ]
    # The orchestrator follows the new process.
    restarts = config.launch.environment_restarts
    environments = [replace(spec, restarts=restarts) for spec in environments]
    trainer = _trainer_spec(
        "trainer", own["trainer"], run_dir, machine, num_processes=config.trainer.num_processes
    )
    orchestrator = _spec(
        "orchestrator",
        role_command(machine, "orchestrator", config_file(run_dir, "orchestrator")),
        orchestrator_environment(
            caller,
            own["orchestrator"],
            config={"algorithms": [s.complete.algo.model_dump() for s in sources.train]},
        ),
        run_dir,
        finishes=True,
    )
    return LaunchPlan(
        configs=configs.by_process(),
        stages=((inference, *environments), (trainer, orchestrator)),
    )


def plan_eval(config: EvalConfig, run_dir: RunDirectory, term: int, machine: Machine) -> LaunchPlan:
    """Inference, unless an endpoint serves, and the environments together; then the evaluator."""
    configs = resolve(config, run_dir=run_dir.root, term=term)
    caller, own = machine.environment, configs.env_vars
    key = config.api_key_var
    # The key reaches the environment workers, which ask the endpoint, and no other process.
    secret = {key: caller[key]} if key is not None and key in caller else {}
    first = [
        _environment_spec(environment, {**own[environment.process], **secret}, run_dir, machine)
        for environment in configs.environments
    ]
    if configs.inference is not None:
        command = role_command(machine, "inference", config_file(run_dir, "inference"))
        variables = inference_environment(caller, own["inference"])
        first.insert(0, _spec("inference", command, variables, run_dir))
    evaluator = _spec(
        "evaluator",
        role_command(machine, "evaluator", config_file(run_dir, "evaluator")),
        orchestrator_environment(caller, {}, config={}),
        run_dir,
        finishes=True,
    )
    stages = ((tuple(first),) if first else ()) + ((evaluator,),)
    return LaunchPlan(configs=configs.by_process(), stages=stages)


def _environment_spec(
    environment: EnvironmentProcessConfig,
    own: Mapping[str, str],
    run_dir: RunDirectory,
    machine: Machine,
) -> ProcessSpec:
    name = environment.process
    passed, verifiers = environment.env_var_names, environment.verifiers
    missing = sorted(set(environment.passed_env) - machine.environment.keys())
    if missing:
        raise ConfigError(
            f"source {environment.name!r}: pass_env names {', '.join(missing)}, which this shell "
            "does not have; export it, or remove the name"
        )
    variables = source_environment(machine.environment, own, verifiers=verifiers, passed=passed)
    command = role_command(machine, "env-server", config_file(run_dir, name))
    spec = _spec(name, command, variables, run_dir)
    return replace(spec, has_own_temporary_folder="TMPDIR" not in own)


def plan_sft(
    config: SftConfig,
    run_dir: RunDirectory,
    term: int,
    machine: Machine,
    *,
    resume_step: int | None = None,
) -> LaunchPlan:
    """One trainer process or one group of ranks; what evaluates its versions starts before it."""
    configs = resolve(config, run_dir=run_dir.root, term=term, resume_step=resume_step)
    caller, own = machine.environment, configs.env_vars
    trainer = _trainer_spec(
        "sft-trainer", own["trainer"], run_dir, machine, num_processes=config.num_processes
    )
    if configs.evaluator is None:
        return LaunchPlan(configs=configs.by_process(), stages=((trainer,),))
    command = role_command(machine, "inference", config_file(run_dir, "inference"))
    variables = inference_environment(caller, own["inference"])
    servers = [
        _spec("inference", command, variables, run_dir),
        *(
            _environment_spec(environment, own[environment.process], run_dir, machine)
            for environment in configs.environments
        ),
    ]
    evaluator = _spec(
        "evaluator",
        role_command(machine, "sft-evaluator", config_file(run_dir, "evaluator")),
        orchestrator_environment(caller, {}, config={}),
        run_dir,
        finishes=True,
    )
    return LaunchPlan(configs=configs.by_process(), stages=(tuple(servers), (trainer, evaluator)))


def plan_replay(
    config: ReplayConfig, run_dir: RunDirectory, term: int, machine: Machine
) -> LaunchPlan:
    """The trainer, and the process that sends it recorded batches."""
    configs = resolve(config, run_dir=run_dir.root, term=term)
    own, ranks = configs.env_vars["trainer"], config.run.trainer.num_processes
    trainer = _trainer_spec("trainer", own, run_dir, machine, num_processes=ranks)
    replayer = _spec(
        "replayer",
        role_command(machine, "replayer", config_file(run_dir, "replayer")),
        orchestrator_environment(machine.environment, {}, config={}),
        run_dir,
        finishes=True,
    )
    return LaunchPlan(configs=configs.by_process(), stages=((trainer, replayer),))


def plan_bench(config: RunConfig, run_dir: RunDirectory, term: int, machine: Machine) -> LaunchPlan:
    """The trainer of an RL run by itself, on made-up samples."""
    configs = resolve(config, run_dir=run_dir.root, term=term)
    own, processes = configs.env_vars["trainer"], config.trainer.num_processes
    trainer = _trainer_spec("bench-rank", own, run_dir, machine, num_processes=processes)
    process = configs.by_process()["trainer"]
    return LaunchPlan(configs={"trainer": process}, stages=((trainer,),))


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
    """`logs/<process>.log`; of an environment `logs/envs/{train,eval}/<name>.log`."""
    for prefix, purpose in (("env_", "train"), ("eval_", "eval")):
        source = process.removeprefix(prefix)
        if source != process:
            return run_dir.environment_log(purpose, source)
    return run_dir.logs / f"{process}.log"
