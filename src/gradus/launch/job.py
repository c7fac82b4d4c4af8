"""What is launched: the processes of a config, how they resume, and what is checked first."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar, cast

from gradus.config import (
    EvalConfig,
    LaunchConfig,
    LaunchedConfig,
    RunConfig,
    ServeConfig,
    SftConfig,
    StrictConfig,
    run_name,
)
from gradus.errors import HubError, refuse
from gradus.files import read_json
from gradus.installed import load_part, own_code
from gradus.launch.console import View
from gradus.launch.episodes import Episodes
from gradus.launch.resume import Preparation, ResumePoint
from gradus.launch.steps import Steps
from gradus.log import LogSettings
from gradus.monitor import BENCH_COLUMNS, RL_COLUMNS, SFT_COLUMNS
from gradus.plan.endpoints import check_external_models
from gradus.plan.hardware import Hardware
from gradus.plan.learning_rate import with_learning_rate
from gradus.plan.machine import check
from gradus.plan.precision import Trial, bfloat16_fault, cache_folder
from gradus.plan.processes import LAUNCHED, LaunchPlan, Machine, config_file, plan_config
from gradus.plan.variables import inference_variables, trainer_variables
from gradus.processes.started import Engine, OtherNodes
from gradus.run.lease import RunKind, RunLease, run_path
from gradus.run.model_files import ask_hub
from gradus.run.paths import RunDirectory
from gradus.run.recording import note_launch

AUTO = "auto"
NODES = ("gradus.launchers", "nodes", "cluster")
LR_KEYS = {RunConfig: "trainer.optimizer.lr", SftConfig: "optimizer.lr"}
BFLOAT16 = "bfloat16"
_ENGINE_TRIAL = "gradus.inference.engine.precision"
_TRAINER_TRIAL = "gradus.trainer.entry.precision"
Launched = TypeVar("Launched", bound=LaunchedConfig | ServeConfig)

Planner = Callable[[RunDirectory, int, int | None], LaunchPlan]
"""Run directory, term, step of the checkpoint to continue from → the plan."""


class Workload(Protocol):
    """What a launch does: the steps of a run or the episodes of an evaluation."""

    @property
    def title(self) -> str:
        """What its directory is called on the terminal."""

    def resume_point(self, lease: RunLease) -> ResumePoint:
        """Where it continues; refuses what cannot be continued."""

    def prepare(self, lease: RunLease, plan: LaunchPlan, point: ResumePoint | None) -> Preparation:
        """Compare the run directory with this launch; changes nothing."""

    def view(self, stream: TextIO, lease: RunLease) -> View:
        """What shows it to a person."""


PICKLED = ".pickle"
"""How the name ends of a file of a call in Python that holds no text for people."""


@dataclass(frozen=True)
class Job:
    """What is launched, and where."""

    name: str
    output_dir: Path
    kind: RunKind
    launch: LaunchConfig
    plan: Planner
    workload: Workload
    check: Callable[[], None] = lambda: None
    """Asks the endpoints of others that it needs; not called in a dry run."""
    saves: bool = False
    """Whether a stop from outside waits for a checkpoint."""
    evaluation_seconds: float = 0.0
    """Time that evaluations at the end may take."""
    written: StrictConfig | None = None
    """What the user wrote, with the dtypes that were chosen; trackers and reports tell it."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """Key → what was chosen for its "auto", and why."""
    notes: tuple[str, ...] = ()
    """What a person must know before it starts."""
    files: Mapping[str, str] = field(default_factory=dict)
    """What a call in Python gave, by name; the run's folder keeps it."""
    saves_when_interrupted: bool = False
    """Whether Ctrl-C waits for a checkpoint too, where no command is there to be typed again."""
    engine: Engine | None = None
    """What starts its node sides; None where somebody else does."""
    logs: LogSettings = field(default_factory=LogSettings)
    """How its processes log, but for the name of the run."""

    @property
    def logs_of_run(self) -> LogSettings:
        return replace(self.logs, run=self.name)

    def open_nodes(
        self, plan: LaunchPlan, lease: RunLease
    ) -> AbstractContextManager[OtherNodes | None]:
        """Who owns the processes of nodes beside the launcher's; nobody where there are none."""
        if self.launch.nodes is None or (not plan.other_nodes and self.engine is None):
            return nullcontext()
        opened = load_part(*NODES)
        return opened(self.launch, lease, self.logs_of_run, self.engine)  # type: ignore[no-any-return]


def job_of(
    config: LaunchedConfig,
    *,
    resume: bool = False,
    hardware: Hardware | None = None,
    asks: bool = False,
) -> Job:
    """What `gradus rl`, `gradus sft` and `gradus eval` launch, on this machine unless told so.

    With `resume` it computes in the dtypes of the launches before, whatever this machine has. If it
    `asks`, the hub says what kind of model it is where nothing on this disk does.
    """
    if config.launch.nodes is not None:
        load_part(*NODES)  # A missing package is told before a folder is made.
    machine = Machine.current()
    unknown = _ask_for_model(config, machine) if asks else ()
    recorded = _recorded_dtypes(config) if resume else Dtypes()
    here = hardware or with_trial(Hardware.current(machine.gpus), config, machine, recorded)
    kept = _kept(config, here, recorded)
    config = with_dtypes(config, here, recorded)
    config, rate = with_learning_rate(config, _recorded_rate(config) if resume else None)
    modules = sorted({module for _, module in own_code(config.without_secrets())})
    start = partial(
        Job,
        name=run_name(config, secrets.token_hex(4)),
        output_dir=Path(config.output_dir),
        launch=config.launch,
        logs=config.log.settings(),
        plan=partial(plan_config, config, machine),
        check=partial(check_external_models, config, os.environ),
        written=config,
        chosen={LR_KEYS[type(config)]: rate} if rate else {},
        notes=(
            *unknown,
            *_about_precision([*kept, *precision_warnings(config, here)]),
            *([f"{'learning rate':<18}{rate}"] if rate else []),
            *([f"{'own code':<18}{', '.join(modules)}"] if modules else []),
        ),
    )
    if isinstance(config, EvalConfig):
        return start(kind="eval", workload=Episodes(config.show_replies))
    if isinstance(config, SftConfig):
        return start(
            kind="sft",
            workload=Steps(
                "sft", config.max_steps, SFT_COLUMNS, keeps_versions=config.eval is not None
            ),
            saves=config.checkpoint.is_on,
            evaluation_seconds=all_evaluations_seconds(config),
        )
    evaluation = config.orchestrator.eval
    return start(
        kind="rl",
        workload=Steps("rl", config.max_steps, RL_COLUMNS, note=partial(_note, config)),
        saves=config.checkpoint.is_on,
        evaluation_seconds=0.0 if evaluation is None else evaluation.timeout_seconds,
    )


def _ask_for_model(config: LaunchedConfig, machine: Machine) -> tuple[str, ...]:
    """Know what kind of model it is before anything is planned; else a note of what is not known.

    ConfigError when the hub does not give it, and for what does not fit the model that it gave.
    """
    if isinstance(config, EvalConfig) and config.base_url is not None:
        return ()
    try:
        if ask_hub(config.model.name):
            refuse(check(config, gpus=machine.gpus))
    except HubError as error:
        unsaid = "its family, size and whether it reads images are not known; planned as for text"
        return (f"{'model':<18}{unsaid} ({error})",)
    return ()


def bench_job(config: RunConfig) -> Job:
    """The trainer of an RL run by itself, on made-up samples."""
    machine = Machine.current()
    here = with_trial(Hardware.current(machine.gpus), config, machine)
    config = with_dtypes(config, here)

    num_steps = config.trainer.bench.warmup_steps + config.trainer.bench.steps
    return Job(
        name=f"bench--{Path(config.model.name).name}--{secrets.token_hex(4)}",
        output_dir=Path(config.output_dir),
        kind="bench",
        launch=config.launch,
        written=config,
        logs=config.log.settings(),
        plan=partial(plan_config, config, machine, is_bench=True),
        workload=Steps("bench", num_steps, BENCH_COLUMNS),
        notes=_about_precision(precision_warnings(config, here)),
    )


@dataclass(frozen=True)
class Dtypes:
    """What the trainer and the engine compute in; None where nothing says it."""

    trainer: str | None = None
    engine: str | None = None


def with_dtypes(config: Launched, hardware: Hardware, recorded: Dtypes | None = None) -> Launched:
    """The config with a dtype in every place of `auto`; the one place that decides it.

    What is written stays, and holds for the other part too; then comes what was `recorded`, then
    what the hardware multiplies fast. A part that this launch does not start decides nothing.
    """
    known = recorded or Dtypes()
    written = _dtypes(config)
    if _trains_on_cpu(config):
        hardware = replace(hardware, trains_on_gpu=False)
    auto = hardware.dtype(trains=written.trainer is not None, serves=written.engine is not None)
    given = Dtypes(
        _decided(written.trainer, written.engine, known.trainer, known.engine) or auto,
        _decided(written.engine, written.trainer, known.engine, known.trainer) or auto,
    )
    if isinstance(config, SftConfig):
        changes: dict[str, Any] = {"compute_dtype": given.trainer}
    elif isinstance(config, RunConfig):
        trained = config.trainer.model_copy(update={"compute_dtype": given.trainer})
        changes = {"trainer": trained}
    else:
        changes = {}
    changes["inference"] = config.inference.model_copy(update={"dtype": given.engine})
    copied: Any = config.model_copy(update=changes)
    return cast("Launched", copied)


def with_trial(
    here: Hardware,
    config: LaunchedConfig | ServeConfig,
    machine: Machine,
    recorded: Dtypes | None = None,
    *,
    may_start: bool = True,
) -> Hardware:
    """The hardware, with what is wrong about the bfloat16 that this config would compute on its
    processor: each part tries it in a child, once for each processor and version.

    Without `may_start` only what earlier trials have shown.
    """
    chosen = _dtypes(with_dtypes(config, here, recorded))
    on_gpu = here.trains_on_gpu and not _trains_on_cpu(config)
    caller, trials = machine.environment, []
    if chosen.engine == BFLOAT16 and not here.serves_on_gpu and _starts_engine(config):
        variables = inference_variables(caller, config.inference.env_vars)
        trials.append(Trial("engine", (machine.python, "-P", "-m", _ENGINE_TRIAL), variables))
    if chosen.trainer == BFLOAT16 and not on_gpu:
        learns = config if isinstance(config, SftConfig) else cast("RunConfig", config).trainer
        variables = trainer_variables(
            caller, learns.env_vars, num_cores=machine.num_cores, num_processes=1
        )
        trials.append(Trial("trainer", (machine.python, "-P", "-m", _TRAINER_TRIAL), variables))
    fault = bfloat16_fault(trials, here.cpu_flags, cache_folder(caller), may_start=may_start)
    return replace(here, bfloat16_fault=fault)


def precision_warnings(config: LaunchedConfig | ServeConfig, hardware: Hardware) -> list[str]:
    """A line when bfloat16 failed its trial here, and what that means for a config with dtypes."""
    if not hardware.bfloat16_fault:
        return []
    found = _dtypes(config)
    is_used = BFLOAT16 in (found.trainer, found.engine)
    means = "bfloat16 as it was asked for, though it" if is_used else "float32, since bfloat16"
    return [f"{means} failed its trial on this processor: {hardware.bfloat16_fault}"]


def _starts_engine(config: LaunchedConfig | ServeConfig) -> bool:
    is_elsewhere = isinstance(config, EvalConfig) and config.base_url is not None
    return not is_elsewhere and find_spec("vllm") is not None


def _decided(*dtypes: str | None) -> str | None:
    return next((dtype for dtype in dtypes if dtype not in {None, AUTO}), None)


def _trains_on_cpu(config: LaunchedConfig | ServeConfig) -> bool:
    """Whether the config keeps the trainer off the GPUs."""
    if isinstance(config, RunConfig):
        return config.trainer.gpus == []
    return isinstance(config, SftConfig) and config.gpus == []


def _dtypes(config: LaunchedConfig | ServeConfig) -> Dtypes:
    """What is written, `auto` too, for the parts that this config starts."""
    engine = config.inference.dtype
    if isinstance(config, RunConfig):
        return Dtypes(config.trainer.compute_dtype, engine)
    if isinstance(config, SftConfig):
        return Dtypes(config.compute_dtype, None if config.eval is None else engine)
    return Dtypes(engine=engine)


def _recorded_dtypes(config: LaunchedConfig) -> Dtypes:
    """Those of the last launch of the run that is resumed."""
    match _last_launch(config):
        case {"trainer": {"compute_dtype": trainer}, "inference": {"dtype": engine}}:
            return Dtypes(trainer, engine)
        case {"compute_dtype": trainer, "inference": {"dtype": engine}}:
            return Dtypes(trainer, engine)
        case {"inference": {"dtype": engine}}:
            return Dtypes(engine=engine)
    return Dtypes()


def _recorded_rate(config: LaunchedConfig) -> float | None:
    """The learning rate of the last launch of the run that is resumed."""
    match _last_launch(config):
        case {"trainer": {"optimizer": {"lr": float(rate)}}}:
            return rate
        case {"optimizer": {"lr": float(rate)}}:
            return rate
    return None


def _last_launch(config: LaunchedConfig) -> Any:
    """The config of the last launch of the run that is resumed; None without one."""
    if config.name is None:
        return None
    run_dir = RunDirectory(run_path(Path(config.output_dir), config.name))
    try:
        return read_json(config_file(run_dir, LAUNCHED))
    except FileNotFoundError:
        return None


def _kept(config: LaunchedConfig, hardware: Hardware, recorded: Dtypes) -> list[str]:
    """A line when a run continues in another dtype than this machine would choose."""
    written, now = (
        _dtypes(with_dtypes(config, hardware, recorded)),
        _dtypes(with_dtypes(config, hardware)),
    )
    if written == now:
        return []
    kept, chosen = (it.trainer or it.engine for it in (written, now))
    line = f"{kept}, as in the launches before; on this machine auto would be {chosen}"
    return [line]


def _about_precision(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{'precision':<18}{line}" for line in lines)


def all_evaluations_seconds(config: SftConfig) -> float:
    """The most that evaluations may take when all of them wait for the end of training."""
    section = config.eval
    if section is None:
        return 0.0
    versions = range(config.max_steps + 1)
    num_due = sum(section.is_due(version, max_steps=config.max_steps) for version in versions)
    return num_due * section.longest_seconds


def _note(config: RunConfig, lease: RunLease) -> None:
    if config.orchestrator.recording:
        written = config.without_secrets(only_written=True)
        note_launch(lease.run_dir, lease.term, config.without_secrets(), written)
