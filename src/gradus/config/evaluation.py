"""What an evaluation plays: tasks of some environments, several episodes of each."""

from __future__ import annotations

from pydantic import Field

from gradus.config.base import StrictConfig
from gradus.config.environment import EnvironmentConfig
from gradus.config.sampling import SamplingConfig


class EvalEnvironmentConfig(EnvironmentConfig):
    """An environment whose episodes measure the policy and never train it."""

    num_tasks: int | None = Field(None, ge=1)
    """How many of its tasks, from the first. None means all; an endless taskset needs a number."""
    group_size: int = Field(1, ge=1)
    """Episodes per task; the k of avg@k, and the largest k of pass@k and pass^k."""


class EvalSourcesConfig(StrictConfig):
    """Evaluations during a run, each of exactly one policy version."""

    env: list[EvalEnvironmentConfig] = Field(min_length=1)
    """The environments, each in a process of its own."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of every evaluated environment that does not say otherwise; unset values are those
    of orchestrator.train.sampling."""
    interval_steps: int = Field(20, ge=1)
    """Evaluate each version that is a multiple of this."""
    base_model_first: bool = True
    """Evaluate version 0, the weights that the run starts with."""
    at_end: bool = True
    """Evaluate the last version."""
    max_in_flight_episodes: int = Field(128, ge=1)
    """Most episodes of an evaluation that run at once, beside those that train."""
    max_retries: int = Field(2, ge=0)
    """Times that an episode is played again after an error that may pass."""
    timeout_seconds: float = Field(1200.0, gt=0)
    """Deadline of one evaluation; episodes that still run then count as errors. New weights wait
    for its end, so it must be shorter than trainer.receive_timeout_seconds."""


class SftEvalConfig(EvalSourcesConfig):
    """Evaluations during supervised training, each of exactly one version; training goes on."""

    sampling: SamplingConfig = SamplingConfig(temperature=1.0, top_p=1.0, max_completion_tokens=512)
    """Sampling of every evaluated environment that does not say otherwise."""
    max_in_flight_episodes: int = Field(128, ge=1)
    """Most episodes of an evaluation that run at once."""
    timeout_seconds: float = Field(1200.0, gt=0)
    """Deadline of one evaluation; episodes that still run then count as errors."""
    apply_timeout_seconds: float = Field(120.0, gt=0)
    """Deadline for inference to apply a published version."""

    def is_due(self, version: int, *, max_steps: int) -> bool:
        """Whether a run of `max_steps` steps evaluates `version`."""
        if version == 0:
            return self.base_model_first
        is_last = version == max_steps and self.at_end
        return is_last or version % self.interval_steps == 0
