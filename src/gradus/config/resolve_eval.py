"""`gradus eval`: what the user wrote → the config of each process; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradus.config.check import eval_problems
from gradus.config.problems import refuse
from gradus.config.processes import (
    EnvironmentProcessConfig,
    EvaluatorProcessConfig,
    InferenceProcessConfig,
    environment_process,
)
from gradus.config.replay import differences
from gradus.config.resolve import (
    environment_process_config,
    evaluation_source,
    verifiers_config,
)
from gradus.config.schema.base import StrictConfig
from gradus.config.schema.environment import EvalEnvironmentConfig
from gradus.config.schema.eval import EvalConfig
from gradus.config.schema.inference import SamplingConfig
from gradus.config.schema.model import ModelConfig
from gradus.config.sources import DEFAULT_SAMPLING, merged_sampling, untrained_agents
from gradus.errors import ConfigError

_SPEED_ONLY = {
    *("env_vars", "host", "port", "allow_public_bind", "start_timeout_seconds"),
    *("max_num_seqs", "kv_cache_gib", "gpu_memory_utilization"),
}
"""Settings of the server that leave what it answers as it is."""


@dataclass(frozen=True)
class EvalProcessConfigs:
    """The config of every process of one evaluation."""

    inference: InferenceProcessConfig | None
    """The inference server. None when an endpoint serves the model."""
    environments: tuple[EnvironmentProcessConfig, ...]
    """One process for each environment without an address of its own."""
    evaluator: EvaluatorProcessConfig
    """Plays and records."""
    env_vars: Mapping[str, Mapping[str, str]]
    """Process name → variables that its config asks for; they stand in no process config."""

    def by_process(self) -> dict[str, StrictConfig]:
        """Process name → its config, in starting order."""
        served = {} if self.inference is None else {"inference": self.inference}
        environments = {config.process: config for config in self.environments}
        return {**served, **environments, "evaluator": self.evaluator}


def resolve_eval(config: EvalConfig, *, run_dir: Path, term: int) -> EvalProcessConfigs:
    """The processes of an evaluation; refuses a config that contradicts itself."""
    refuse(eval_problems(config))
    root = str(run_dir)
    inference = InferenceProcessConfig(
        run_dir=root,
        term=term,
        model=config.model,
        seed=config.seed,
        inference=config.inference.model_copy(update={"env_vars": {}}),
    )
    section = merged_sampling(config.sampling, DEFAULT_SAMPLING)
    return EvalProcessConfigs(
        inference=inference if config.base_url is None else None,
        environments=tuple(
            _environment(config, source, root, term)
            for source in config.env
            if source.address is None
        ),
        evaluator=EvaluatorProcessConfig(
            run_dir=root,
            term=term,
            model=config.model,
            base_url=config.base_url,
            api_key_var=config.api_key_var,
            sources=[evaluation_source(source, section) for source in config.env],
            max_in_flight_episodes=config.max_in_flight_episodes,
            max_retries=config.max_retries,
            identity=_identity(config),
        ),
        env_vars={
            "inference": config.inference.env_vars,
            **{
                environment_process(source.unique_name, "eval"): source.env_vars
                for source in config.env
            },
        },
    )


def _environment(
    config: EvalConfig, source: EvalEnvironmentConfig, run_dir: str, term: int
) -> EnvironmentProcessConfig:
    process = environment_process_config(source, run_dir=run_dir, term=term, purpose="eval")
    if config.api_key_var is None:
        return process
    names = sorted({*process.env_var_names, config.api_key_var})
    told: EnvironmentProcessConfig = process.model_copy(update={"env_var_names": names})
    return told


def _identity(config: EvalConfig) -> dict[str, Any]:
    section = merged_sampling(config.sampling, DEFAULT_SAMPLING)
    identity = evaluation_identity(config.model, config.env, section)
    identity["base_url"] = config.base_url
    if config.base_url is None:
        identity["seed"] = config.seed
        identity["inference"] = config.inference.model_dump(mode="json", exclude=_SPEED_ONLY)
    return identity


def evaluation_identity(
    model: ModelConfig, sources: Sequence[EvalEnvironmentConfig], section: SamplingConfig
) -> dict[str, Any]:
    """What the episodes already played depend on. How many are played is not part of it."""
    played = {
        source.unique_name: {
            "environment": verifiers_config(source),
            "sampling": merged_sampling(source.sampling, section).model_dump(mode="json"),
            "unmeasured_agents": untrained_agents(source),
        }
        for source in sources
    }
    return {"model": model.model_dump(mode="json"), "sources": played}


def continued_identity(before: Any, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity to note when an evaluation goes on: that of all its episodes, old and new.

    ConfigError, naming every key that differs, when the old ones are of something else. Sources
    that the config no longer names stay noted, like their episodes.
    """
    old = before if isinstance(before, dict) else {}
    sources = old.get("sources", {})
    now = dict(identity)
    # Digests are unknown while the model was not on this disk; then the known ones hold for both.
    files = old.get("files") or now.get("files") or {}
    now["files"] = now.get("files") or files
    expected = {name: sources.get(name, source) for name, source in now["sources"].items()}
    changed = list(differences(old | {"sources": expected, "files": files}, now))
    if changed:
        lines = "\n".join(f"{key} was {was!r} and is {new!r}" for key, was, new in changed)
        raise ConfigError(
            "this evaluation began with something else, so its episodes cannot be kept; put it "
            f"back, or choose another name:\n{lines}"
        )
    return now | {"sources": sources | now["sources"]}
