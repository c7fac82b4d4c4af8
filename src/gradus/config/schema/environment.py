"""The sources that train or measure: an environment with its share, sampling and algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag, field_validator

from gradus.config.schema.algorithms import URL_PATTERN, AlgorithmChoice
from gradus.config.schema.base import OWN_PLUGIN, OwnPlugin, PluginConfig, StrictConfig, by_type
from gradus.config.schema.inference import SamplingConfig
from gradus.run.deadlines import APPLY_SECONDS, LONGEST_WAIT_SECONDS


class CurriculumConfig(PluginConfig):
    """The order of a source's tasks."""


class UniformConfig(CurriculumConfig):
    """Every task once in each pass, in a random order."""

    type: Literal["uniform"] = "uniform"
    implementation = "gradus.orchestrator.play.curriculum:Uniform"


class DifficultyConfig(CurriculumConfig):
    """Tasks in three pools by how often the policy solves them; most draws are of medium ones."""

    type: Literal["difficulty"] = "difficulty"
    implementation = "gradus.orchestrator.play.curriculum:Difficulty"
    easy_above: float = 0.9
    """Solve rate from which on a task is easy."""
    hard_below: float = 0.1
    """Solve rate up to which a task is hard."""
    easy_share: float = Field(0.05, ge=0, le=1)
    """Share of the groups drawn from the easy tasks."""
    hard_share: float = Field(0.1, ge=0, le=1)
    """Share of the groups drawn from the hard tasks."""
    reward_range: tuple[float, float] = Field((0.0, 1.0), strict=False)
    """Reward of a task that is never solved, and of one that always is."""
    drop_easy: bool = False
    """Never draw a task again once it is easy."""
    drop_hard: bool = False
    """Never draw a task again once it is hard; one group without a reward is enough where the
    threshold says so."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        given = self.model_fields_set
        low, high = self.hard_below, self.easy_above
        if low >= high:
            key = "hard_below" if "hard_below" in given else "easy_above"
            yield key, f"hard_below = {low:g} must be less than easy_above = {high:g}"
        easy, hard = self.easy_share, self.hard_share
        if easy + hard > 1:
            key = "hard_share" if "hard_share" in given else "easy_share"
            yield (
                key,
                f"easy_share = {easy:g} and hard_share = {hard:g} must not be more than 1 together",
            )
        if self.reward_range[0] >= self.reward_range[1]:
            yield "reward_range", f"{list(self.reward_range)} must begin with the smaller number"


class OwnCurriculumConfig(OwnPlugin, CurriculumConfig):
    """A curriculum of your own."""


CurriculumChoice = Annotated[
    Annotated[UniformConfig, Tag("uniform")]
    | Annotated[DifficultyConfig, Tag("difficulty")]
    | Annotated[OwnCurriculumConfig, Tag(OWN_PLUGIN)],
    by_type("uniform"),
]
"""Every curriculum, by its `type`."""


RETRIED_ERRORS = (
    "EnvironmentLost",
    "InterceptionError",
    "ProviderError",
    "SandboxError",
    "TunnelError",
    "UndecidedDebate",
    "invalid_episode",
    "invalid_tokens",
    "timeout",
    "episode_timeout",
)
"""Infrastructure, invalid answers of the model, of a judge or of the environment, and deadlines."""


class ErrorPolicyConfig(StrictConfig):
    """Errors on the list are tried again, unless a provider answered them with a 4xx other than 408
    and 429; every other error is recorded on the episode."""

    passing_statuses: ClassVar[tuple[int, ...]] = (408, 429)
    """Answers 4xx of a provider that may pass; any other comes again however often it is asked."""

    retry_on: list[str] = Field(default_factory=lambda: list(RETRIED_ERRORS))
    """Types of errors, as `error.type` of an episode's record names them."""
    retries: int = Field(2, ge=0)
    """How often the whole episode is played again after such an error."""
    backoff_seconds: float = Field(1.0, ge=0)
    """Wait before the first retry; doubled with each one, up to a minute."""


CHAT_HARNESS = "chat"
"""The harness that is a loop inside the environment's own process."""
ADDRESS_PATTERN = "^(tcp|ipc)://"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class EnvironmentTimeoutConfig(StrictConfig):
    """Deadline of an episode; those of its stages are the seats'."""

    episode_seconds: float = Field(900.0, gt=0)
    """The whole episode, seen from the orchestrator; after it the episode is cancelled."""


class SeatTimeoutConfig(StrictConfig):
    """Deadlines of a seat's stages, in seconds. "None" means no deadline of this stage."""

    setup: float | None = Field(None, gt=0)
    """Provisioning of the runtime, the task's setup, and the start of each tool server; 120 where
    nothing says otherwise."""
    rollout: float | None = Field(None, gt=0)
    """The attempt, all turns; 600 where nothing says otherwise."""
    finalize: float | None = Field(None, gt=0)
    """The task's finalize hook; 60 where nothing says otherwise."""
    scoring: float | None = Field(None, gt=0)
    """Rewards and metrics; 120 where nothing says otherwise."""


class SeatConfig(StrictConfig):
    """How a seat is played, in the words of verifiers' own agents."""

    harness: dict[str, Any] | None = None
    """The program that plays it, as {id = "...", further settings of that program}. None means
    `chat`, the in-process loop of gradus; any verifiers harness works by its id."""
    runtime: dict[str, Any] | None = None
    """Where tools and programs of an episode run, verifiers' runtime config. None means
    {type = "subprocess"}."""
    max_turns: int | None = Field(None, ge=1)
    """Most model turns. None means no limit."""
    max_input_tokens: int | None = Field(None, ge=1)
    """Most input tokens. None means no limit."""
    max_output_tokens: int | None = Field(None, ge=1)
    """Most sampled tokens. None means no limit."""
    max_total_tokens: int | None = Field(None, ge=1)
    """Most tokens. None means no limit."""
    timeout: SeatTimeoutConfig = SeatTimeoutConfig()
    """Deadlines."""


class RoleConfig(SeatConfig):
    """One role of an environment. None means what its author set, else the value of `agent`."""

    model: str | None = None
    """Another model behind `base_url`. None means the trained policy."""
    base_url: str | None = Field(None, pattern=URL_PATTERN)
    """Endpoint of that model, e.g. "http://host:8000/v1"."""
    api_key_var: str | None = None
    """Name of the environment variable that holds the endpoint's key."""
    sampling: SamplingConfig | None = None
    """The role's sampling."""
    train: bool | None = None
    """Whether the role's traces train, or count in an evaluation. None means that they do, unless
    the role is named `judge` or another model plays it; with algorithm "sft" what other models play
    is the data."""


class TaskSelectionConfig(StrictConfig):
    """Which tasks of its task set a source has, and in which order they are counted.

    What is held out of training is measured by an evaluation of the same task set with the same
    `holdout_fraction` and `holdout_seed`, and `side = "held_out"`.
    """

    include: list[str] = Field(default_factory=list)
    """Patterns of names or keys of tasks, e.g. ["easy-*"]; empty means all."""
    exclude: list[str] = Field(default_factory=list)
    """Patterns of names or keys of tasks that are left out."""
    holdout_fraction: float = Field(0.0, ge=0, le=1)
    """Share of the tasks that is held out, chosen by the hash of each task's key. A task's
    instruction does not count; its other settings do, and must be the same on both sides."""
    holdout_seed: int = Field(0, ge=0)
    """Another number holds other tasks out."""
    holdout_by: str | None = Field(None, min_length=1)
    """Field of the task's data by which tasks are held out, e.g. "word" or "info.topic": all tasks
    with one value, such as the variants of a word, are then on one side. None means each task."""
    side: Literal["train", "held_out"] = "train"
    """Which tasks the source has: those that are left, or those that are held out."""
    shuffle: int | None = Field(None, ge=0)
    """Seed of another order; matters with `limit` and with `num_tasks`. None keeps the task set's
    own."""
    limit: int | None = Field(None, ge=1)
    """Most tasks, after everything else; makes an endless task set end. None means all."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Keys that cannot go together: the key to change, and why."""
        if self.side == "held_out" and not self.holdout_fraction:
            yield "side", "'held_out' needs a holdout_fraction above 0, that of training"
        if self.holdout_by is not None and not self.holdout_fraction:
            yield "holdout_by", "needs a holdout_fraction above 0"
        if self.holdout_fraction == 1 and self.side == "train":
            yield "holdout_fraction", "1 leaves no task to train on; lower it"


class EnvironmentConfig(StrictConfig):
    """One environment, its processes, and how the orchestrator uses it."""

    id: str
    """Name of an installed verifiers taskset or environment, e.g. "gradus-reverse-text"; ours may
    be written without "gradus-". Left out, it is `taskset.id`."""
    name: str | None = Field(None, pattern=NAME_PATTERN)
    """Name in metrics and logs. None means the id; give one when an id appears twice."""
    taskset: dict[str, Any] = Field(default_factory=dict)
    """Settings of the taskset, passed through."""
    tasks: TaskSelectionConfig = TaskSelectionConfig()
    """Which of its tasks are played."""
    agent: SeatConfig = SeatConfig()
    """How every role is played for which neither `agents` nor the environment's author says it."""
    agents: dict[str, RoleConfig] = Field(default_factory=dict)
    """Settings per role of the environment. What is written here goes before what the environment's
    author set for the role, and that before `agent`; where there is one role, what is written for
    `agent` goes before the author too."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the environment beside its roles and its taskset, passed through, e.g. {n = 4}
    for best-of-n."""
    num_workers: int = Field(1, ge=1, le=256)
    """Processes that play this environment; each episode goes to the one with the fewest. One uses
    one core."""
    num_threads: int = Field(32, ge=1)
    """Rewards and other functions of yours without `async` that one process runs at once, each in
    a thread. 1 runs one after the other, for code that other threads would disturb."""
    max_tool_servers: int = Field(8, ge=1)
    """Tool servers of single episodes (`Task.toolsets`) that one process runs at once; further
    episodes wait for one to end, at most `agent.timeout.setup`."""
    address: str | None = Field(None, pattern=ADDRESS_PATTERN)
    """Address of an environment server that you run yourself, for evaluations alone. None means
    gradus starts one."""
    python: str | None = Field(None, min_length=1)
    """Interpreter that loads and plays this environment, e.g. "/home/me/openenv/bin/python": of a
    virtual environment of its own, with the same gradus. None means the one that runs gradus."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of this source; unset values come from the enclosing section."""
    timeout: EnvironmentTimeoutConfig = EnvironmentTimeoutConfig()
    """Deadline of an episode."""
    errors: ErrorPolicyConfig = ErrorPolicyConfig()
    """Which failed episodes are played again."""
    state_columns: list[str] = Field(default_factory=list)
    """Keys of a trace's info that its record keeps up to 1 MiB; the others share 64 KiB."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of this environment's process and of the programs that it starts, with
    their values; not for secrets."""
    pass_env: list[str] = Field(default_factory=list)
    """Names of variables of your shell that this environment's own code may read too, such as keys.
    Their values stand in no config and no log, and programs that the environment starts do not
    inherit them, except the command of `prepare`."""
    headers_from: str | None = Field(None, min_length=1)
    """Field of a task's data with a table of headers, such as a routing key, that are sent with the
    model requests of its episode. Only endpoints of others get them (`agents.<role>.base_url`, an
    evaluation's `base_url`). Not for secrets: records hold a task's data."""
    warm_containers: int = Field(0, ge=0, le=64)
    """Containers of docker or podman that each process keeps started, of each of the last four
    images and limits that its episodes had. An episode gets one that nobody used. 0 starts each
    with its episode."""
    prepare: list[str] = Field(default_factory=list)
    """Words of a command, e.g. ["make", "data"], that each launch runs once before it loads this
    environment: in the folder of the launch, without a shell, with `env_vars` and `pass_env`. Its
    output goes into the environment's log; unless it ends with 0 in half of
    `launch.ready_timeout_seconds`, nothing starts."""

    @property
    def seats(self) -> dict[tuple[str, ...], SeatConfig]:
        """Key → what is written of a seat."""
        return {
            ("agent",): self.agent,
            **{("agents", role): it for role, it in self.agents.items()},
        }

    owned_by_server: ClassVar[Mapping[str, str]] = {
        "tasks": "serves its own tasks",
        "warm_containers": "starts its containers",
        "python": "has the Python that you started",
        "headers_from": "sends its own requests",
        "prepare": "prepares itself",
    }
    """What an environment that you run yourself does instead of a key."""

    def address_problems(self, *, has_endpoint: bool) -> Iterator[tuple[str, str]]:
        """Keys that mean nothing to an environment that you run yourself, and that it plays with
        nobody; `has_endpoint` says that another endpoint serves all."""
        has_endpoint |= any(role.base_url for role in self.agents.values())
        if self.address is not None and not has_endpoint:
            yield (
                "address",
                f"{self.address!r}: a server that you run yourself knows no token of the run, so "
                "it cannot ask the policy that gradus serves; remove it (python names another "
                "interpreter), or give agents a base_url",
            )
        for key, does in self.owned_by_server.items() if self.address is not None else ():
            default = type(self).model_fields[key].get_default(call_default_factory=True)
            if getattr(self, key) != default:
                yield key, f"an environment that you run yourself {does}"

    def headers_problems(self, *, has_endpoint: bool) -> Iterator[tuple[str, str]]:
        """Why `headers_from` cannot be; `has_endpoint` says that another endpoint serves all."""
        has_endpoint |= any(role.base_url for role in self.agents.values())
        if self.headers_from is not None and self.address is None and not has_endpoint:
            yield (
                "headers_from",
                "no endpoint would get them: no agent has a base_url, and the policy that gradus "
                "serves is asked without headers",
            )

    @field_validator("prepare")
    @classmethod
    def _is_a_command(cls, words: list[str]) -> list[str]:
        if words and (not words[0] or any("\0" in word for word in words)):
            raise ValueError("must begin with a command, and no word may hold a NUL character")
        return words

    @property
    def unique_name(self) -> str:
        return self.name or self.id.rsplit("/", 1)[-1].split("@", 1)[0]


class TrainEnvironmentConfig(EnvironmentConfig):
    """An environment whose episodes train the policy."""

    ratio: float = Field(1.0, gt=0)
    """Share of groups drawn from this source, relative to the other sources."""
    group_size: int = Field(8, ge=1)
    """Episodes per task."""
    algo: AlgorithmChoice | None = None
    """Credit and loss components. None means the enclosing section's."""
    curriculum: CurriculumChoice = UniformConfig()
    """Order of the source's tasks."""


class EvalEnvironmentConfig(EnvironmentConfig):
    """An environment whose episodes measure the policy and never train it."""

    num_tasks: int | None = Field(None, ge=1)
    """How many of its tasks, from the first. None means all; an endless taskset needs a number."""
    group_size: int = Field(1, ge=1)
    """Episodes per task; the k of avg@k, and the largest k of pass@k and pass^k."""


class EvalSourcesConfig(StrictConfig):
    """Evaluations during a run, each of exactly one policy version."""

    env: list[EvalEnvironmentConfig] = Field(min_length=1)
    """The environments; each runs in its own process."""
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
    timeout_seconds: float = Field(1200.0, gt=0, lt=LONGEST_WAIT_SECONDS)
    """Deadline of one evaluation; episodes that still run then count as errors. New weights wait
    for its end."""

    def is_due(self, version: int, *, max_steps: int) -> bool:
        """Whether a run of `max_steps` steps evaluates `version`."""
        if version == 0:
            return self.base_model_first
        is_last = version == max_steps and self.at_end
        return is_last or version % self.interval_steps == 0

    def problems(self, max_steps: int) -> Iterator[tuple[str, str]]:
        """Why a run of so many steps never evaluates."""
        if not any(self.is_due(version, max_steps=max_steps) for version in range(max_steps + 1)):
            yield (
                "interval_steps",
                f"{self.interval_steps} is more than max_steps = {max_steps}, and "
                "base_model_first and at_end are off, so nothing is evaluated; lower it, or remove "
                "the section",
            )


class SftEvalConfig(EvalSourcesConfig):
    """Evaluations during supervised training, each of exactly one version; training continues."""

    sampling: SamplingConfig = SamplingConfig(temperature=1.0, top_p=1.0, max_completion_tokens=512)
    """Sampling of every evaluated environment that does not say otherwise."""
    max_in_flight_episodes: int = Field(128, ge=1)
    """Most episodes of an evaluation that run at once."""
    timeout_seconds: float = Field(1200.0, gt=0)
    """Deadline of one evaluation; episodes that still run then count as errors."""

    @property
    def longest_seconds(self) -> float:
        """What one evaluation may take, with its version's way into the engine."""
        return self.timeout_seconds + APPLY_SECONDS
