"""What the orchestrator plays, which samples it keeps, and how it makes batches."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, Tag, field_validator, model_validator

from gradus.config.schema.algorithms import AlgorithmChoice, GrpoConfig
from gradus.config.schema.base import (
    OWN_PLUGIN,
    OwnPlugin,
    PluginConfig,
    StrictConfig,
    by_type,
)
from gradus.config.schema.environment import EvalSourcesConfig, TrainEnvironmentConfig
from gradus.config.schema.inference import SamplingConfig
from gradus.run.settings import ALARM_THRESHOLDS


class AlarmConfig(StrictConfig):
    """An alarm of one's own on the mean of ten steps of a number; docs/metrics.md lists them."""

    metric: str = Field(min_length=1)
    """The number, e.g. "loss/entropy/mean"; "alarm/<alarm>/value" gives one of the built-in alarms
    an action or another threshold."""
    above: float | None = None
    """The alarm is on at or above it. Either this or `below`."""
    below: float | None = None
    """The alarm is on at or below it."""
    action: Literal["warn", "checkpoint", "stop"] = "warn"
    """What follows the line: nothing, a checkpoint after the present step, or the end of the run
    with outcome `alarmed`, all saved; `--resume` continues it."""

    @model_validator(mode="after")
    def _has_one_threshold(self) -> Self:
        if (self.above is None) == (self.below is None):
            raise ValueError("give exactly one of above and below")
        return self

    @property
    def name(self) -> str:
        """What lines, records (`alarm/<name>`) and trackers call it."""
        return self.metric.replace("/", ".")


class TrainSourcesConfig(StrictConfig):
    """The sources that train the policy, and the values that they share."""

    env: list[TrainEnvironmentConfig] = Field(min_length=1)
    """The sources, each an environment process."""
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, max_completion_tokens=512)
    """Sampling of every source that does not say otherwise."""
    algo: AlgorithmChoice = GrpoConfig()
    """Algorithm of every source that does not say otherwise."""


class FilterConfig(PluginConfig):
    """A verdict on finished samples."""

    enforce: bool = True
    """Drop what the filter does not keep; otherwise only count it and note it on the episode."""


class ZeroAdvantageConfig(FilterConfig):
    """Keeps samples that some advantage or other loss weight trains."""

    type: Literal["zero_advantage"] = "zero_advantage"
    implementation = "gradus.orchestrator.groups.filters:ZeroAdvantage"


class GibberishConfig(FilterConfig):
    """Does not keep a sample with a rare token that was very unlikely."""

    type: Literal["gibberish"] = "gibberish"
    implementation = "gradus.orchestrator.groups.filters:Gibberish"
    vocabulary_size: int | None = Field(None, ge=1)
    """V, in tokens. None means the model's vocabulary."""
    token_id: int = Field(100_000, ge=0)
    """Only tokens with a larger id count as rare."""
    logprob_offset: float = 2.0
    """Nats below -ln V that the logprob of a rare token must lie."""


class RepetitionConfig(FilterConfig):
    """Does not keep a sample with a long run of tokens that were almost certain."""

    type: Literal["repetition"] = "repetition"
    implementation = "gradus.orchestrator.groups.filters:Repetition"
    tokens: int = Field(3_000, ge=1)
    """Length in tokens of a run that counts as repetition."""
    probability: float = Field(0.99, gt=0, lt=1)
    """Each token of the run was sampled above it."""


class OwnFilterConfig(OwnPlugin, FilterConfig):
    """A filter of your own."""


FilterChoice = Annotated[
    Annotated[ZeroAdvantageConfig, Tag("zero_advantage")]
    | Annotated[GibberishConfig, Tag("gibberish")]
    | Annotated[RepetitionConfig, Tag("repetition")]
    | Annotated[OwnFilterConfig, Tag(OWN_PLUGIN)],
    by_type(None),
]
"""Every filter, by its `type`."""

DEFAULT_FILTERS: tuple[FilterChoice, ...] = (
    GibberishConfig(enforce=False),
    RepetitionConfig(enforce=False),
    ZeroAdvantageConfig(),
)


class OrchestratorConfig(StrictConfig):
    """Scheduling, staleness and batches."""

    train: TrainSourcesConfig
    """What trains."""
    eval: EvalSourcesConfig | None = None
    """What measures the policy. None means no evaluation."""
    groups_per_batch: int = Field(16, ge=1)
    """Groups whose samples make one batch."""
    max_lag: int = Field(1, ge=0)
    """Batches that the orchestrator may run ahead of the trainer; 0 means synchronous."""
    max_staleness: int = Field(8, ge=0)
    """Samples older than this many versions when they would train are dropped."""
    max_in_flight_episodes: int = Field(256, ge=1)
    """Most episodes that run at once."""
    min_in_flight_episodes: int = Field(1, ge=1)
    """Fewest episodes that the limit may fall to; the same as the most fixes the limit. It begins
    with as many episodes of full length as the KV cache holds, and follows the engine's load."""
    max_episodes_per_minute: int | None = Field(None, ge=1)
    """Most training episodes that start in a minute, spread evenly. None means no limit."""
    filters: list[FilterChoice] = Field(default_factory=lambda: list(DEFAULT_FILTERS))
    """Verdicts on finished samples, in order; the batch is refilled for what they drop."""
    normalize: Literal["off", "batch"] = "off"
    """`batch` divides the advantages of a batch by their standard deviation over its rl tokens."""
    max_empty_attempts: int = Field(3, ge=1)
    """Batches' worth of groups in a row of which nothing but errors came, after which the run ends.
    One whose groups only train nothing goes on for as many, and for 200 groups at least."""
    recording: bool = True
    """Keep every episode with its tokens, about 20 bytes per token, so that a replay can
    repeat the run."""
    keep_gib: float | None = Field(None, gt=0)
    """GiB that `replay/`, `tokens/` and `episodes/` of the run may take together. Above it, what a
    replay needs goes first, then what is kept of the oldest steps. None means that all is kept.
    Images count apart, up to 32 GiB, and stay."""
    stall_seconds: float = Field(1800.0, gt=0)
    """How long no episode, token, batch or version may come before the run fails with exit code 75
    and the chain of waits as its cause, and starts again as `launch.restarts` allows."""
    alarm: list[AlarmConfig] = Field(default_factory=list)
    """Alarms of one's own, beside the built-in ones."""
    quiet_alarms: list[str] = Field(default_factory=list)
    """Built-in alarms that measure nothing here; docs/monitoring.md lists them."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the orchestrator process."""

    @field_validator("quiet_alarms")
    @classmethod
    def _are_alarms(cls, names: list[str]) -> list[str]:
        for name in set(names) - ALARM_THRESHOLDS.keys():
            raise ValueError(f"{name!r} is no alarm; use {', '.join(ALARM_THRESHOLDS)}")
        return names
