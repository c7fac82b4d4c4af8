"""What the orchestrator plays, which samples it keeps, and how it makes batches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, Tag

from gradus.config.schema.algorithms import AlgorithmChoice, GrpoConfig
from gradus.config.schema.base import (
    OWN_PLUGIN,
    OwnPlugin,
    PluginConfig,
    StrictConfig,
    by_type,
    number_or,
)
from gradus.config.schema.environment import (
    NAME_PATTERN,
    EvalSourcesConfig,
    TrainEnvironmentConfig,
)
from gradus.config.schema.inference import SamplingConfig


class WatchdogConfig(StrictConfig):
    """Reports who waits for whom when nothing moved for a while."""

    stall_seconds: float = Field(1800.0, gt=0)
    """How long no episode, token, batch or version may come before the run counts as stalled."""
    action: Literal["warn", "end"] = "end"
    """`end` fails with exit code 75 and the chain of waits as its cause, and the run starts again
    as `launch.restarts` allows; `warn` reports and continues, and reports again after the same
    time."""


Share = Annotated[float | Literal["off"], number_or("off", most=1)]
"""Threshold of an alarm on a share."""


class HealthConfig(StrictConfig):
    """Thresholds of the alarms, each a number or "off"; docs/monitoring.md says what they measure
    and what to do."""

    reward_part: Share = 0.9
    """Share of one part of the reward in its variance, while another part falls."""
    length_drift: Annotated[float | Literal["off"], number_or("off", above=1)] = 4.0
    """Factor by which episodes became longer or shorter than in the first steps."""
    entropy_collapse: Share = 0.1
    """Entropy over that of the first steps; the alarm is on below it."""
    judge_flips: Share = 0.3
    """Share of judgements that change with the order of the sides."""
    unreadable: Share = 0.5
    """Share of turns that the environment could not read or quarantined."""
    mismatch_kl: Annotated[float | Literal["off"], number_or("off")] = 0.1
    """KL between engine and trainer on the same tokens, nats per token."""
    flat_groups: Share = 0.95
    """Share of the episodes in groups with equal rewards."""
    failing_episodes: Share = 0.5
    """Share of the episodes that end with an error."""
    truncated: Share = 0.5
    """Share of the episodes that a limit cut short."""
    reward_drop: Share = 0.5
    """Share of the best mean reward that was lost since."""
    gradient_jump: Annotated[float | Literal["off"], number_or("off", above=1)] = 100.0
    """Norm of the gradient over that of the first steps."""
    dropped_episodes: Share = 0.95
    """Share of the episodes that train nothing although they ended well."""
    large_ratios: Annotated[float | Literal["off"], number_or("off", above=1)] = 10.0
    """95th percentile of the ratio of policy to sampling probability."""
    slow_tasks: Share = 0.25
    """How much less often slow tasks train than all; 1 means never."""
    echo_tokens: Annotated[float | Literal["off"], number_or("off")] = 1.0
    """Observed tokens of a group that `echo` learns; the alarm is on below it."""


class AlarmConfig(StrictConfig):
    """An alarm of one's own on any number of the records; docs/metrics.md lists them."""

    name: str
    """What lines, records (`alarm/<name>`) and trackers call it."""
    metric: str = Field(min_length=1)
    """The number, e.g. "loss/entropy/mean"; "alarm/<alarm>/value" gives one of the built-in alarms
    an action."""
    rule: Literal["level", "drift", "drop", "difference"] = "level"
    """What is compared: the mean of the last steps; that over the mean of the first ten; how far it
    fell from its best; or how much it is above `minus`."""
    minus: str | None = None
    """The number that a `difference` takes off."""
    above: float | None = Field(None, allow_inf_nan=False)
    """The alarm is on at or above it. Either this or `below`."""
    below: float | None = Field(None, allow_inf_nan=False)
    """The alarm is on at or below it."""
    steps: int = Field(10, ge=1)
    """Steps whose mean is compared; with 1 it may ring at the first."""
    action: Literal["warn", "checkpoint", "stop"] = "warn"
    """What follows the line: nothing, a checkpoint after the present step, or the end of the run
    with outcome `alarmed`, all saved; `--resume` continues it."""

    def problems(self, *, saves: bool) -> Iterator[tuple[str, str]]:
        """Key and message of each problem; `saves` says whether the run writes checkpoints."""
        if re.fullmatch(NAME_PATTERN, self.name) is None:
            yield "name", f"{self.name!r}: use letters, digits, '.', '_' or '-', at most 64"
        if (self.above is None) == (self.below is None):
            yield "above", "give exactly one of above and below"
        if (self.rule == "difference") != (self.minus is not None):
            yield "minus", 'belongs to rule = "difference", which needs it'
        if self.rule == "drop" and not (self.above or 0) > 0:
            yield "above", 'a "drop" is measured from the best and needs above, more than 0'
        if self.action == "checkpoint" and not saves:
            yield "action", "the run saves no checkpoints; set checkpoint.interval_minutes"


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
    watchdog: WatchdogConfig = WatchdogConfig()
    """What happens when the run stands still."""
    alarm: list[AlarmConfig] = Field(default_factory=list)
    """Alarms of one's own, beside those of `health`."""
    health: HealthConfig = HealthConfig()
    """Alarms on a run that goes wrong although nothing fails."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the orchestrator process."""
