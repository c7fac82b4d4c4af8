"""The root of what the user writes for `gradus rl`; shared values are stated once, here."""

from __future__ import annotations

from pydantic import Field

from gradus.config.base import StrictConfig
from gradus.config.checkpoint import CheckpointConfig
from gradus.config.environment import NAME_PATTERN
from gradus.config.inference import InferenceConfig
from gradus.config.model import ModelConfig
from gradus.config.orchestrator import OrchestratorConfig
from gradus.config.trainer import TrainerConfig


class LaunchConfig(StrictConfig):
    """How the processes are started and stopped."""

    ready_timeout_seconds: float = Field(600.0, gt=0)
    """Deadline for each process to become ready."""
    stop_timeout_seconds: float = Field(8.0, gt=0)
    """Time for processes to end by themselves before they are killed."""
    save_timeout_seconds: float = Field(20.0, ge=0)
    """How long SIGTERM waits for a checkpoint before processes are stopped; with the stop it should
    fit into the grace time of whoever sends the signal, 30 s for SLURM and Kubernetes."""
    silent_process_seconds: float = Field(300.0, gt=0)
    """How long a process may be stopped by a signal, or an event loop stand still, before the run
    ends. The console names it within a minute. Environments that are started anew do not count."""
    environment_restarts: int = Field(3, ge=0)
    """How often within an hour the process of an environment may be started anew after it failed in
    an RL run."""


class RunConfig(StrictConfig):
    """One reinforcement-learning run."""

    name: str | None = Field(None, pattern=NAME_PATTERN)
    """Name of the run. None means `<envs>--<model>--<8 hex>`."""
    output_dir: str = "runs"
    """Folder that holds the run's folder."""
    model: ModelConfig
    """The policy, shared by trainer and inference."""
    max_steps: int = Field(ge=1)
    """Optimizer updates of the run."""
    seed: int = 0
    """Seed of task order, sampling and initialisation."""
    orchestrator: OrchestratorConfig
    """Episodes and batches."""
    trainer: TrainerConfig = TrainerConfig()
    """Learning."""
    inference: InferenceConfig = InferenceConfig()
    """Serving."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving what a restart needs."""
    launch: LaunchConfig = LaunchConfig()
    """Starting and stopping."""
