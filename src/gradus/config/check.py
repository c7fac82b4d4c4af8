"""Conflicts between sections: what cannot work although every single value is valid."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gradus.config.keys import KeyPath
from gradus.config.owned import (
    OWNED_SAMPLING,
    OWNED_SETTINGS,
    RESERVED,
    RESERVED_EVERYWHERE,
)
from gradus.config.problems import Problem, shown
from gradus.config.schema.algorithms import EchoAlgorithmConfig, HierarchicalGrpoConfig
from gradus.config.schema.environment import CHAT_HARNESS, NAME_PATTERN, RoleConfig
from gradus.config.schema.eval import EvalConfig
from gradus.config.schema.inference import InferenceConfig, SamplingConfig
from gradus.config.schema.learning import MuonConfig, OptimizerConfig
from gradus.config.schema.model import CHAT_TEMPLATE, ModelConfig
from gradus.config.schema.monitor import MonitorConfig, is_loopback
from gradus.config.schema.run import CheckpointConfig, RunConfig
from gradus.config.schema.sft import SftConfig
from gradus.config.schema.trainer import (
    ParallelConfig,
    TrainerConfig,
    data_parallel_size,
)
from gradus.config.sources import (
    EvaluatedSource,
    LaunchedConfig,
    Sources,
    TrainSource,
    distribution_problems,
    holdout_problems,
    reference_problems,
)
from gradus.run.settings import planned_steps

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_COLDEST = 0.01
"""vLLM takes a temperature between 0 and this for this."""


def contradictions(config: LaunchedConfig, sources: Sources) -> list[Problem]:
    """Everything that keeps a config from working on any machine."""
    if isinstance(config, EvalConfig):
        own = _eval_problems(config)
    elif isinstance(config, SftConfig):
        own = _sft_problems(config)
    else:
        own = _run_problems(config)
    is_served = isinstance(config, EvalConfig) and config.base_url is not None
    settings = config.model.renderer_settings
    is_pulled = isinstance(config, RunConfig) and config.trainer.loss.pulls_to_reference
    return [
        *own,
        *_under(("launch",), config.launch.problems()),
        *_under(("slurm",), config.slurm.problems(config.launch)),
        *_under(("model", "renderer"), ModelConfig.renderer_problems(settings)),
        *_echo_problems(sources, settings["name"]),
        *_name_problems(sources.train),
        *_name_problems(sources.evaluated),
        *holdout_problems(sources),
        *_monitor_problems(config.monitor),
        *(it for source in sources.train for it in _train_problems(source, is_pulled=is_pulled)),
        *(problem for source in sources.all for problem in _source_problems(source)),
        *(
            problem
            for source in sources.all
            for found in (
                source.given.headers_problems(has_endpoint=is_served),
                source.given.address_problems(
                    has_endpoint=is_served or isinstance(source, TrainSource)
                ),
            )
            for problem in _under(source.path, found)
        ),
    ]


def _under(path: KeyPath, found: Iterable[tuple[str, str]]) -> Iterator[Problem]:
    """What a section finds of its own keys, as problems of the config."""
    return (Problem((*path, key), message) for key, message in found)


def _echo_problems(sources: Sources, renderer: str) -> Iterator[Problem]:
    """What is found later for a renderer that is not written, or another one."""
    for source in sources.train:
        if isinstance(source.complete.algo, EchoAlgorithmConfig) and renderer == CHAT_TEMPLATE:
            yield Problem(
                (*source.algo_path, "type"),
                f"echo learns the bodies of messages, which model.renderer = {renderer!r} does not "
                'mark; use the renderer of the model\'s family, e.g. "qwen3", or grpo',
            )


def _monitor_problems(monitors: Sequence[MonitorConfig]) -> Iterator[Problem]:
    """Files and messages go by the name of a tracker, so two may not share one."""
    known: set[str] = set()
    for place, monitor in enumerate(monitors):
        if monitor.title in known:
            yield Problem(
                ("monitor", place, "name"),
                f"two trackers are called {monitor.title!r}; give this one another name",
            )
        if monitor.is_alone and any(other.type == monitor.type for other in monitors[:place]):
            yield Problem(
                ("monitor", place, "type"),
                f"a run sends to one tracker of the type {monitor.type!r}, whose library serves "
                f"one in a process; `gradus view RUN --to {monitor.type} --name SECOND` sends "
                "to another",
            )
        known.add(monitor.title)
        yield from _under(("monitor", place), monitor.contradictions())


def _alarm_problems(config: RunConfig) -> Iterator[Problem]:
    """Two alarms on one number, and those that are to save where nothing is saved."""
    known = set[str]()
    for place, alarm in enumerate(config.orchestrator.alarm):
        path: KeyPath = ("orchestrator", "alarm", place)
        if alarm.metric in known:
            yield Problem((*path, "metric"), f"{alarm.metric!r} has an alarm already")
        known.add(alarm.metric)
        if alarm.action == "checkpoint" and not config.checkpoint.is_on:
            text = "the run saves no checkpoints; set checkpoint.interval_minutes"
            yield Problem((*path, "action"), text)


def _run_problems(config: RunConfig) -> list[Problem]:
    orchestrator, trainer = config.orchestrator, config.trainer
    train: KeyPath = ("orchestrator", "train")
    return [
        *_goal_problems(config),
        *_checkpoint_problems(config.checkpoint),
        *_alarm_problems(config),
        *_batch_problems(config),
        *_transfer_problems(trainer, config.inference),
        *_learning_problems(config),
        *inference_problems(config.inference, may_be_elsewhere=True),
        *_under(("trainer", "loss"), trainer.loss.contradictions()),
        *_under((*train, "algo"), orchestrator.train.algo.contradictions()),
        *(
            problem
            for index, chosen in enumerate(orchestrator.filters)
            for problem in _under(("orchestrator", "filters", index), chosen.contradictions())
        ),
        *_extra_body_problems((*train, "sampling"), orchestrator.train.sampling),
        *_extra_body_problems(
            ("orchestrator", "eval", "sampling"),
            None if orchestrator.eval is None else orchestrator.eval.sampling,
        ),
        *_under(("kubernetes",), config.kubernetes.problems()),
        *env_vars_problems("trainer", ("trainer", "env_vars"), trainer.env_vars),
        *env_vars_problems("orchestrator", ("orchestrator", "env_vars"), orchestrator.env_vars),
    ]


def _goal_problems(config: RunConfig) -> Iterator[Problem]:
    patience, section = config.patience_steps, config.orchestrator.eval
    if section is not None:
        yield from _under(("orchestrator", "eval"), section.problems(config.max_steps))
    if patience is None:
        return
    if section is None and 2 * patience > config.max_steps:
        yield Problem(
            ("patience_steps",),
            f"{patience} steps are compared with as many before them, and max_steps = "
            f"{config.max_steps} is less than both; leave it out, or raise max_steps",
        )
    if section is not None and patience < 2 * section.interval_steps:
        yield Problem(
            ("patience_steps",),
            f"within {patience} steps there are fewer than two evaluations, since "
            f"orchestrator.eval.interval_steps = {section.interval_steps}, and one unlucky one "
            f"would end the run; use at least {2 * section.interval_steps}",
        )


def _sft_problems(config: SftConfig) -> list[Problem]:
    return [
        *_checkpoint_problems(config.checkpoint),
        *_learning_problems(config),
        *_rank_problems(
            ("batch_conversations",),
            config.batch_conversations,
            data_parallel_size(config.num_processes, config.parallel),
        ),
        *env_vars_problems("trainer", ("env_vars",), config.env_vars),
        *_sft_evaluation_problems(config),
    ]


def _sft_evaluation_problems(config: SftConfig) -> Iterator[Problem]:
    evaluation = config.eval
    if evaluation is None:
        return
    yield from _extra_body_problems(("eval", "sampling"), evaluation.sampling)
    yield from inference_problems(config.inference)
    if config.inference.gpu_sharing == "turns":
        yield Problem(
            ("inference", "gpu_sharing"),
            "'turns': a supervised trainer does not wait for its evaluations; use 'memory', or two "
            "GPUs",
        )
    yield from _under(("eval",), evaluation.problems(config.max_steps))


def _eval_problems(config: EvalConfig) -> list[Problem]:
    problems = [
        *_extra_body_problems(("sampling",), config.sampling),
        *inference_problems(config.inference),
    ]
    if config.api_key_var is not None and config.base_url is None:
        problems.append(
            Problem(("api_key_var",), "needs base_url: the key is for the model behind it")
        )
    if config.api_key_var is not None and not _VARIABLE.fullmatch(config.api_key_var):
        text = "is not a name of an environment variable; the key itself belongs into the variable"
        problems.append(Problem(("api_key_var",), text))
    if (sharing := config.inference.gpu_sharing) != "never":
        text = f"{sharing!r}: an evaluation has no trainer that could share; remove the key"
        problems.append(Problem(("inference", "gpu_sharing"), text))
    return problems


def _checkpoint_problems(config: CheckpointConfig) -> Iterator[Problem]:
    """Checkpoints that are kept must be made."""
    interval, kept = config.interval_steps, config.keep_interval_steps
    if kept is None:
        return
    if interval is None or kept % interval:
        often = f"{config.interval_minutes} minutes" if interval is None else f"{interval} steps"
        made = f"they are made every {often}" if config.is_on else "none is made"
        yield Problem(
            ("checkpoint", "keep_interval_steps"),
            f"{kept} keeps checkpoints that do not exist: {made}; use a multiple of "
            "checkpoint.interval_steps",
        )


def _batch_problems(config: RunConfig) -> Iterator[Problem]:
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
    least, most = orchestrator.min_in_flight_episodes, orchestrator.max_in_flight_episodes
    if least > most:
        yield Problem(
            ("orchestrator", "min_in_flight_episodes"),
            f"{least} is more than max_in_flight_episodes = {most}; lower the first",
        )
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


def _rank_problems(path: KeyPath, num_samples: int, num_ranks: int) -> Iterator[Problem]:
    if num_samples < num_ranks:
        yield Problem(
            path,
            f"a batch of {num_samples} gives {num_ranks} ranks nothing to share; "
            "make the batch larger or lower num_processes",
        )


def _transfer_problems(trainer: TrainerConfig, inference: InferenceConfig) -> Iterator[Problem]:
    lora, sharing = trainer.lora, inference.gpu_sharing
    if trainer.weight_transfer == "broadcast" and sharing != "never":
        yield Problem(
            ("trainer", "weight_transfer"),
            f"broadcast with inference.gpu_sharing = {sharing!r}: nccl takes no two processes on "
            "one GPU; use filesystem",
        )
    servers = None if inference.replicas == 1 else f"inference.replicas = {inference.replicas}"
    servers = servers if inference.addresses is None else "inference.addresses"
    if trainer.weight_transfer == "broadcast" and servers is not None:
        yield Problem(
            ("trainer", "weight_transfer"),
            f"broadcast with {servers}: a version is sent once, to one server, so another one that "
            "failed and returns could not be told it; use filesystem",
        )
    if trainer.weight_transfer == "broadcast" and lora is not None and lora.serve == "adapter":
        yield Problem(
            ("trainer", "weight_transfer"),
            "broadcast sends whole weights, and vLLM reads adapters from files; use filesystem, "
            'or trainer.lora.serve = "merged"',
        )
    if lora is not None and trainer.router_bias_rate:
        yield Problem(
            ("trainer", "router_bias_rate"),
            f"{trainer.router_bias_rate:g} with lora: adapters leave all else as the base model "
            "has it; write 0, or train without lora",
        )
    if lora is not None and lora.serve == "adapter" and lora.adapts_experts:
        yield Problem(
            ("trainer", "lora", "serve"),
            "'adapter' with experts in lora.target_modules: vLLM's build for CPUs has no adapters "
            "on experts, and on GPUs they were not tried; write 'merged'",
        )


def _optimizer_problems(
    path: KeyPath, optimizer: OptimizerConfig, max_steps: int
) -> Iterator[Problem]:
    if optimizer.lr == "auto" and optimizer.type == "sgd":
        yield Problem(
            (*path, "lr"),
            '"auto" has no number for sgd, whose rate depends on the size of the gradients; write '
            "one, or use adamw",
        )
    if optimizer.min_lr_ratio and optimizer.schedule == "constant":
        text = f"{optimizer.min_lr_ratio:g} has no effect with schedule = 'constant'; remove it"
        yield Problem((*path, "min_lr_ratio"), text)
    if optimizer.schedule != "constant" and planned_steps(max_steps) is None:
        text = f"{optimizer.schedule!r} ends with the run: give max_steps, or write 'constant'"
        yield Problem((*path, "schedule"), text)
    if optimizer.warmup_steps >= max_steps and optimizer.warmup_steps > 0:
        yield Problem(
            (*path, "warmup_steps"),
            f"a warm-up of {optimizer.warmup_steps} steps never ends in {max_steps} steps; "
            "lower it, or raise max_steps",
        )


def _learning_problems(config: RunConfig | SftConfig) -> Iterator[Problem]:
    """What contradicts itself in the settings that both kinds of training have."""
    path: KeyPath = ("trainer",) if isinstance(config, RunConfig) else ()
    settings = config.trainer if isinstance(config, RunConfig) else config
    parallel, at = settings.parallel, (*path, "parallel")
    yield from _optimizer_problems((*path, "optimizer"), settings.optimizer, config.max_steps)
    tokens, longest = settings.micro_batch_tokens, config.model.max_length_tokens
    if tokens < longest:
        yield Problem(
            (*path, "micro_batch_tokens"),
            f"{tokens} tokens cannot hold the longest sample, model.max_length_tokens = "
            f"{longest}; raise the first or lower the second",
        )
    yield from _under(at, parallel.problems(settings.num_processes))
    yield from _offload_problems(at, parallel, settings.optimizer)
    if parallel.float8 and settings.lora is not None:
        text = "adapters stand inside the layers that it converts; train without lora, or turn it"
        yield Problem((*at, "float8"), f"{text} off")
    if parallel.float8 and settings.compute_dtype == "float32":
        text = "goes with compute_dtype = 'bfloat16': all other operations would cost twice as much"
        yield Problem((*at, "float8"), text)
    if settings.train_vision and settings.lora is not None:
        text = "adapters leave everything beside them as it is; turn one of them off"
        yield Problem((*path, "train_vision"), text)


def _offload_problems(
    path: KeyPath, parallel: ParallelConfig, optimizer: OptimizerConfig
) -> Iterator[Problem]:
    if parallel.offload_activations and parallel.activation_checkpointing != "full":
        yield Problem(
            (*path, "offload_activations"),
            f"activation_checkpointing = {parallel.activation_checkpointing!r} keeps more than the "
            'inputs of layers, and only those are moved; set activation_checkpointing = "full"',
        )
    if parallel.offload_optimizer and isinstance(optimizer, MuonConfig):
        yield Problem(
            (*path, "offload_optimizer"),
            "Muon multiplies whole matrices in each update, which would run on CPU cores; use "
            'optimizer.type = "adamw" or "sgd", or leave the optimizer on the GPU',
        )


def inference_problems(
    config: InferenceConfig, *, may_be_elsewhere: bool = False
) -> Iterator[Problem]:
    """Contradictions within `[inference]`, for every command that has it."""
    if config.addresses is not None:
        yield from _elsewhere_problems(config, may_be_elsewhere=may_be_elsewhere)
    if config.authority is not None and config.addresses is None:
        text = f"{config.authority!r}: says whom to trust of the servers in inference.addresses, "
        yield Problem(("inference", "authority"), f"{text}and there are none; remove the key")
    if not is_loopback(config.host) and not config.allow_public_bind:
        yield Problem(
            ("inference", "host"),
            f"{config.host!r} can be reached by others; use 127.0.0.1, "
            "or set inference.allow_public_bind if that is wanted",
        )
    if config.replicas > 1 and config.gpu_sharing == "turns":
        yield Problem(
            ("inference", "gpu_sharing"),
            f"'turns': a trainer waits for one engine to leave its GPU, and inference.replicas = "
            f'{config.replicas}; use "memory", or GPUs of their own',
        )
    if config.port and config.port + config.replicas > 65536:
        yield Problem(
            ("inference", "port"),
            f"{config.port}: replicas count up from it, and {config.replicas} of them pass 65535",
        )
    yield from env_vars_problems("inference", ("inference", "env_vars"), config.env_vars)
    for name, owner in config.owned_args().items():
        yield Problem(("inference", "extra_args", name), f"has another owner: {owner}")


def _elsewhere_problems(config: InferenceConfig, *, may_be_elsewhere: bool) -> Iterator[Problem]:
    """What contradicts servers that others start. Own ones beside them would have two owners:
    a server that fails is started again by whoever started it."""
    if not may_be_elsewhere:
        text = "only an RL run asks servers that others start; remove the key"
        yield Problem(("inference", "addresses"), text)
    given = {"replicas": config.replicas != 1, "gpus": config.gpus is not None}
    given["gpu_sharing"] = config.gpu_sharing != "never"
    for name in (name for name, is_given in given.items() if is_given):
        value = getattr(config, name)
        text = f"{value!r}: the servers of inference.addresses are started by others, and the run "
        yield Problem(("inference", name), f"{text}starts none; remove one of the two keys")


def _name_problems(sources: Sequence[TrainSource | EvaluatedSource]) -> Iterator[Problem]:
    """Names of sources become names of files and metrics: valid, and unique in any letter case."""
    first: dict[str, int] = {}
    for index, source in enumerate(sources):
        name, path = source.complete.name, (*source.path, "name")
        if not re.fullmatch(NAME_PATTERN, name):
            text = (
                f"the id {source.given.id!r} is not a name for files and metrics; give the source a"
            )
            yield Problem(path, f"{text} name")
            continue
        earlier = first.setdefault(name.lower(), index)
        if earlier != index:
            text = f"{name!r} is already the name of source {earlier}; give each source its own"
            yield Problem(path, f"{text} name")


def _train_problems(source: TrainSource, *, is_pulled: bool) -> Iterator[Problem]:
    algo, given, path = source.complete.algo, source.given, source.path
    # Agents that are compared within one episode need no second one.
    is_within_episode = isinstance(algo, HierarchicalGrpoConfig) and bool(algo.episode_agents)
    if given.group_size < 2 and algo.needs_group and not is_within_episode:
        yield Problem(
            (*path, "group_size"),
            f"{given.group_size} gives {algo.type} no baseline to compare with; "
            "use at least 2, or an algorithm without groups",
        )
    if given.algo is not None:
        yield from _under((*path, "algo"), given.algo.contradictions())
    yield from reference_problems(source, is_pulled=is_pulled)
    yield from _under((*path, "curriculum"), given.curriculum.contradictions())
    yield from _temperature_problems(source)
    yield from distribution_problems(source)
    for at, seat in given.seats.items():
        total = seat.max_total_tokens
        if total is not None and (seat.max_input_tokens or 0) >= total:
            yield Problem(
                (*path, *at, "max_input_tokens"),
                f"{seat.max_input_tokens} leaves no token to sample in max_total_tokens = {total}",
            )


def _temperature_problems(source: TrainSource) -> Iterator[Problem]:
    """Tokens train at the temperature at which they were sampled, so a source has one."""
    temperature = source.complete.sampling.temperature
    if temperature == 0:
        yield Problem(
            (*_sampling_path(source, "temperature"), "temperature"),
            "0 leaves one possible reply and nothing to learn from; use a positive number here, "
            "and 0 under orchestrator.eval.sampling for greedy evaluation",
        )
    elif temperature is not None and temperature < _COLDEST:
        yield Problem(
            (*_sampling_path(source, "temperature"), "temperature"),
            f"the engine samples {temperature:g} as {_COLDEST:g}, and the trainer would "
            f"divide by the former; use {_COLDEST:g} or more",
        )
    for role, agent in source.given.agents.items():
        own = None if agent.sampling is None else agent.sampling.temperature
        if own is None or own == temperature or role in source.complete.untrained_agents:
            continue
        yield Problem(
            (*source.path, "agents", role, "sampling", "temperature"),
            f"{own:g} is not the source's {temperature:g}, at which all its tokens train; remove "
            "it, set the source's sampling.temperature, or set train = false for the role",
        )


def _sampling_path(source: TrainSource | EvaluatedSource, key: str) -> KeyPath:
    """Where a sampling value of a source is written: in the source, or in its section."""
    is_own = getattr(source.given.sampling, key) is not None
    is_inherited = not is_own and source.purpose == "train"
    return (*(source.path[:-2] if is_inherited else source.path), "sampling")


def _source_problems(source: TrainSource | EvaluatedSource) -> Iterator[Problem]:
    """Conflicts inside one source."""
    given, path = source.given, source.path
    yield from _extra_body_problems((*path, "sampling"), given.sampling)
    for at, seat in given.seats.items():
        harness, place = seat.harness or {}, (*path, *at, "harness")
        if not isinstance(harness.get("id", CHAT_HARNESS), str):
            text = f"{shown(harness['id'])} must be the name of a harness"
            yield Problem((*place, "id"), text)
        if isinstance(harness.get("config"), dict):
            yield Problem((*place, "config"), "settings of a harness stand beside its id")
    yield from _under((*path, "tasks"), given.tasks.contradictions())
    if given.address is not None and isinstance(source, TrainSource):
        yield Problem(
            (*path, "address"),
            f"{given.address!r}: a server that you run yourself knows no token of the run, so it "
            "cannot train; remove it, and name the interpreter that has the environment with "
            "python",
        )
    for name in given.settings:
        owner = f"write agents.{name}" if name in given.agents else OWNED_SETTINGS.get(name)
        if owner:
            yield Problem((*path, "settings", name), f"has another owner: {owner}")
    for role, agent in given.agents.items():
        yield from _role_problems((*path, "agents", role), agent)
    yield from env_vars_problems("environment", (*path, "env_vars"), given.env_vars)
    passed = dict.fromkeys(given.pass_env, "")
    yield from env_vars_problems("environment", (*path, "pass_env"), passed)


def _role_problems(path: KeyPath, role: RoleConfig) -> Iterator[Problem]:
    if role.model is not None and role.base_url is None:
        yield Problem((*path, "base_url"), f"missing; where is model {role.model!r} served?")
    if role.base_url is not None and role.model is None:
        yield Problem((*path, "model"), f"missing; which model of {role.base_url} plays this role?")
    if role.api_key_var is not None and role.base_url is None:
        yield Problem((*path, "api_key_var"), "needs base_url: the key is for the model behind it")
    yield from _extra_body_problems((*path, "sampling"), role.sampling)


def _extra_body_problems(path: KeyPath, sampling: SamplingConfig | None) -> Iterator[Problem]:
    """Keys that have another owner."""
    for name in sampling.extra_body if sampling is not None else ():
        if owner := OWNED_SAMPLING.get(name):
            yield Problem((*path, "extra_body", name), f"has another owner: {owner}")


def env_vars_problems(role: str, path: KeyPath, env_vars: Mapping[str, str]) -> Iterator[Problem]:
    """The variables of one process that cannot be set, each with the reason; never the values."""
    reserved = {**RESERVED_EVERYWHERE, **RESERVED[role]}
    for name, value in env_vars.items():
        place = (*path, name)
        if not _VARIABLE.fullmatch(name):
            yield Problem(place, "is not a name of a variable; use letters, digits, '_'")
        elif name in reserved:
            reason = f"gradus sets it itself: {reserved[name]}. Remove it here"
            yield Problem(place, reason)
        elif name.startswith("GRADUS_"):
            yield Problem(place, "names beginning with GRADUS_ belong to gradus itself")
        elif "\0" in value:
            yield Problem(place, "its value holds a NUL character")
