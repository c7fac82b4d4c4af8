"""Rewards become advantages and loss weights."""

from __future__ import annotations

from gradus.config import AlgorithmConfig
from gradus.orchestrator.algorithms.base import Algorithm
from gradus.orchestrator.algorithms.distill import (
    FrozenSampler,
    OnPolicyDistillation,
    Scorer,
    SelfDistillation,
)
from gradus.orchestrator.algorithms.echo import Echo
from gradus.orchestrator.algorithms.group_relative import (
    GroupRelative,
    HierarchicalGroupRelative,
    MaxRl,
)
from gradus.orchestrator.algorithms.rae import RoleAdvantageEstimation
from gradus.plugins import building, find_plugin, refuse_async

ALGORITHMS: dict[str, type] = {
    "grpo": GroupRelative,
    "max_rl": MaxRl,
    "hierarchical_grpo": HierarchicalGroupRelative,
    "rae": RoleAdvantageEstimation,
    "echo": Echo,
    "opd": OnPolicyDistillation,
    "opsd": SelfDistillation,
    "sft": FrozenSampler,
}
"""Registered names; anything else is "package.module:Class"."""


def needs_reference(config: AlgorithmConfig) -> bool:
    """Whether the algorithm asks a model: its class says `needs_reference = True`."""
    kind = find_plugin("algorithm", config.type, ALGORITHMS)
    return bool(getattr(kind, "needs_reference", False))


def reads_policy_tokens(config: AlgorithmConfig) -> bool:
    """Whether the reference model gets the policy's tokens, and must have its tokenizer: the class
    says `reads_policy_tokens = True`."""
    kind = find_plugin("algorithm", config.type, ALGORITHMS)
    return bool(getattr(kind, "reads_policy_tokens", False))


def compares_all_traces(config: AlgorithmConfig) -> bool:
    """Whether all traces of a group have one baseline: the class says `compares_all_traces = True`,
    and so does a class that inherits from such a one."""
    kind = find_plugin("algorithm", config.type, ALGORITHMS)
    return bool(getattr(kind, "compares_all_traces", False))


def build_algorithm(config: AlgorithmConfig, reference: Scorer | None = None) -> Algorithm:
    """The algorithm of one source; refuses unknown names and options."""
    kind = find_plugin("algorithm", config.type, ALGORITHMS)
    asked = {"reference": reference} if needs_reference(config) else {}
    name = f"algorithm {config.type!r}"
    refuse_async(name, kind, "state", "load_state")
    with building(name, config.options):
        algorithm: Algorithm = kind(**config.options, **asked)
    return algorithm
