"""One source of episodes: an environment with its share, group size, sampling and algorithm."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gradus.config.algorithm import AlgorithmConfig
from gradus.config.base import StrictConfig
from gradus.config.curriculum import CurriculumConfig
from gradus.config.error_policy import ErrorPolicyConfig
from gradus.config.reference import URL_PATTERN
from gradus.config.sampling import SamplingConfig

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class StaticPoolConfig(StrictConfig):
    """A fixed number of worker processes."""

    type: Literal["static"] = "static"
    num_workers: int = Field(4, ge=1)
    """Worker processes of the environment."""
    max_tool_servers: int = Field(8, ge=1)
    """Tool servers of single episodes (`Task.toolsets`) that one worker runs at once; further
    episodes wait for one to end, at most `timeout.setup_seconds`."""


class ElasticPoolConfig(StrictConfig):
    """Workers are added when 90 % of workers x multiplex episodes are in flight."""

    type: Literal["elastic"] = "elastic"
    max_workers: int | None = Field(None, ge=1)
    """Most worker processes. None means no limit."""
    multiplex: int = Field(128, ge=1)
    """Episodes that one worker plays at once."""
    max_tool_servers: int = Field(8, ge=1)
    """As in a static pool."""


PoolConfig = Annotated[StaticPoolConfig | ElasticPoolConfig, Field(discriminator="type")]


class EnvironmentTimeoutConfig(StrictConfig):
    """Deadlines of one episode's stages, in seconds. None means no deadline of this stage."""

    setup_seconds: float | None = Field(120.0, gt=0)
    """Provisioning of the runtime, the task's setup, and the start of each tool server."""
    agent_seconds: float | None = Field(600.0, gt=0)
    """The agent's attempt, all turns."""
    finalize_seconds: float | None = Field(60.0, gt=0)
    """The task's finalize hook."""
    scoring_seconds: float | None = Field(120.0, gt=0)
    """Rewards and metrics."""
    episode_seconds: float = Field(900.0, gt=0)
    """The whole episode, seen from the orchestrator; after it the episode is cancelled."""


class HarnessChoice(StrictConfig):
    """The program that plays a seat, and its own settings."""

    id: str = "chat"
    """`chat` is the in-process loop of gradus; any verifiers harness works by its id."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Settings of that harness, passed through."""


class AgentRoleConfig(StrictConfig):
    """One role of a multi-agent environment. None means the value of the source."""

    harness: HarnessChoice | None = None
    """The role's program."""
    model: str | None = None
    """Another model behind `base_url`. None means the trained policy."""
    base_url: str | None = Field(None, pattern=URL_PATTERN)
    """Endpoint of that model, e.g. "http://host:8000/v1"."""
    api_key_var: str | None = None
    """Name of the environment variable that holds the endpoint's key."""
    sampling: SamplingConfig | None = None
    """The role's sampling."""
    max_turns: int | None = Field(None, ge=1)
    """Most model turns of the role."""
    train: bool | None = None
    """Whether the role's traces train, or count in an evaluation. None means that they do, unless
    the role is named `judge` or another model plays it beside the policy."""


class EnvironmentConfig(StrictConfig):
    """One environment process and how the orchestrator uses it."""

    id: str
    """Name of an installed verifiers taskset or environment, e.g. "gradus-reverse-text". Left out,
    it is `taskset.id`."""
    name: str | None = Field(None, pattern=NAME_PATTERN)
    """Name in metrics and logs. None means the id; give one when an id appears twice."""
    taskset: dict[str, Any] = Field(default_factory=dict)
    """Settings of the taskset, passed through."""
    harness: HarnessChoice = HarnessChoice()
    """The program that plays the policy's seat."""
    runtime: dict[str, Any] = Field(default_factory=lambda: {"type": "subprocess"})
    """Where tools and programs of an episode run, verifiers' runtime config."""
    agents: dict[str, AgentRoleConfig] = Field(default_factory=dict)
    """Settings per role of a multi-agent environment. A role that is not named has those of the
    source, except what the environment's author set."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the environment beside its roles and its taskset, passed through, e.g. {n = 4}
    for best-of-n."""
    pool: PoolConfig = ElasticPoolConfig()
    """Worker processes."""
    address: str | None = None
    """Address of an environment server that you run yourself. None means gradus starts one."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of this source; unset values come from the enclosing section."""
    timeout: EnvironmentTimeoutConfig = EnvironmentTimeoutConfig()
    """Deadlines of an episode."""
    max_turns: int | None = Field(None, ge=1)
    """Most model turns of one episode. None means no limit."""
    max_input_tokens: int | None = Field(None, ge=1)
    """Most input tokens of one agent run. None means no limit."""
    max_output_tokens: int | None = Field(None, ge=1)
    """Most sampled tokens of one agent run. None means no limit."""
    max_total_tokens: int | None = Field(None, ge=1)
    """Most tokens of one agent run. None means no limit."""
    errors: ErrorPolicyConfig = ErrorPolicyConfig()
    """Which failed episodes are played again."""
    state_columns: list[str] = Field(default_factory=list)
    """Keys of a trace's info that its record keeps up to 1 MiB; the others share 64 KiB."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of this environment's process, with their values."""
    pass_env: list[str] = Field(default_factory=list)
    """Names of variables of your shell that this environment gets too, such as keys; the config and
    the logs never hold their values. Programs that the environment starts see them as well."""

    @property
    def unique_name(self) -> str:
        """The name in metrics, logs and files."""
        return self.name or self.id.rsplit("/", 1)[-1].split("@", 1)[0]


class TrainEnvironmentConfig(EnvironmentConfig):
    """An environment whose episodes train the policy."""

    ratio: float = Field(1.0, gt=0)
    """Share of groups drawn from this source, relative to the other sources."""
    group_size: int = Field(8, ge=1)
    """Episodes per task."""
    algo: AlgorithmConfig | None = None
    """Credit and loss components. None means the enclosing section's."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Order of the source's tasks."""
