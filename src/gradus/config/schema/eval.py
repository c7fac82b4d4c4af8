"""The config of `gradus eval`."""

from __future__ import annotations

from pydantic import Field

from gradus.config.schema.algorithms import URL_PATTERN
from gradus.config.schema.base import Seed, StrictConfig
from gradus.config.schema.environment import NAME_PATTERN, EvalEnvironmentConfig
from gradus.config.schema.inference import InferenceConfig, SamplingConfig
from gradus.config.schema.model import ModelConfig
from gradus.config.schema.monitor import LogConfig, MonitorChoice
from gradus.config.schema.run import LaunchConfig, SlurmConfig


class EvalConfig(StrictConfig):
    """One evaluation of a model directory, or of a model behind an endpoint."""

    name: str | None = Field(None, pattern=NAME_PATTERN)
    """Name of the evaluation. None means `<envs>--<model>--<8 hex>`; --resume needs one."""
    output_dir: str = "runs"
    """Folder that holds the evaluation's folder."""
    model: ModelConfig
    """The model: a directory that gradus serves, or with base_url its name at the endpoint."""
    base_url: str | None = Field(None, pattern=URL_PATTERN)
    """An OpenAI-compatible endpoint, e.g. "http://host:8000/v1". None means gradus serves."""
    api_key_var: str | None = None
    """Name of the environment variable that holds the endpoint's key. None means no key."""
    env: list[EvalEnvironmentConfig] = Field(min_length=1)
    """The environments; each runs in its own process."""
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, top_p=1.0, max_completion_tokens=512)
    """Sampling of every environment that does not say otherwise."""
    max_in_flight_episodes: int = Field(64, ge=1)
    """Most episodes that run at once."""
    show_replies: int = Field(0, ge=0, le=50)
    """How many replies are printed at the end, those with the least reward, of different tasks:
    look at them before you train on a reward that stays flat."""
    max_retries: int = Field(2, ge=0)
    """Times that an episode is played again after an error that may pass."""
    inference: InferenceConfig = InferenceConfig()
    """Serving, when there is no base_url."""
    monitor: list[MonitorChoice] = Field(default_factory=list)
    """Trackers that get the numbers of the run, besides `metrics.jsonl` in its folder."""
    log: LogConfig = LogConfig()
    """What the processes write into `logs/`."""
    launch: LaunchConfig = LaunchConfig()
    """Starting and stopping."""
    slurm: SlurmConfig = SlurmConfig()
    """What `gradus eval --slurm` asks for."""
    seed: Seed = 0
    """Seed of the engine that gradus starts."""
