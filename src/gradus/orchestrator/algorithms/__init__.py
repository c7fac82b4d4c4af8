"""Rewards become advantages and loss weights."""

from __future__ import annotations

from gradus.config import algorithms
from gradus.orchestrator.algorithms.base import Algorithm
from gradus.orchestrator.algorithms.distill import Scorer
from gradus.plugins import building, find_plugin, refuse_async


def needs_reference(config: algorithms.AlgorithmConfig) -> bool:
    """Tell whether the algorithm asks a model: its class says `needs_reference = True`."""
    return _says(config, "needs_reference")


def reads_policy_tokens(config: algorithms.AlgorithmConfig) -> bool:
    """Whether the reference model gets the policy's tokens, and must have its tokenizer: the class
    says `reads_policy_tokens = True`."""
    return _says(config, "reads_policy_tokens")


def compares_all_traces(config: algorithms.AlgorithmConfig) -> bool:
    """Whether all traces of a group have one baseline: the class says `compares_all_traces = True`,
    and so does a class that inherits from such a one."""
    return _says(config, "compares_all_traces")


def _says(config: algorithms.AlgorithmConfig, fact: str) -> bool:
    return bool(getattr(find_plugin("algorithm", config.target), fact, False))


def build_algorithm(
    config: algorithms.AlgorithmConfig, reference: Scorer | None = None
) -> Algorithm:
    """The algorithm of one source; refuses options that its class does not take."""
    kind = find_plugin("algorithm", config.target)
    asked = {"reference": reference} if needs_reference(config) else {}
    name = f"algorithm {config.type!r}"
    refuse_async(name, kind, "state", "load_state")
    with building(name, config.arguments()):
        algorithm: Algorithm = kind(**config.arguments_for(kind), **asked)
    return algorithm
