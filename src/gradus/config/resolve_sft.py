"""`gradus sft`: what the user wrote → the config of each process; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gradus.config.check import sft_evaluation_problems, sft_problems
from gradus.config.problems import refuse
from gradus.config.processes import (
    EnvironmentProcessConfig,
    InferenceProcessConfig,
    SftEvaluatorProcessConfig,
    SftProcessConfig,
    environment_process,
)
from gradus.config.resolve import environment_process_config, evaluation_source
from gradus.config.resolve_eval import evaluation_identity
from gradus.config.schema.base import StrictConfig
from gradus.config.schema.environment import SftEvalConfig
from gradus.config.schema.inference import InferenceConfig
from gradus.config.schema.sft import SftConfig
from gradus.config.sources import DEFAULT_SAMPLING, merged_sampling


@dataclass(frozen=True)
class SftEvaluationConfigs:
    """The processes that evaluate beside a supervised trainer."""

    inference: InferenceProcessConfig
    """Serves the versions, one at a time."""
    environments: tuple[EnvironmentProcessConfig, ...]
    """One process for each environment without an address of its own."""
    evaluator: SftEvaluatorProcessConfig
    """Applies the versions, plays and records."""


@dataclass(frozen=True)
class SftProcessConfigs:
    """The config of every process of one supervised run."""

    trainer: SftProcessConfig
    """All ranks of the trainer."""
    evaluation: SftEvaluationConfigs | None = None
    """None when nothing is evaluated."""
    env_vars: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Process name → variables that its config asks for; they stand in no process config."""

    def by_process(self) -> dict[str, StrictConfig]:
        """Process name → its config, in starting order."""
        if self.evaluation is None:
            return {"trainer": self.trainer}
        return {
            "inference": self.evaluation.inference,
            **{config.process: config for config in self.evaluation.environments},
            "trainer": self.trainer,
            "evaluator": self.evaluation.evaluator,
        }


def resolve_sft(
    config: SftConfig, *, run_dir: Path, term: int, resume_step: int | None = None
) -> SftProcessConfigs:
    """The processes of a supervised run; refuses a config that contradicts itself."""
    refuse([*sft_problems(config), *sft_evaluation_problems(config)])
    root, section = str(run_dir), config.eval
    bare_section = None if section is None else _bare_section(section)
    inference = _bare_inference(config.inference)
    sft = config.model_copy(update={"env_vars": {}, "inference": inference, "eval": bare_section})
    trainer = SftProcessConfig(run_dir=root, term=term, sft=sft, resume_step=resume_step)
    own = {"trainer": config.env_vars}
    if section is None:
        return SftProcessConfigs(trainer, env_vars=own)
    own["inference"] = config.inference.env_vars
    for source in section.env:
        own[environment_process(source.unique_name, "eval")] = source.env_vars
    return SftProcessConfigs(trainer, _evaluation(config, section, trainer), own)


def _evaluation(
    config: SftConfig, section: SftEvalConfig, trainer: SftProcessConfig
) -> SftEvaluationConfigs:
    root, term = trainer.run_dir, trainer.term
    sampling = merged_sampling(section.sampling, DEFAULT_SAMPLING)
    return SftEvaluationConfigs(
        inference=InferenceProcessConfig(
            run_dir=root,
            term=term,
            model=config.model,
            seed=config.seed,
            inference=_bare_inference(config.inference),
        ),
        environments=tuple(
            environment_process_config(source, run_dir=root, term=term, purpose="eval")
            for source in section.env
            if source.address is None
        ),
        evaluator=SftEvaluatorProcessConfig(
            run_dir=root,
            term=term,
            model=config.model,
            max_steps=config.max_steps,
            evaluation_sources=[evaluation_source(source, sampling) for source in section.env],
            eval=_bare_section(section),
            identity=evaluation_identity(config.model, section.env, sampling),
            resume_step=trainer.resume_step,
        ),
    )


def _bare_inference(inference: InferenceConfig) -> InferenceConfig:
    """Environment variables may hold secrets, so they reach no file."""
    bare: InferenceConfig = inference.model_copy(update={"env_vars": {}})
    return bare


def _bare_section(section: SftEvalConfig) -> SftEvalConfig:
    env = [source.model_copy(update={"env_vars": {}}) for source in section.env]
    bare: SftEvalConfig = section.model_copy(update={"env": env})
    return bare
