"""A config in a few lines for a person: what will run, and which processes do it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gradus.config.processes import EvaluationSourceConfig, environment_process
from gradus.config.resolve import resolve_run, run_name
from gradus.config.resolve_eval import resolve_eval
from gradus.config.resolve_sft import resolve_sft
from gradus.config.schema.environment import EnvironmentConfig, PoolConfig, StaticPoolConfig
from gradus.config.schema.eval import EvalConfig
from gradus.config.schema.inference import InferenceConfig, SamplingConfig
from gradus.config.schema.optimizers import OptimizerConfig
from gradus.config.schema.run import RunConfig
from gradus.config.schema.sft import SftConfig
from gradus.config.schema.trainer import LoraConfig
from gradus.config.seats import COMPARES_ALL_TRACES

_SUFFIX = "<8 hex>"

_RESHAPING: dict[str, tuple[object, ...]] = {
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
}
"""Keys of `sampling.extra_body` that change which tokens are drawn, with values that do not."""


def describe_run(config: RunConfig, *, is_loaded: bool = False) -> list[str]:
    """The plan of an RL run: its size, its folder, and its processes in starting order.

    `is_loaded` says that the environments were asked who plays, so that no note guesses it.
    """
    name = run_name(config, _SUFFIX)
    orchestrator = config.orchestrator
    return [
        f"run: {config.max_steps} steps of {orchestrator.groups_per_batch} groups, "
        f"at most {_counted(orchestrator.max_lag, 'batch', 'batches')} ahead",
        f"model: {config.model.name}, {config.model.max_length_tokens} tokens",
        f"folder: {Path(config.output_dir) / name}",
        "processes, in starting order:",
        *(f"  {process:<24} {what}" for process, what in _processes(config)),
        *(f"note: {note}" for note in _notes(config, is_loaded=is_loaded)),
    ]


def describe_sft(config: SftConfig) -> list[str]:
    """The plan of a supervised run."""
    return [
        f"run: {config.max_steps} steps of {config.batch_conversations} conversations "
        f"from {config.data.path}",
        f"model: {config.model.name}, {config.model.max_length_tokens} tokens",
        f"folder: {Path(config.output_dir) / run_name(config, _SUFFIX)}",
        "processes, in starting order:",
        *(f"  {process:<24} {what}" for process, what in _sft_processes(config)),
    ]


def _sft_processes(config: SftConfig) -> Iterator[tuple[str, str]]:
    """Each process of a supervised run and what it does."""
    configs = resolve_sft(config, run_dir=Path(config.output_dir), term=0)
    words = {
        "trainer": f"{_ranks(config.num_processes)}, {config.compute_dtype}, "
        f"{_update_rule(config.optimizer, config.lora)}",
        "inference": _engine(config.inference),
    }
    if config.eval is not None and configs.evaluation is not None:
        sources = configs.evaluation.evaluator.evaluation_sources
        tasks = ", ".join(map(_tasks, sources))
        words["evaluator"] = f"{tasks}, every {config.eval.interval_steps} steps"
        for source in config.eval.env:
            words[environment_process(source.unique_name, "eval")] = _environment(source)
    for process in configs.by_process():
        yield process, words[process]


def describe_eval(config: EvalConfig) -> list[str]:
    """The plan of an evaluation."""
    configs = resolve_eval(config, run_dir=Path(config.output_dir), term=0)
    lines = [
        f"evaluation: {', '.join(_tasks(source) for source in configs.evaluator.sources)}",
        f"model: {config.model.name}, "
        + (config.base_url or f"served by gradus, {config.model.max_length_tokens} tokens"),
        f"folder: {Path(config.output_dir) / run_name(config, _SUFFIX)}",
        "processes, in starting order:",
    ]
    return [*lines, *(f"  {process}" for process in configs.by_process())]


def _tasks(source: EvaluationSourceConfig) -> str:
    number = "all" if source.num_tasks is None else str(source.num_tasks)
    sampling = source.sampling
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    return f"{number} tasks of {source.name} x {source.group_size} ({how})"


def _processes(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Each process and what it does."""
    configs = resolve_run(config, run_dir=Path(config.output_dir), term=0)
    trainer, inference = config.trainer, config.inference
    evaluation = config.orchestrator.eval
    by_process: dict[str, EnvironmentConfig] = {
        environment_process(source.unique_name): source for source in config.orchestrator.train.env
    }
    for evaluated in evaluation.env if evaluation else ():
        by_process[environment_process(evaluated.unique_name, "eval")] = evaluated
    words = {
        "inference": _engine(inference),
        "trainer": f"{_ranks(trainer.num_processes)}, {trainer.compute_dtype}, "
        f"{trainer.loss.type}, {_update_rule(trainer.optimizer, trainer.lora)}",
        "orchestrator": ", ".join(
            f"{source.name} x {source.group_size} ({source.algo.type})"
            for source in configs.orchestrator.sources
        ),
    }
    for environment in configs.environments:
        words[environment.process] = _environment(by_process[environment.process])
    for process in configs.by_process():
        yield process, words[process]


def _notes(config: RunConfig, *, is_loaded: bool) -> Iterator[str]:
    """What is allowed and seldom meant, and what only the environments can decide."""
    configs = resolve_run(config, run_dir=Path(config.output_dir), term=0)
    for given, source in zip(
        config.orchestrator.train.env, configs.orchestrator.sources, strict=True
    ):
        trained = [role for role in given.agents if role not in source.untrained_agents]
        reshaping = list(_reshaping(source.sampling))
        if reshaping:
            yield (
                f"source {source.name!r}: {', '.join(reshaping)} changes the distribution that "
                "tokens are drawn from, and the trainer computes that of the temperature alone, so "
                "the two disagree on every token; leave it out unless that is meant"
            )
        if is_loaded and given.address is None:
            continue
        kind = source.algo.type
        if kind in COMPARES_ALL_TRACES and len(trained) > 1:
            yield (
                f"source {source.name!r}: {kind} compares all traces of a group, and "
                f"{', '.join(trained)} all train. The start refuses that unless the tasks name a "
                "learner_seat; rae and hierarchical_grpo tell agents apart"
            )
        if kind == "rae" and len(given.agents) < 2:
            yield (
                f"source {source.name!r}: rae needs an environment with several agents, and the "
                "config names none or one. The start refuses rae where there is only one; use grpo"
            )


def _reshaping(sampling: SamplingConfig) -> Iterator[str]:
    """Sampling settings that the trainer does not know about."""
    if sampling.top_p is not None and sampling.top_p < 1:
        yield "top_p"
    for key, neutral in _RESHAPING.items():
        value = sampling.extra_body.get(key)
        if value is not None and value not in neutral:
            yield key


def _engine(inference: InferenceConfig) -> str:
    port = inference.port or "a port that the system chooses"
    return f"vLLM, {inference.dtype}, {inference.host}, {port}"


def _environment(source: EnvironmentConfig) -> str:
    return f"{source.id}, harness {source.harness.id}, {_pool(source.pool)}"


def _update_rule(optimizer: OptimizerConfig, lora: LoraConfig | None) -> str:
    """What changes the weights, and which of them when not all."""
    what = "" if lora is None else f", LoRA rank {lora.rank}"
    return f"{optimizer.type} lr {optimizer.lr:g}{what}"


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _ranks(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes under torchrun"


def _pool(pool: PoolConfig) -> str:
    """The size of an environment's pool in words."""
    if isinstance(pool, StaticPoolConfig):
        return _counted(pool.num_workers, "worker", "workers")
    most = "any number of" if pool.max_workers is None else f"at most {pool.max_workers}"
    return f"{most} workers, {pool.multiplex} episodes each"
