"""What keeps an evaluation from working, inside a run and by itself."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gradus.config.checks import environment_problems, extra_body_problems, inference_problems
from gradus.config.environment_variables import env_vars_problems
from gradus.config.eval import EvalConfig
from gradus.config.evaluation import EvalEnvironmentConfig
from gradus.config.problems import Problem
from gradus.config.run import RunConfig
from gradus.config.sampling import SamplingConfig
from gradus.config.schema import KeyPath
from gradus.config.sft import SftConfig
from gradus.config.sources import (
    DEFAULT_SAMPLING,
    check_names,
    evaluation_sampling,
    merged_sampling,
)

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
