"""The config of `gradus rl`, with what every run has: checkpoints, starting and stopping."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from gradus.config.schema.base import Seed, StrictConfig
from gradus.config.schema.environment import NAME_PATTERN
from gradus.config.schema.inference import InferenceConfig
from gradus.config.schema.model import ModelConfig
from gradus.config.schema.monitor import LogConfig, MonitorChoice
from gradus.config.schema.orchestrator import OrchestratorConfig
from gradus.config.schema.trainer import TrainerConfig
from gradus.heartbeat import BEAT_SECONDS
from gradus.run.settings import OPEN_ENDED_STEPS

MIN_PATIENCE_STEPS = 10
"""Fewer steps say too little about the noise of their own rewards."""
_SLURM_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.,@-]*$"
_SLURM_TIME = r"^([0-9]+-)?[0-9]+(:[0-5]?[0-9]){0,2}$"
_SLURM_OPTION = r"^--[a-z][a-z0-9-]*(=[^\x00-\x1f\x7f]+)?$"
_IMAGE = r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$"
OBJECT_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
_RESOURCE = r"^[a-z0-9][a-z0-9.-]*/[A-Za-z0-9][A-Za-z0-9._-]*$"
_LEAVE_SECONDS = 20
"""For a launcher to sum up and to let its nodes go, after everything was saved and stopped."""


class CheckpointConfig(StrictConfig):
    """Saving and keeping checkpoints."""

    interval_steps: int | None = Field(None, ge=1)
    """Steps between checkpoints. None means that steps decide nothing."""
    interval_minutes: float | None = Field(30.0, gt=0)
    """Minutes between checkpoints, at the end of the step in which they are over. None means that
    time decides nothing. With either interval the last step and a stop by SIGTERM save one too;
    with neither nothing is saved."""
    keep_last: int = Field(2, ge=2)
    """Newest checkpoints kept; two at least, so that a damaged one leaves another."""
    keep_interval_steps: int | None = Field(None, ge=1)
    """Checkpoints at multiples of this many steps are kept for ever. None means none of them."""
    asynchronous: bool = True
    """Write while training continues; needs room in main memory for a copy of what is saved."""

    @property
    def is_on(self) -> bool:
        return self.interval_steps is not None or self.interval_minutes is not None


class NodesConfig(StrictConfig):
    """The nodes of a run on several machines. Node 0 is the launcher's, where
    the orchestrator and the environments run; on each other one somebody starts `gradus node`."""

    number: int | None = Field(None, ge=1, le=1024)
    """Nodes of the run. None means as few as its processes fit on."""
    gpus: int = Field(0, ge=0, le=64)
    """GPUs of each node; 0 means that all compute on CPUs, and nothing but the lists below says
    where."""
    trainer: list[int] | None = Field(None, min_length=1)
    """Nodes of the trainer's processes, which are spread evenly over them, in this order. None
    means as few as have GPUs for them."""
    inference: list[int] | None = Field(None, min_length=1)
    """Nodes of the replicas, which are spread evenly over them, in this order. None means the first
    with free GPUs."""
    host: str | None = None
    """Name or address of the launcher's node that the others reach. None means its host name."""
    port: int = Field(0, ge=0, le=65535)
    """Where the launcher listens for them; 0 means any free port. Nodes that do not see the run's
    folder must know it."""
    away_seconds: float = Field(60.0, ge=10)
    """How long a node may be without an answer of the launcher before it ends its processes. The
    launcher gives up a node only later, so that no process runs twice."""


class LaunchConfig(StrictConfig):
    """How the processes are started, restarted and stopped."""

    ready_timeout_seconds: float = Field(600.0, gt=0)
    """Deadline for each process to become ready."""
    stop_timeout_seconds: float = Field(8.0, gt=0)
    """Time for processes to end by themselves before they are killed."""
    save_timeout_seconds: float = Field(20.0, ge=0)
    """How long SIGTERM waits for a checkpoint before processes are stopped; with the stop it should
    fit into the grace time of whoever sends the signal, 30 s for SLURM and Kubernetes."""
    hang_seconds: float = Field(300.0, gt=0)
    """How long a process may give no sign of life, stopped by a signal or hanging inside, before
    the stacks of its threads are written into its log and it is killed: longer than the longest
    micro batch. The console names it within a minute. Work that is known to be long has more."""
    environment_restarts: int = Field(3, ge=0)
    """How often within an hour the process of an environment may be restarted by itself after it
    failed in an RL run."""
    restarts: int = Field(5, ge=0)
    """How often a launch continues by itself after a process failed: within an hour, and in a row
    that came no further than an attempt before. The next failure ends the launch with exit code 75;
    0 means that the first does, with its code."""

    nodes: NodesConfig | None = None
    """Other machines that take part. None means that everything runs on this one."""
    plugins: list[str] | None = None
    """Modules that classes, functions and task sets other than those of gradus and verifiers may
    come from, with the modules below them; what others are named is refused. None means any."""

    @property
    def warning_seconds(self) -> int:
        """How long before its end a launcher must know of it, to save and to stop in peace."""
        return math.ceil(self.save_timeout_seconds + self.stop_timeout_seconds) + _LEAVE_SECONDS

    def problems(self) -> Iterator[tuple[str, str]]:
        least = 4 * BEAT_SECONDS
        if self.hang_seconds < least:
            yield (
                "hang_seconds",
                f"{self.hang_seconds:g} is too short: a process that waits gives a sign of life "
                f"every {BEAT_SECONDS:g} s, and a busy machine delays it; use at least {least:g}",
            )


class SlurmConfig(StrictConfig):
    """The job that `--slurm` submits. Its nodes, and the GPUs of each, follow from
    `launch.nodes`."""

    partition: str | None = Field(None, pattern=_SLURM_NAME)
    """Partition, or several with commas between them. None means what the site has chosen."""
    account: str | None = Field(None, pattern=_SLURM_NAME)
    """Who pays. None means what the site has chosen."""
    time: str | None = Field(None, pattern=_SLURM_TIME)
    """The longest time of one job, as SLURM writes it: "90" minutes, "12:00:00", "2-00:00:00". None
    means what the partition allows."""
    requeue: bool = True
    """Whether a job that its time limit, another job or the loss of a node ended waits in the queue
    again, and continues from its newest checkpoint; not after three jobs in a row without one."""
    cpus: int | None = Field(None, ge=1)
    """CPUs of each node. None means whole nodes with all of their memory."""
    extra: list[Annotated[str, Field(pattern=_SLURM_OPTION)]] = Field(default_factory=list)
    """Further options of `sbatch`, for example "--constraint=h100"."""
    owned: ClassVar[tuple[str, ...]] = (
        *("account", "array", "chdir", "cpus-per-task", "error", "gpus-per-node", "input"),
        *("job-name", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output"),
        *("parsable", "partition", "requeue", "signal", "test-only", "time", "wait", "wrap"),
    )
    """Options that other keys set, or without which the script would not do what it says."""

    @property
    def seconds(self) -> int | None:
        """The longest time of a job, which SLURM counts in whole minutes."""
        if self.time is None:
            return None
        days, dash, rest = self.time.rpartition("-")
        parts = [int(part) for part in rest.split(":")]
        if not dash and len(parts) < 3:
            parts = [0, *parts]
        hours, minutes, seconds = [*parts, 0, 0][:3]
        whole_hours = 24 * int(days or 0) + hours
        return 60 * (60 * whole_hours + minutes + math.ceil(seconds / 60))

    def problems(self, launch: LaunchConfig) -> Iterator[tuple[str, str]]:
        least = launch.ready_timeout_seconds + launch.warning_seconds
        if self.seconds is not None and self.seconds < least:
            yield (
                "time",
                f"{self.time!r} is less than a start and a checkpoint may take; use at least "
                f"{math.ceil(least / 60)} minutes, or lower launch.ready_timeout_seconds = "
                f"{launch.ready_timeout_seconds:g} or launch.save_timeout_seconds = "
                f"{launch.save_timeout_seconds:g}",
            )
        for option in self.extra:
            name = option.removeprefix("--").partition("=")[0]
            # sbatch takes the beginning of an option for the whole one.
            if own := next((it for it in self.owned if it.startswith(name)), None):
                yield "extra", f"{option!r}: gradus sets --{own} itself; remove it"


class KubernetesConfig(StrictConfig):
    """The objects that `gradus render kubernetes` writes. Their pods, and the GPUs of each, follow
    from `launch.nodes`."""

    image: str | None = Field(None, pattern=_IMAGE)
    """Container image with gradus, the task sets and `sh`. Nothing is rendered without one."""
    namespace: str | None = Field(None, pattern=OBJECT_NAME)
    """None means the one that kubectl uses."""
    claim: str | None = Field(None, pattern=OBJECT_NAME)
    """A claim (`ReadWriteMany`) that all pods have at `/runs`: the run's folder lies there, and a
    model that the config names by a path. None means a new one, which is deleted with the other
    objects."""
    storage_class: str | None = Field(None, pattern=OBJECT_NAME)
    """Of a new claim. None means what the cluster has chosen."""
    storage_gib: int = Field(100, ge=1)
    """Of a new claim."""
    cpus: int = Field(8, ge=1)
    """Of each pod."""
    memory_gib: int = Field(32, ge=1)
    """Of each pod; half of it may be shared memory."""
    gpu_resource: str = Field("nvidia.com/gpu", pattern=_RESOURCE)
    """What the cluster calls a GPU."""
    user: int = Field(10_001, ge=1, le=2**31 - 1)
    """Number of the user and the group that all processes run as and that own the run's folder."""
    secret: str | None = Field(None, pattern=OBJECT_NAME)
    """A Secret of yours whose keys are names of variables, such as `HF_TOKEN`. The launcher reads
    them from files."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.claim is None:
            return
        for key in ("storage_class", "storage_gib"):
            if key in self.model_fields_set:
                yield key, "is of a new claim, and claim names one that is there; remove either"


class RunConfig(StrictConfig):
    """One reinforcement-learning run."""

    name: str | None = Field(None, pattern=NAME_PATTERN)
    """Name of the run. None means `<envs>--<model>--<8 hex>`."""
    output_dir: str = "runs"
    """Folder that holds the run's folder."""
    model: ModelConfig
    """The policy, shared by trainer and inference."""
    max_steps: int = Field(OPEN_ENDED_STEPS, ge=1)
    """Steps of the run: batches that train, each in `trainer.updates_per_batch` updates. Left out,
    the run goes on until it is stopped."""
    target_reward: float | None = Field(None, allow_inf_nan=False)
    """Mean reward with which the run ends as `solved`: of an evaluation where there is
    `orchestrator.eval`, else of the last 10 steps. None means that no reward ends it."""
    patience_steps: int | None = Field(None, ge=MIN_PATIENCE_STEPS)
    """Steps without a better evaluation after which the run ends as `stalled`; without
    `orchestrator.eval`, steps whose reward is not clearly above that of as many before. None means
    that it never does."""
    seed: Seed = 0
    """Seed of task order, sampling and initialisation."""
    orchestrator: OrchestratorConfig
    """Episodes and batches."""
    trainer: TrainerConfig = TrainerConfig()
    """Learning."""
    inference: InferenceConfig = InferenceConfig()
    """Serving."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving what a restart needs."""
    monitor: list[MonitorChoice] = Field(default_factory=list)
    """Trackers that get the numbers of the run, besides `metrics.jsonl` in its folder."""
    log: LogConfig = LogConfig()
    """What the processes write into `logs/`."""
    launch: LaunchConfig = LaunchConfig()
    """Starting and stopping."""
    slurm: SlurmConfig = SlurmConfig()
    """What `gradus rl --slurm` asks for."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """What `gradus render kubernetes` writes."""
