"""What cannot work although every single value is valid: conflicts between sections."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterator

from gradus.config.algorithm_options import ALGORITHM_OPTIONS, algorithm_option_problems
from gradus.config.keys import KeyPath
from gradus.config.plugin_options import (
    CURRICULUM_OPTIONS,
    ERROR_POLICY_OPTIONS,
    FILTER_OPTIONS,
    plugin_option_problems,
)
from gradus.config.problems import Problem, nearest
from gradus.config.schema.environment import (
    AgentRoleConfig,
    CurriculumConfig,
    EnvironmentConfig,
    ErrorPolicyConfig,
    EvalEnvironmentConfig,
    HarnessChoice,
    TrainEnvironmentConfig,
)
from gradus.config.schema.eval import EvalConfig
from gradus.config.schema.inference import InferenceConfig, SamplingConfig
from gradus.config.schema.losses import LOSS_OPTIONS, option_problems
from gradus.config.schema.model import ModelConfig
from gradus.config.schema.optimizers import OptimizerConfig, SgdConfig
from gradus.config.schema.orchestrator import FilterConfig, OrchestratorConfig
from gradus.config.schema.run import CheckpointConfig, RunConfig
from gradus.config.schema.sft import SftConfig
from gradus.config.schema.trainer import (
    LoraConfig,
    ParallelConfig,
    TrainerConfig,
    data_parallel_size,
)
from gradus.config.sources import (
    DEFAULT_SAMPLING,
    check_names,
    evaluation_sampling,
    is_frozen,
    merged_sampling,
    reference_problems,
    source_algo,
    source_sampling,
    temperature_problems,
)
from gradus.config.variables import env_vars_problems

MAX_SEED = 2**32 - 1
_ENV: KeyPath = ("orchestrator", "train", "env")
_ADDRESS_FORMS = ("tcp://", "ipc://")

GROUP_BASELINES = frozenset({"grpo", "max_rl", "hierarchical_grpo", "echo"})
"""Algorithms that compare the episodes of one group, and learn nothing from a group of one."""

ALGORITHMS = frozenset(ALGORITHM_OPTIONS)
"""Registered names for `algo.type`."""

CURRICULA = frozenset(CURRICULUM_OPTIONS)
"""Registered names for `curriculum.type` of a source."""

ERROR_POLICIES = frozenset(ERROR_POLICY_OPTIONS)
"""Registered names for `errors.type` of a source."""

LOSSES = frozenset(LOSS_OPTIONS)
"""Registered names for `trainer.loss.type`."""

FILTERS = frozenset(FILTER_OPTIONS)
"""Registered names for `filters.type`."""

OWNED_SAMPLING = {
    "temperature": "write sampling.temperature; the trainer divides by the same number",
    "top_p": "write sampling.top_p",
    "max_tokens": "write sampling.max_completion_tokens",
    "max_completion_tokens": "write sampling.max_completion_tokens",
    "cache_salt": "gradus salts prefix caches with the policy version",
    "logprobs": "gradus always asks for the logprobs of sampled tokens",
    "n": "write group_size",
    "stream": "gradus reads whole replies",
}
"""Keys of `sampling.extra_body` that have another owner."""

OWNED_SETTINGS = {
    "id": "write id",
    "taskset": "write taskset",
    "timeout": "write timeout",
    "retries": "write errors.retries",
    "harness": "write harness",
    "runtime": "write runtime",
    "sampling": "write sampling",
}
"""Keys of an environment's `settings` that have another owner."""

OWNED_ENGINE_ARGS = {
    "model": "write model.name",
    "tokenizer": "write model.tokenizer",
    "trust_remote_code": "write model.trust_remote_code",
    "max_model_len": "write model.max_length_tokens",
    "served_model_name": "gradus serves the policy under a name of its own",
    "dtype": "write inference.dtype",
    "max_num_seqs": "write inference.max_num_seqs",
    "gpu_memory_utilization": "write inference.gpu_memory_utilization",
    "enforce_eager": "write inference.enforce_eager",
    "enable_chunked_prefill": "a CPU engine cannot split seeded prompts; a GPU engine splits them",
    "tensor_parallel_size": "write inference.tensor_parallel_size",
    "host": "write inference.host",
    "port": "write inference.port",
    "kv_cache_memory_bytes": "write inference.kv_cache_gib",
    "api_key": "gradus guards every route with the run's own tokens",
    "uds": "gradus serves on inference.host and inference.port",
    "enable_scale_out": "gradus needs the routes that it adds",
    "generation_config": "gradus states every sampling value itself",
    "logprobs_mode": "the trainer needs the logprobs of the sampled distribution",
    "worker_extension_cls": "gradus loads weights with it",
    "seed": "write seed",
    "enable_lora": "write trainer.lora",
    "max_lora_rank": "write trainer.lora.rank",
    "max_loras": "gradus serves one adapter, the newest",
    "max_cpu_loras": "gradus serves one adapter, the newest",
    "lora_modules": "gradus serves the adapter that it trains",
}
"""Keys of `inference.extra_args` that have another owner."""


def run_problems(config: RunConfig) -> list[Problem]:
    """Everything that keeps an RL run with this config from working."""
    return [
        *_seed_problems(config.seed),
        *_checkpoint_problems(config.checkpoint),
        *_batch_problems(config),
        *_optimizer_problems(("trainer", "optimizer"), config.trainer.optimizer, config.max_steps),
        *lora_problems(("trainer", "lora"), config.trainer.lora),
        *_transfer_problems(config.trainer),
        *_micro_batch_problems(
            ("trainer", "micro_batch_tokens"), config.trainer.micro_batch_tokens, config.model
        ),
        *parallel_problems(
            ("trainer", "parallel"), config.trainer.parallel, config.trainer.num_processes
        ),
        *inference_problems(config.inference),
        *_plugin_problems(("trainer", "loss"), "loss", config.trainer.loss.type, LOSSES),
        *option_problems(
            ("trainer", "loss", "options"), config.trainer.loss.type, config.trainer.loss.options
        ),
        *_plugin_problems(
            ("orchestrator", "train", "algo"),
            "algorithm",
            config.orchestrator.train.algo.type,
            ALGORITHMS,
        ),
        *algorithm_option_problems(
            ("orchestrator", "train", "algo", "options"),
            config.orchestrator.train.algo.type,
            config.orchestrator.train.algo.options,
        ),
        *(
            problem
            for index, chosen in enumerate(config.orchestrator.filters)
            for problem in _optional_plugin_problems(
                ("orchestrator", "filters", index), "filter", chosen, FILTERS
            )
        ),
        *check_names(config.orchestrator.train.env, _ENV),
        *extra_body_problems(
            ("orchestrator", "train", "sampling"), config.orchestrator.train.sampling
        ),
        *(
            problem
            for index, source in enumerate(config.orchestrator.train.env)
            for problem in _source_problems(config, source, (*_ENV, index))
        ),
        *env_vars_problems("trainer", ("trainer", "env_vars"), config.trainer.env_vars),
        *env_vars_problems("inference", ("inference", "env_vars"), config.inference.env_vars),
        *env_vars_problems(
            "orchestrator", ("orchestrator", "env_vars"), config.orchestrator.env_vars
        ),
    ]


def sft_problems(config: SftConfig) -> list[Problem]:
    """Everything that keeps a supervised run with this config from working."""
    return [
        *_seed_problems(config.seed),
        *_checkpoint_problems(config.checkpoint),
        *_optimizer_problems(("optimizer",), config.optimizer, config.max_steps),
        *lora_problems(("lora",), config.lora),
        *_micro_batch_problems(("micro_batch_tokens",), config.micro_batch_tokens, config.model),
        *parallel_problems(("parallel",), config.parallel, config.num_processes),
        *_rank_problems(
            ("batch_conversations",),
            config.batch_conversations,
            data_parallel_size(config.num_processes, config.parallel),
        ),
        *env_vars_problems("trainer", ("env_vars",), config.env_vars),
    ]


def _seed_problems(seed: int) -> Iterator[Problem]:
    if not 0 <= seed <= MAX_SEED:
        yield Problem(("seed",), f"{seed} is out of range; it must lie between 0 and {MAX_SEED}")


def _checkpoint_problems(config: CheckpointConfig) -> Iterator[Problem]:
    """Checkpoints that are kept must be made."""
    interval, kept = config.interval_steps, config.keep_interval_steps
    if kept is None:
        return
    if interval is None or kept % interval:
        made = "none is made" if interval is None else f"they are made every {interval} steps"
        yield Problem(
            ("checkpoint", "keep_interval_steps"),
            f"{kept} keeps checkpoints that do not exist: {made}; use a multiple of "
            "checkpoint.interval_steps",
        )


def _batch_problems(config: RunConfig) -> Iterator[Problem]:
    """Conflicts about the number of episodes, and how old they may be."""
    orchestrator = config.orchestrator
    if orchestrator.max_lag > orchestrator.max_staleness:
        yield Problem(
            ("orchestrator", "max_lag"),
            f"{orchestrator.max_lag} batches ahead make samples older than max_staleness = "
            f"{orchestrator.max_staleness}, so they would all be dropped; "
            "lower max_lag or raise max_staleness",
        )
    largest = max(source.group_size for source in orchestrator.train.env)
    if orchestrator.max_in_flight_episodes < largest:
        yield Problem(
            ("orchestrator", "max_in_flight_episodes"),
            f"{orchestrator.max_in_flight_episodes} episodes at once cannot hold one group of "
            f"{largest}; raise it, or lower group_size",
        )
    yield from _in_flight_problems(orchestrator)
    updates, groups = config.trainer.updates_per_batch, orchestrator.groups_per_batch
    if updates > groups:
        yield Problem(
            ("trainer", "updates_per_batch"),
            f"{updates} updates cannot share the {groups} groups of a batch; use at most {groups}, "
            "or raise orchestrator.groups_per_batch",
        )
    smallest = min(source.group_size for source in orchestrator.train.env)
    yield from _rank_problems(
        ("orchestrator", "groups_per_batch"),
        groups // min(updates, groups) * smallest,
        data_parallel_size(config.trainer.num_processes, config.trainer.parallel),
    )


def _in_flight_problems(orchestrator: OrchestratorConfig) -> Iterator[Problem]:
    least, most = orchestrator.min_in_flight_episodes, orchestrator.max_in_flight_episodes
    if least > most:
        yield Problem(
            ("orchestrator", "min_in_flight_episodes"),
            f"{least} is more than max_in_flight_episodes = {most}; lower the first",
        )
    initial = orchestrator.initial_in_flight_episodes
    if initial is not None and not least <= initial <= most and least <= most:
        yield Problem(
            ("orchestrator", "initial_in_flight_episodes"),
            f"{initial} must lie between min_in_flight_episodes = {least} and "
            f"max_in_flight_episodes = {most}",
        )


def _rank_problems(path: KeyPath, num_samples: int, num_ranks: int) -> Iterator[Problem]:
    if num_samples < num_ranks:
        yield Problem(
            path,
            f"a batch of {num_samples} gives {num_ranks} ranks nothing to share; "
            "make the batch larger or lower num_processes",
        )


def _transfer_problems(trainer: TrainerConfig) -> Iterator[Problem]:
    lora = trainer.lora
    if trainer.weight_transfer == "broadcast" and lora is not None and lora.serve == "adapter":
        yield Problem(
            ("trainer", "weight_transfer"),
            "broadcast sends whole weights, and vLLM reads adapters from files; use filesystem, "
            'or trainer.lora.serve = "merged"',
        )


def _optimizer_problems(
    path: KeyPath, optimizer: OptimizerConfig, max_steps: int
) -> Iterator[Problem]:
    if optimizer.warmup_steps >= max_steps and optimizer.warmup_steps > 0:
        yield Problem(
            (*path, "warmup_steps"),
            f"a warm-up of {optimizer.warmup_steps} steps never ends in {max_steps} steps; "
            "lower it, or raise max_steps",
        )
    if isinstance(optimizer, SgdConfig):
        return
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield Problem((*path, "betas"), f"{list(optimizer.betas)}: each must be in [0, 1)")


def lora_problems(path: KeyPath, lora: LoraConfig | None) -> Iterator[Problem]:
    """What cannot be trained exactly, or not served."""
    if lora is None:
        return
    if lora.dropout > 0:
        yield Problem(
            (*path, "dropout"),
            f"{lora.dropout} would make the policy's logprobs random, and ratios with them; use 0",
        )
    if lora.modules_to_save:
        yield Problem(
            (*path, "modules_to_save"),
            f"{lora.modules_to_save} cannot be served: vLLM takes low-rank factors only, no whole "
            "modules beside them; leave it empty, or train without lora",
        )


def parallel_problems(
    path: KeyPath, parallel: ParallelConfig, num_processes: int
) -> Iterator[Problem]:
    """Sizes that do not divide the number of processes."""
    for name in ("replicate_size", "context_parallel_size"):
        size: int = getattr(parallel, name)
        if num_processes % size:
            yield Problem(
                (*path, name),
                f"{size} does not divide the {num_processes} processes of the trainer; "
                f"change it, or make num_processes a multiple of {size}",
            )


def _micro_batch_problems(path: KeyPath, tokens: int, model: ModelConfig) -> Iterator[Problem]:
    if tokens < model.max_length_tokens:
        yield Problem(
            path,
            f"{tokens} tokens cannot hold the longest sample, model.max_length_tokens = "
            f"{model.max_length_tokens}; raise the first or lower the second",
        )


def _plugin_problems(
    path: KeyPath, kind: str, name: str, registered: Collection[str]
) -> Iterator[Problem]:
    """A plug-in is a registered name, or a class of the user's own."""
    if name in registered or ":" in name:
        return
    near = nearest(name, registered)
    hint = f"did you mean {near!r}? Or" if near else f"use {' or '.join(sorted(registered))}, or"
    text = f"{kind} {name!r} is not known; {hint} name your own as 'package.module:Class'"
    yield Problem((*path, "type"), text)


def _optional_plugin_problems(
    path: KeyPath,
    kind: str,
    chosen: FilterConfig | CurriculumConfig | ErrorPolicyConfig,
    registered: Collection[str],
) -> Iterator[Problem]:
    """A plug-in with options of its own."""
    yield from _plugin_problems(path, kind, chosen.type, registered)
    yield from plugin_option_problems((*path, "options"), kind, chosen.type, chosen.options)


def inference_problems(config: InferenceConfig) -> Iterator[Problem]:
    """What vLLM cannot be started with."""
    if not _is_loopback(config.host) and not config.allow_public_bind:
        yield Problem(
            ("inference", "host"),
            f"{config.host!r} can be reached by others; use 127.0.0.1, "
            "or set inference.allow_public_bind if that is wanted",
        )
    for name in config.extra_args:
        if owner := OWNED_ENGINE_ARGS.get(name.replace("-", "_")):
            yield Problem(("inference", "extra_args", name), f"has another owner: {owner}")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _source_problems(
    config: RunConfig, source: TrainEnvironmentConfig, path: KeyPath
) -> Iterator[Problem]:
    """Conflicts inside one source, and between it and the model."""
    algo = source_algo(config, source)
    # Agents that are compared within one episode need no second one.
    is_within_episode = bool(algo.options.get("episode_agents"))
    if source.group_size < 2 and algo.type in GROUP_BASELINES and not is_within_episode:
        yield Problem(
            (*path, "group_size"),
            f"{source.group_size} gives {algo.type} no baseline to compare with; "
            "use at least 2, or an algorithm without groups",
        )
    if source.algo is not None:
        yield from _plugin_problems((*path, "algo"), "algorithm", algo.type, ALGORITHMS)
        yield from algorithm_option_problems((*path, "algo", "options"), algo.type, algo.options)
    is_own = source.algo is not None
    yield from reference_problems(
        (*path, "algo") if is_own else ("orchestrator", "train", "algo"),
        algo,
        temperature=source_sampling(config, source).temperature,
        is_frozen=is_frozen(source),
    )
    yield from _optional_plugin_problems(
        (*path, "curriculum"), "curriculum", source.curriculum, CURRICULA
    )
    yield from _optional_plugin_problems(
        (*path, "errors"), "error policy", source.errors, ERROR_POLICIES
    )
    yield from _length_problems(config, source, path)
    yield from temperature_problems(config, source, path)
    yield from environment_problems(source, path)


def environment_problems(source: EnvironmentConfig, path: KeyPath) -> Iterator[Problem]:
    """Conflicts inside one environment, whatever its episodes are for."""
    yield from extra_body_problems((*path, "sampling"), source.sampling)
    yield from _harness_problems((*path, "harness"), source.harness)
    for name in source.settings:
        owner = f"write agents.{name}" if name in source.agents else OWNED_SETTINGS.get(name)
        if owner:
            yield Problem((*path, "settings", name), f"has another owner: {owner}")
    for role, agent in source.agents.items():
        yield from _role_problems((*path, "agents", role), agent)
    if source.address is not None and not source.address.startswith(_ADDRESS_FORMS):
        forms = " or ".join(_ADDRESS_FORMS)
        yield Problem((*path, "address"), f"{source.address!r} must begin with {forms}")
    yield from env_vars_problems("environment", (*path, "env_vars"), source.env_vars)
    passed = dict.fromkeys(source.pass_env, "")
    yield from env_vars_problems("environment", (*path, "pass_env"), passed)


def _length_problems(
    config: RunConfig, source: TrainEnvironmentConfig, path: KeyPath
) -> Iterator[Problem]:
    """A reply must fit; the engine stops one that meets the end of the context."""
    longest = config.model.max_length_tokens
    reply = source_sampling(config, source).max_completion_tokens
    if reply is not None and reply > longest:
        is_own = source.sampling.max_completion_tokens is not None
        section = (*path, "sampling") if is_own else ("orchestrator", "train", "sampling")
        yield Problem(
            (*section, "max_completion_tokens"),
            f"{reply} is more than model.max_length_tokens = {longest} holds; "
            "lower the first or raise the second",
        )
    total = source.max_total_tokens
    if total is not None and (source.max_input_tokens or 0) >= total:
        yield Problem(
            (*path, "max_input_tokens"),
            f"{source.max_input_tokens} leaves no token to sample in max_total_tokens = {total}",
        )


def _role_problems(path: KeyPath, role: AgentRoleConfig) -> Iterator[Problem]:
    """A role is the policy, or another model behind an endpoint, with nothing half given."""
    if role.model is not None and role.base_url is None:
        yield Problem((*path, "base_url"), f"missing; where is model {role.model!r} served?")
    if role.base_url is not None and role.model is None:
        yield Problem((*path, "model"), f"missing; which model of {role.base_url} plays this role?")
    if role.api_key_var is not None and role.base_url is None:
        yield Problem((*path, "api_key_var"), "has no meaning without base_url")
    if role.harness is not None:
        yield from _harness_problems((*path, "harness"), role.harness)
    if role.sampling is not None:
        yield from extra_body_problems((*path, "sampling"), role.sampling)


def _harness_problems(path: KeyPath, harness: HarnessChoice) -> Iterator[Problem]:
    if "id" in harness.config:
        yield Problem((*path, "config", "id"), "the harness is chosen by harness.id alone")


def extra_body_problems(path: KeyPath, sampling: SamplingConfig) -> Iterator[Problem]:
    """Keys that have another owner."""
    for name in sampling.extra_body:
        if owner := OWNED_SAMPLING.get(name):
            yield Problem((*path, "extra_body", name), f"has another owner: {owner}")


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def run_evaluation_problems(config: RunConfig) -> list[Problem]:
    """Everything wrong with the evaluations of an RL run."""
    evaluation = config.orchestrator.eval
    if evaluation is None:
        return []
    path: KeyPath = ("orchestrator", "eval")
    longest = config.model.max_length_tokens
    problems = [
        *check_names(evaluation.env, (*path, "env")),
        *extra_body_problems((*path, "sampling"), evaluation.sampling),
        *_sources(evaluation.env, (*path, "env"), evaluation_sampling(config), longest),
    ]
    limit = config.trainer.receive_timeout_seconds
    if evaluation.timeout_seconds >= limit:
        text = (
            f"{evaluation.timeout_seconds:g} is not below trainer.receive_timeout_seconds = "
            f"{limit:g}, and the trainer gets no batch while new weights wait for the evaluation; "
            "lower the first or raise the second"
        )
        problems.append(Problem((*path, "timeout_seconds"), text))
    return problems


def sft_evaluation_problems(config: SftConfig) -> list[Problem]:
    """Everything wrong with the evaluations of a supervised run."""
    evaluation = config.eval
    if evaluation is None:
        return []
    path: KeyPath = ("eval",)
    section = merged_sampling(evaluation.sampling, DEFAULT_SAMPLING)
    problems = [
        *check_names(evaluation.env, (*path, "env")),
        *extra_body_problems((*path, "sampling"), evaluation.sampling),
        *_sources(evaluation.env, (*path, "env"), section, config.model.max_length_tokens),
        *inference_problems(config.inference),
        *env_vars_problems("inference", ("inference", "env_vars"), config.inference.env_vars),
    ]
    versions = range(config.max_steps + 1)
    if not any(evaluation.is_due(version, max_steps=config.max_steps) for version in versions):
        text = (
            f"{evaluation.interval_steps} is more than max_steps = {config.max_steps}, and "
            "base_model_first and at_end are off, so nothing is ever evaluated; lower it, or take "
            "the section away"
        )
        problems.append(Problem((*path, "interval_steps"), text))
    return problems


def eval_problems(config: EvalConfig) -> list[Problem]:
    """Everything wrong with a stand-alone evaluation."""
    # The context of a foreign endpoint is its own business.
    longest = config.model.max_length_tokens if config.base_url is None else None
    problems = [
        *check_names(config.env, ("env",)),
        *extra_body_problems(("sampling",), config.sampling),
        *_sources(config.env, ("env",), config.sampling, longest),
        *inference_problems(config.inference),
    ]
    if config.api_key_var is not None and config.base_url is None:
        problems.append(Problem(("api_key_var",), "has no meaning without base_url"))
    if config.api_key_var is not None and not _VARIABLE.fullmatch(config.api_key_var):
        text = "is no name of an environment variable; the key itself belongs into the variable"
        problems.append(Problem(("api_key_var",), text))
    return problems


def _sources(
    sources: list[EvalEnvironmentConfig],
    path: KeyPath,
    section: SamplingConfig,
    longest: int | None,
) -> Iterator[Problem]:
    for index, source in enumerate(sources):
        place = (*path, index)
        yield from environment_problems(source, place)
        reply = merged_sampling(source.sampling, section).max_completion_tokens
        if reply is not None and longest is not None and reply > longest:
            yield Problem(
                (*place, "sampling", "max_completion_tokens"),
                f"{reply} is more than model.max_length_tokens = {longest} holds; "
                "lower the first or raise the second",
            )
