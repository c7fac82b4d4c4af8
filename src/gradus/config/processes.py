"""The config of one process, made by `resolve.py`; never written by hand.

Each process is started as `gradus <role> @ <run_dir>/config/<file>.json`. Those that do the work of
a launch read the launched config itself, from one file; `--resume-step` says where they continue.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import Field

from gradus.config.schema.algorithms import AlgorithmChoice
from gradus.config.schema.base import StrictConfig
from gradus.config.schema.environment import TaskSelectionConfig
from gradus.config.schema.eval import EvalConfig
from gradus.config.schema.inference import InferenceConfig
from gradus.config.schema.model import ModelConfig
from gradus.config.schema.monitor import MonitorChoice
from gradus.config.schema.run import RunConfig
from gradus.config.schema.sft import SftConfig
from gradus.config.schema.trainer import data_parallel_size
from gradus.config.sources import EvaluationSourceConfig, SourceConfig, are_references_served
from gradus.run.paths import Purpose, environment_process

_LONGEST_SLEEP_SECONDS = 14_400.0
"""How long the engine leaves a shared GPU to one step; then it wakes by itself."""
EVERY_ROLE = "*"
"""Key of what the config says of the seats: of every role, and of each that it names."""


class ProcessConfig(StrictConfig):
    """Where a process belongs."""

    run_dir: str
    """The run directory, where it finds tokens, ready files and its peers."""
    term: int
    """Term of the run's lease; 0 when started by hand."""


class _WorkingConfig(ProcessConfig):
    """Of a process that works on what was launched."""

    evaluation_sources: list[EvaluationSourceConfig] = Field(default_factory=list)
    """The evaluated environments."""
    identity: dict[str, Any] = Field(default_factory=dict)
    """What may not change when evaluations are resumed."""
    resume_step: int | None = Field(None, exclude=True)
    """Step of the checkpoint to continue from, given at the start. None means to start fresh."""


class RunProcessConfig(RunConfig, _WorkingConfig):
    """Everything the trainer, the orchestrator and the replayer of an RL run need."""

    sources: list[SourceConfig]
    """The train sources."""
    recorded: str | None = None
    """Run directory of the run that is replayed. None means that episodes are played."""
    num_steps: int | None = None
    """Steps after which a replay ends, while schedules go by `max_steps`. None means all."""

    @property
    def end_step(self) -> int:
        return self.max_steps if self.num_steps is None else self.num_steps

    @property
    def data_parallel_size(self) -> int:
        return data_parallel_size(self.trainer.num_processes, self.trainer.parallel)

    @property
    def keep_published(self) -> int:
        """The version that is served, for a server or an orchestrator that starts again, and the
        `max_lag` + 1 by which the trainer may be ahead while an evaluation holds it back."""
        return self.orchestrator.max_lag + 2

    @property
    def engine_sleep_seconds(self) -> float | None:
        """Longest that the engine sleeps for a step; None means that it stays awake."""
        takes_turns = self.recorded is None and self.inference.gpu_sharing == "turns"
        return _LONGEST_SLEEP_SECONDS if takes_turns else None

    @property
    def is_trainer_replaceable(self) -> bool:
        """Whether a trainer can be started again while the other processes stay: there is a
        checkpoint to start from, and no engine that waits for the process itself."""
        is_waited_for = self.trainer.weight_transfer == "broadcast" or self.engine_sleep_seconds
        return self.checkpoint.is_on and self.recorded is None and not is_waited_for

    @property
    def is_orchestrator_replaceable(self) -> bool:
        """The same of the orchestrator, which notes where it stands."""
        return self.checkpoint.is_on and self.recorded is None

    @property
    def is_reference_served(self) -> bool:
        """Whether batches bring the reference logprobs that the loss needs."""
        return are_references_served(source.algo for source in self.sources)

    @property
    def environment_restart_seconds(self) -> float:
        """How long the launcher may take to restart an environment process; 0 means never."""
        return self.launch.ready_timeout_seconds if self.launch.environment_restarts else 0.0


class SftProcessConfig(SftConfig, _WorkingConfig):
    """Everything the trainer and the evaluator of a supervised run need."""


class EvalProcessConfig(EvalConfig, _WorkingConfig):
    """Everything a stand-alone evaluation needs."""


WorkingConfig: TypeAlias = RunProcessConfig | SftProcessConfig | EvalProcessConfig


class TrackerProcessConfig(ProcessConfig):
    """Everything that sends a run to its trackers."""

    monitor: list[MonitorChoice]
    """The trackers."""


class InferenceProcessConfig(ProcessConfig):
    """Everything one inference server needs."""

    model: ModelConfig
    """Weights of version 0."""
    seed: int
    """Seed of the engine."""
    lora_rank: int | None = None
    """Rank of the adapters that are served beside the model. None means whole weights."""
    broadcast_backend: Literal["nccl", "gloo"] = "gloo"
    """What carries weights that are broadcast."""
    tells_experts: bool = False
    """Whether replies say which experts computed their tokens."""
    awaits_version: bool = False
    """Whether it answers nobody before it was told which version it serves."""
    inference: InferenceConfig
    """The inference server's own section."""
    process: str = Field("inference", pattern=r"^[A-Za-z0-9_][\w.-]{0,63}$")
    """Name of the process."""
    certificate: str | None = None
    """A file (PEM) with a certificate and its key, with which the server speaks HTTPS."""


class EnvironmentProcessConfig(ProcessConfig):
    """Everything one environment process needs."""

    name: str
    """Name of the source."""
    python: str | None = None
    """Its interpreter. None means that of the launch."""
    number: int = 0
    """Which of the source's processes it is, from 0."""
    num_threads: int = 32
    """Plain functions of the environment that it runs at once."""
    max_tool_servers: int = 8
    """Tool servers of single episodes that it runs at once."""
    verifiers: dict[str, Any]
    """verifiers' own EnvConfig, as a dict: taskset, settings, timeouts. EVERY_ROLE holds what the
    config says of the seats; only the environment knows its roles."""
    tasks: TaskSelectionConfig = TaskSelectionConfig()
    """Which tasks of the taskset are served."""
    env_var_names: list[str] = Field(default_factory=list)
    """Names of the source's `env_vars` and `pass_env`; the launcher sets their values, and no other
    variable of the caller reaches the environment's code."""
    passed_env: list[str] = Field(default_factory=list)
    """Those of them that must be in the caller's shell."""
    inherited_env: list[str] = Field(default_factory=list)
    """Those of them that programs of the environment inherit; the others only its own code reads,
    by name."""
    headers_from: str | None = None
    """Field of a task's data with headers for its model requests."""
    reads_images: bool = False
    """Whether the policy does."""
    warm_containers: int = 0
    """How many containers it starts ahead."""
    prepare: list[str] = Field(default_factory=list)
    """Command that runs once in a term before the environment is loaded; empty means none."""
    prepare_seconds: float = 300.0
    """Its deadline."""
    purpose: Purpose = "train"
    """Decides the names of the process and of its log."""
    algo: AlgorithmChoice | None = None
    """What learns from the episodes; the process refuses agents that it cannot learn from. None
    means that nothing does."""
    untrained_agents: list[str] = Field(default_factory=list)
    """Agents whose traces never train."""

    @property
    def process(self) -> str:
        return environment_process(self.name, self.purpose, self.number)

    @property
    def asks_by_text(self) -> str:
        """The algorithm, where it asks a model that would see none of the images; or empty."""
        algo = self.algo
        return algo.type if algo and (algo.reference or not algo.gives_advantages) else ""
