"""How rewards become advantages and loss weights: one config for each algorithm."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, Tag

from gradus.config.schema.base import (
    OWN_PATTERN,
    OWN_PLUGIN,
    OwnPlugin,
    PluginConfig,
    StrictConfig,
    by_type,
)

URL_PATTERN = "^https?://"
LEARNER_SEAT = "learner_seat"
"""Field of a task's data that names the one agent whose trace trains; absent or null, every agent
does."""

Weight = Annotated[float, Field(ge=0)]
LengthPart = Literal["output", "input", "turns"]
MessageRole = Literal["system", "user", "tool", "assistant"]
_LENGTH_WEIGHTS: dict[LengthPart, float] = {"output": 0.25, "input": 0.1, "turns": 0.1}
_ROLES: dict[MessageRole, float] = {"tool": 0.1}


class ReferenceConfig(StrictConfig):
    """Where a frozen model is served, with vLLM's `/v1/completions` and `/tokenize` routes."""

    base_url: str = Field(pattern=URL_PATTERN)
    """Address of the server, without "/v1"."""
    model: str = Field(min_length=1)
    """Name of the model there; its tokenizer must be the policy's."""
    api_key_var: str | None = None
    """Name of the environment variable that holds the server's key. None means no key."""
    max_concurrent_requests: int = Field(16, ge=1)
    """Most requests at once."""
    timeout_seconds: float = Field(120.0, gt=0)
    """Deadline of one request, waiting for its turn not counted."""


class AlgorithmConfig(PluginConfig):
    """An algorithm, with what the rest of the config must know of it."""

    reference: ReferenceConfig | None = None
    """The frozen teacher of `opd`, a model that your own algorithm asks, or the one that
    `trainer.loss.reference_kl_coefficient` pulls towards. None means none: the loss then pulls
    towards the initial weights, `opsd` asks the policy itself, and `agents.<role>` names the player
    of `sft`."""
    scoring_timeout_seconds: float = Field(default=900.0, gt=0, allow_inf_nan=False)
    """How long the algorithm may take for one episode or one group, waits for its judges included;
    then it fails as `scoring_timeout`."""

    needs_group: ClassVar[bool] = False
    """Whether a group of one episode teaches nothing, because episodes are compared."""
    compares_all_traces: ClassVar[bool] = False
    """Whether all traces of a group have one baseline."""
    compares_agents: ClassVar[bool] = False
    """Whether it needs an environment with several agents."""
    needs_teacher: ClassVar[bool] = False
    """Whether a frozen model must score, under `reference`."""
    takes_teacher: ClassVar[bool] = False
    """Whether its own code may ask a frozen model."""
    gives_advantages: ClassVar[bool] = True
    """Whether the rl loss trains what the policy samples."""
    scores_at_temperature_one: ClassVar[bool] = False
    """Whether it compares with logprobs at temperature 1."""
    needs_frozen_player: ClassVar[bool] = False
    """Whether another model than the policy must play."""

    def seat_refusal(
        self,
        agents: Mapping[str, bool],
        untrained_agents: Collection[str],
        *,
        has_learner_seat: bool,
        compares_all_traces: bool | None = None,
    ) -> str | None:
        """Why it cannot learn from these agents, and what to change; None when it can.

        `agents` maps the environment's agents to whether it lets them train; empty when it did not
        say. `has_learner_seat` says whether each task names the one agent that trains;
        `compares_all_traces` what the algorithm's class says, where it can be asked: by its name
        only registered ones are known.
        """
        if not agents:
            return None
        trained = [
            name for name, may_train in agents.items() if may_train and name not in untrained_agents
        ]
        if not trained:
            return (
                f"no agent trains ({', '.join(agents)}); set agents.<role>.train = true for "
                "one that the trained policy plays"
            )
        if compares_all_traces is None:
            compares_all_traces = self.compares_all_traces
        if compares_all_traces and len(trained) > 1 and not has_learner_seat:
            return (
                f"{self.type} compares all traces of a group, but agents {', '.join(trained)} all "
                "train, and a reward of one says nothing about another. Use rae or "
                "hierarchical_grpo, or train one of them: agents.<role>.train = false for the "
                f"others, or a {LEARNER_SEAT} in the tasks"
            )
        if self.compares_agents and len(agents) < 2:
            return (
                f"{self.type} compares agents with their own past, but the environment has only "
                f"the agent {trained[0]!r}; use grpo, or an environment with several agents"
            )
        if unknown := set(self.named_agents) - set(agents):
            return (
                f"episode_agents names {', '.join(sorted(unknown))}, but the environment has "
                f"{', '.join(agents)}"
            )
        return None

    @property
    def named_agents(self) -> Collection[str]:
        return ()


class GroupRelativeConfig(AlgorithmConfig):
    """The options of `grpo`, which `echo` has too."""

    scale_by_std: bool = False
    """Divide by the standard deviation of the group's rewards."""
    leave_one_out: bool = False
    """Compare with the mean of the other episodes (RLOO)."""
    length_penalty: bool = False
    """Lower rewards with output, input and turns before the mean is taken."""
    length_weights: dict[LengthPart, Weight] = Field(default_factory=lambda: dict(_LENGTH_WEIGHTS))
    """Weights of the length penalty, as shares of the size of the group's mean reward; a part that
    is left out weighs 0."""
    overlong_limit_tokens: int | None = Field(None, ge=1)
    """Lower rewards by up to 1 as the sampled tokens come near this limit. None means off."""
    overlong_cache_tokens: int | None = Field(None, ge=1)
    """Tokens before the limit from which on it costs. None means a fifth of the limit."""

    needs_group = True
    compares_all_traces = True

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if self.length_weights != _LENGTH_WEIGHTS and not self.length_penalty:
            yield "length_weights", "has no effect without length_penalty = true"
        limit, cache = self.overlong_limit_tokens, self.overlong_cache_tokens
        if cache is None:
            return
        if limit is None:
            yield "overlong_cache_tokens", f"{cache} needs overlong_limit_tokens"
        elif cache > limit:
            yield "overlong_cache_tokens", f"{cache} is more than overlong_limit_tokens = {limit}"


class GrpoConfig(GroupRelativeConfig):
    """The reward against the mean of the group."""

    type: Literal["grpo"] = "grpo"
    implementation = "gradus.orchestrator.algorithms.group_relative:GroupRelative"


class MaxRlConfig(AlgorithmConfig):
    """The reward against the mean of the group, divided by the mean."""

    type: Literal["max_rl"] = "max_rl"
    implementation = "gradus.orchestrator.algorithms.group_relative:MaxRl"
    needs_group = True
    compares_all_traces = True


class HierarchicalGrpoConfig(AlgorithmConfig):
    """The reward against the mean of the same agent."""

    type: Literal["hierarchical_grpo"] = "hierarchical_grpo"
    implementation = "gradus.orchestrator.algorithms.group_relative:HierarchicalGroupRelative"
    needs_group = True
    episode_agents: list[str] = Field(default_factory=list)
    """Agents that are compared within one episode instead of over the group."""

    @property
    def named_agents(self) -> Collection[str]:
        return self.episode_agents


class RaeConfig(AlgorithmConfig):
    """The reward against the agent's own past."""

    type: Literal["rae"] = "rae"
    implementation = "gradus.orchestrator.algorithms.rae:RoleAdvantageEstimation"
    compares_agents = True
    momentum: float = Field(0.95, ge=0, lt=1)
    """Share of a baseline that stays at each reward."""
    order: Literal["update_first", "subtract_first"] = "update_first"
    """Whether a reward moves its baseline before or after it is compared."""
    key: Literal["environment/task/agent", "environment/agent"] = "environment/task/agent"
    """What has a baseline: each agent per task, or per source."""


class EchoAlgorithmConfig(GroupRelativeConfig):
    """`grpo`, and cross-entropy on what the policy observes."""

    type: Literal["echo"] = "echo"
    implementation = "gradus.orchestrator.algorithms.echo:Echo"
    roles: dict[MessageRole, Weight] = Field(default_factory=lambda: dict(_ROLES), min_length=1)
    """Weight of the cross-entropy per role of an observed message."""
    tool_names: list[str] | None = None
    """Tools whose messages count. None means all."""
    filter: str | None = Field(None, pattern=OWN_PATTERN)
    """"package.module:function" that says which messages or tokens count. None means all."""
    normalize: Literal["own", "batch", "tokens", "observations", "ratio", "none"] = "own"
    """What divides the loss of observations: their `own` number in the batch, that of rl and them
    together (`batch`); or the mean over traces of sums that are divided by all `tokens` of the
    trace, by its `observations`, by the `ratio` of these to its tokens of rl, or by `none`."""


class OpdConfig(AlgorithmConfig):
    """A frozen teacher scores what the policy samples."""

    type: Literal["opd"] = "opd"
    implementation = "gradus.orchestrator.algorithms.distill:OnPolicyDistillation"
    needs_teacher = True
    takes_teacher = True
    gives_advantages = False
    scores_at_temperature_one = True


class OpsdConfig(AlgorithmConfig):
    """The policy, shown a demonstration, scores what it samples without."""

    type: Literal["opsd"] = "opsd"
    implementation = "gradus.orchestrator.algorithms.distill:SelfDistillation"
    gives_advantages = False
    scores_at_temperature_one = True
    demonstration: str = Field("answer", min_length=1)
    """Field of the task that the policy is shown."""
    hint: str = Field(
        "This is a good answer to what follows: {demonstration}", pattern=r"\{demonstration\}"
    )
    """The words around the demonstration, with {demonstration} in its place."""


class SftAlgorithmConfig(AlgorithmConfig):
    """Cross-entropy on what a frozen model plays."""

    type: Literal["sft"] = "sft"
    implementation = "gradus.orchestrator.algorithms.distill:FrozenSampler"
    needs_frozen_player = True
    gives_advantages = False
    min_reward: float | None = None
    """Episodes with less are left out. None means that all train."""


class OwnAlgorithmConfig(OwnPlugin, AlgorithmConfig):
    """An algorithm of your own."""

    takes_teacher = True


AlgorithmChoice = Annotated[
    Annotated[GrpoConfig, Tag("grpo")]
    | Annotated[MaxRlConfig, Tag("max_rl")]
    | Annotated[HierarchicalGrpoConfig, Tag("hierarchical_grpo")]
    | Annotated[RaeConfig, Tag("rae")]
    | Annotated[EchoAlgorithmConfig, Tag("echo")]
    | Annotated[OpdConfig, Tag("opd")]
    | Annotated[OpsdConfig, Tag("opsd")]
    | Annotated[SftAlgorithmConfig, Tag("sft")]
    | Annotated[OwnAlgorithmConfig, Tag(OWN_PLUGIN)],
    by_type("grpo"),
]
"""Every algorithm, by its `type`."""
