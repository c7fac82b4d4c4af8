"""The config of one process, derived by `resolve.py`; never written by hand.

Each process is started as `gradus <role> @ <run_dir>/config/<file>.json` and finds tokens, ready
files and peers through the run directory.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gradus.config.schema.algorithms import AlgorithmChoice
from gradus.config.schema.base import StrictConfig
from gradus.config.schema.environment import (
    CurriculumChoice,
    EnvironmentConfig,
    EnvironmentTimeoutConfig,
    ErrorPolicyConfig,
    PoolConfig,
    SftEvalConfig,
    TaskSelectionConfig,
    UniformConfig,
)
from gradus.config.schema.inference import InferenceConfig, SamplingConfig
from gradus.config.schema.model import ModelConfig
from gradus.config.schema.monitor import MonitorChoice
from gradus.config.schema.orchestrator import OrchestratorConfig
from gradus.config.schema.run import CheckpointConfig
from gradus.config.schema.sft import SftConfig
from gradus.config.schema.trainer import TrainerConfig

__all__ = [
    "EnvironmentConfig",
    "EnvironmentProcessConfig",
    "EvaluationSourceConfig",
    "EvaluatorProcessConfig",
    "InferenceProcessConfig",
    "OrchestratorProcessConfig",
    "ReplayProcessConfig",
    "SftEvaluatorProcessConfig",
    "SftProcessConfig",
    "SourceConfig",
    "TrackerProcessConfig",
    "TrainerProcessConfig",
    "environment_process",
]


class TrainerProcessConfig(StrictConfig):
    """Everything the trainer needs."""

    run_dir: str
    """The run directory."""
    term: int
    """Term of the run's lease; 0 when started by hand."""
    model: ModelConfig
    """Initial weights."""
    max_steps: int
    """Optimizer updates."""
    seed: int
    """Seed of initialisation."""
    num_inference_workers: int = 1
    """Processes that receive broadcast weights."""
    engine_sleep_seconds: float | None = None
    """Longest that the engine sleeps for a step of this trainer. None means that it stays awake."""
    is_reference_served: bool = False
    """Whether batches bring the reference logprobs that the loss needs."""
    trainer: TrainerConfig
    """The trainer's own section."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save."""
    resume_step: int | None = None
    """Step of the checkpoint to go on from. None means to start fresh."""
    num_steps: int | None = None
    """Steps after which a replay ends, while schedules go by `max_steps`. None means all."""

    @property
    def end_step(self) -> int:
        """The step before which training ends."""
        return self.max_steps if self.num_steps is None else self.num_steps


class TrackerProcessConfig(StrictConfig):
    """Everything that sends a run to its trackers."""

    run_dir: str
    """The run directory, which holds all that is sent."""
    term: int
    """Term of the run's lease."""
    monitor: list[MonitorChoice]
    """The trackers."""


class InferenceProcessConfig(StrictConfig):
    """Everything one inference server needs."""

    run_dir: str
    """The run directory."""
    term: int
    """Term of the run's lease; 0 when started by hand."""
    model: ModelConfig
    """Weights of version 0."""
    seed: int
    """Seed of the engine."""
    lora_rank: int | None = None
    """Rank of the adapters that are served beside the model. None means whole weights."""
    broadcast_backend: Literal["nccl", "gloo"] = "gloo"
    """What carries weights that are broadcast."""
    inference: InferenceConfig
    """The inference server's own section."""


EVERY_ROLE = "*"
"""Key of what the config says of the seats: of every role, and of each that it names."""

Purpose = Literal["train", "eval"]
"""What the episodes of a source are for."""


def environment_process(source: str, purpose: Purpose = "train") -> str:
    """Name of the process that plays a source."""
    return f"env_{source}" if purpose == "train" else f"eval_{source}"


class EnvironmentProcessConfig(StrictConfig):
    """Everything one environment process needs."""

    run_dir: str
    """The run directory."""
    term: int
    """Term of the run's lease; 0 when started by hand."""
    name: str
    """Name of the source."""
    pool: PoolConfig
    """Worker processes."""
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
        """Name of the process."""
        return environment_process(self.name, self.purpose)


class SourceConfig(StrictConfig):
    """One source as the orchestrator sees it, nothing left to inherit."""

    name: str
    """Unique name of the source."""
    ratio: float
    """Relative share of groups."""
    group_size: int
    """Episodes per task."""
    sampling: SamplingConfig
    """Complete sampling settings."""
    algo: AlgorithmChoice
    """Complete algorithm settings."""
    timeout: EnvironmentTimeoutConfig
    """Deadlines."""
    address: str | None
    """User-managed environment server. None means the run's own, found by its ready file."""
    state_columns: list[str]
    """Keys of the trace's info kept in records."""
    untrained_agents: list[str] = Field(default_factory=list)
    """Agents whose traces never train."""
    curriculum: CurriculumChoice = UniformConfig()
    """Order of the tasks."""
    errors: ErrorPolicyConfig = ErrorPolicyConfig()
    """Which failed episodes are played again."""
    is_frozen: bool = False
    """Whether no seat is played by the policy, so that its episodes never become stale."""


class EvaluationSourceConfig(StrictConfig):
    """One evaluated environment, nothing left to inherit."""

    name: str
    """Unique name among the evaluated environments."""
    num_tasks: int | None
    """Tasks to play, from the first. None means all."""
    group_size: int
    """Episodes per task."""
    sampling: SamplingConfig
    """Complete sampling settings."""
    timeout: EnvironmentTimeoutConfig
    """Deadlines."""
    address: str | None
    """User-managed environment server. None means the run's own, found by its ready file."""
    state_columns: list[str]
    """Keys of the trace's info kept in records."""
    unmeasured_agents: list[str] = Field(default_factory=list)
    """Agents whose traces say nothing about the policy."""
    errors: ErrorPolicyConfig = ErrorPolicyConfig()
    """What happens to failed episodes."""


class EvaluatorProcessConfig(StrictConfig):
    """Everything a stand-alone evaluation needs."""

    run_dir: str
    """The run directory."""
    term: int
    """Term of the run's lease."""
    model: ModelConfig
    """The evaluated model."""
    base_url: str | None
    """Endpoint that serves it. None means the run's own inference server."""
    api_key_var: str | None
    """Variable of the environment processes that holds the endpoint's key."""
    sources: list[EvaluationSourceConfig]
    """What is played."""
    max_in_flight_episodes: int
    """Most episodes at once."""
    identity: dict[str, Any]
    """What may not change when the evaluation is resumed."""


class OrchestratorProcessConfig(StrictConfig):
    """Everything the orchestrator needs."""

    run_dir: str
    """The run directory."""
    term: int
    """Term of the run's lease; 0 when started by hand."""
    model: ModelConfig
    """For the renderer and the longest sample."""
    max_steps: int
    """Batches to make."""
    seed: int
    """Seed of the task order."""
    sources: list[SourceConfig]
    """The train sources."""
    evaluation_sources: list[EvaluationSourceConfig] = Field(default_factory=list)
    """The evaluated environments."""
    orchestrator: OrchestratorConfig
    """The orchestrator's own section."""
    data_parallel_size: int
    """Ranks that each batch is packed for."""
    micro_batch_tokens: int
    """Most tokens of one micro batch."""
    updates_per_batch: int = 1
    """Parts of each batch that the trainer learns one after the other."""
    environment_restart_seconds: float = 0.0
    """How long the launcher may take to start an environment process anew; 0 means never."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save, and what to keep."""
    resume_step: int | None = None
    """Step of the checkpoint to go on from. None means to start fresh."""


class ReplayProcessConfig(StrictConfig):
    """Everything the process needs that sends recorded batches to the trainer."""

    run_dir: str
    """The run directory of the replay."""
    term: int
    """Term of the run's lease."""
    recorded: str
    """The run directory of the recorded run."""
    num_steps: int
    """Steps to replay."""
    orchestrator: OrchestratorProcessConfig
    """The orchestrator of the recorded run, with the layout of this trainer."""


class SftProcessConfig(StrictConfig):
    """Everything the supervised trainer needs."""

    run_dir: str
    """The run directory."""
    term: int
    """Term of the run's lease; 0 when started by hand."""
    sft: SftConfig
    """The user's config."""
    resume_step: int | None = None
    """Step of the checkpoint to go on from. None means to start fresh."""


class SftEvaluatorProcessConfig(StrictConfig):
    """Everything the evaluations of a supervised run need."""

    run_dir: str
    """The run directory."""
    term: int
    """Term of the run's lease."""
    model: ModelConfig
    """Weights of version 0, and the renderer of all versions."""
    max_steps: int
    """Optimizer updates of the run; the last version has this number."""
    evaluation_sources: list[EvaluationSourceConfig]
    """What is played."""
    eval: SftEvalConfig
    """The user's section."""
    identity: dict[str, Any]
    """What may not change when the run is resumed."""
    resume_step: int | None = None
    """Step of the checkpoint to go on from. None means to start fresh."""
