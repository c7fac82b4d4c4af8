"""What the user wrote → the config of each process; pure, and the only derivation there is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from gradus.config.check import run_evaluation_problems, run_problems
from gradus.config.problems import refuse
from gradus.config.processes import (
    EVERY_ROLE,
    EnvironmentProcessConfig,
    EvaluationSourceConfig,
    InferenceProcessConfig,
    OrchestratorProcessConfig,
    Purpose,
    SourceConfig,
    TrainerProcessConfig,
    environment_process,
)
from gradus.config.schema.base import StrictConfig
from gradus.config.schema.environment import (
    AgentRoleConfig,
    EnvironmentConfig,
    EvalEnvironmentConfig,
    EvalSourcesConfig,
    HarnessChoice,
    TrainEnvironmentConfig,
)
from gradus.config.schema.eval import EvalConfig
from gradus.config.schema.inference import SamplingConfig
from gradus.config.schema.run import RunConfig
from gradus.config.schema.sft import SftConfig
from gradus.config.schema.trainer import ServedLoraConfig, data_parallel_size
from gradus.config.sources import (
    evaluation_sampling,
    is_frozen,
    merged_sampling,
    source_algo,
    source_sampling,
    untrained_agents,
)

CHAT_HARNESS = "chat"
CHAT_HARNESS_MODULE = "gradus_chat"
"""The id under which verifiers can import the harness `chat`."""

NO_KEY_VARIABLE = "GRADUS_NO_KEY"
"""Never set. Named for endpoints without a key, so that no key of another service is sent."""

_MAX_ENVS_LENGTH = 28
_MAX_MODEL_LENGTH = 24


@dataclass(frozen=True)
class ProcessConfigs:
    """The config of every process of one RL run."""

    inference: InferenceProcessConfig
    """The inference server."""
    environments: tuple[EnvironmentProcessConfig, ...]
    """One process for each source without an address of its own."""
    trainer: TrainerProcessConfig
    """All ranks of the trainer."""
    orchestrator: OrchestratorProcessConfig
    """The orchestrator."""
    env_vars: Mapping[str, Mapping[str, str]]
    """Process name → variables that its config asks for; they stand in no process config."""

    def by_process(self) -> dict[str, StrictConfig]:
        """Process name → its config, in starting order; the file is `config/<name>.json`."""
        return {
            "inference": self.inference,
            **{config.process: config for config in self.environments},
            "trainer": self.trainer,
            "orchestrator": self.orchestrator,
        }


def resolve_run(
    config: RunConfig, *, run_dir: Path, term: int, resume_step: int | None = None
) -> ProcessConfigs:
    """The processes of an RL run; refuses a config whose sections contradict each other.

    Environment variables may hold secrets, so they stay out of the process configs, which become
    files; the launcher sets them when it starts a process.
    """
    refuse([*run_problems(config), *run_evaluation_problems(config)])
    root = str(run_dir)
    return ProcessConfigs(
        inference=InferenceProcessConfig(
            run_dir=root,
            term=term,
            model=config.model,
            seed=config.seed,
            lora_rank=_served_rank(config.trainer.lora),
            inference=config.inference.model_copy(update={"env_vars": {}}),
        ),
        environments=(
            *(
                _train_process(config, source, run_dir=root, term=term)
                for source in config.orchestrator.train.env
                if source.address is None
            ),
            *(
                environment_process_config(source, run_dir=root, term=term, purpose="eval")
                for source in _evaluated(config)
                if source.address is None
            ),
        ),
        trainer=TrainerProcessConfig(
            run_dir=root,
            term=term,
            model=config.model,
            max_steps=config.max_steps,
            seed=config.seed,
            num_inference_workers=config.inference.tensor_parallel_size,
            trainer=config.trainer.model_copy(
                update={"env_vars": {}, "keep_published": _num_published(config)}
            ),
            checkpoint=config.checkpoint,
            resume_step=resume_step,
        ),
        orchestrator=_orchestrator_process(
            config, run_dir=root, term=term, resume_step=resume_step
        ),
        env_vars={
            "inference": config.inference.env_vars,
            **{
                environment_process(source.unique_name, purpose): source.env_vars
                for source, purpose in _played(config)
            },
            "trainer": config.trainer.env_vars,
            "orchestrator": config.orchestrator.env_vars,
        },
    )


def _served_rank(lora: ServedLoraConfig | None) -> int | None:
    """Rank of the adapters that reach inference as adapters."""
    return lora.rank if lora is not None and lora.serve == "adapter" else None


def run_name(config: RunConfig | SftConfig | EvalConfig, suffix: str) -> str:
    """The name that was given, or `<envs>--<model>--<suffix>`; `suffix` is 8 hex digits.

    >>> run_name(config, "0123abcd")
    'gradus-reverse-text--tiny--0123abcd'
    """
    if config.name is not None:
        return config.name
    if isinstance(config, SftConfig):
        what = PurePath(config.data.path).stem
    elif isinstance(config, EvalConfig):
        what = "_".join(source.unique_name for source in config.env)
    else:
        what = "_".join(source.unique_name for source in config.orchestrator.train.env)
    model = PurePath(config.model.name).name
    return f"{_name_part(what, _MAX_ENVS_LENGTH)}--{_name_part(model, _MAX_MODEL_LENGTH)}--{suffix}"


def _name_part(text: str, max_length: int) -> str:
    """`text` as a part of a name: only safe characters, none of them at the ends."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:max_length].strip("._-")
    return safe or "x"


def _orchestrator_process(
    config: RunConfig, *, run_dir: str, term: int, resume_step: int | None
) -> OrchestratorProcessConfig:
    """The orchestrator's config, with complete sources."""
    train = config.orchestrator.train
    bare = [source.model_copy(update={"env_vars": {}}) for source in train.env]
    orchestrator = config.orchestrator.model_copy(
        update={
            "env_vars": {},
            "train": train.model_copy(update={"env": bare}),
            "eval": _bare_evaluation(config),
        }
    )
    return OrchestratorProcessConfig(
        run_dir=run_dir,
        term=term,
        model=config.model,
        max_steps=config.max_steps,
        seed=config.seed,
        sources=[_source(config, source) for source in train.env],
        evaluation_sources=[
            evaluation_source(source, evaluation_sampling(config)) for source in _evaluated(config)
        ],
        orchestrator=orchestrator,
        data_parallel_size=data_parallel_size(
            config.trainer.num_processes, config.trainer.parallel
        ),
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        updates_per_batch=config.trainer.updates_per_batch,
        environment_restart_seconds=(
            config.launch.ready_timeout_seconds if config.launch.environment_restarts else 0.0
        ),
        checkpoint=config.checkpoint,
        resume_step=resume_step,
    )


def _bare_evaluation(config: RunConfig) -> EvalSourcesConfig | None:
    """The evaluation's section without environment variables, which may hold secrets."""
    evaluation = config.orchestrator.eval
    if evaluation is None:
        return None
    bare = [source.model_copy(update={"env_vars": {}}) for source in evaluation.env]
    section: EvalSourcesConfig = evaluation.model_copy(update={"env": bare})
    return section


def _source(config: RunConfig, source: TrainEnvironmentConfig) -> SourceConfig:
    """One source with nothing left to inherit."""
    return SourceConfig(
        name=source.unique_name,
        ratio=source.ratio,
        group_size=source.group_size,
        sampling=source_sampling(config, source),
        algo=source_algo(config, source),
        timeout=source.timeout,
        address=source.address,
        state_columns=source.state_columns,
        untrained_agents=untrained_agents(source),
        curriculum=source.curriculum,
        errors=source.errors,
        is_frozen=is_frozen(source),
    )


def _evaluated(config: RunConfig) -> list[EvalEnvironmentConfig]:
    return [] if config.orchestrator.eval is None else config.orchestrator.eval.env


def _played(config: RunConfig) -> list[tuple[EnvironmentConfig, Purpose]]:
    """Every source, with what it is for."""
    train: list[tuple[EnvironmentConfig, Purpose]] = [
        (source, "train") for source in config.orchestrator.train.env
    ]
    return train + [(source, "eval") for source in _evaluated(config)]


def _num_published(config: RunConfig) -> int:
    """Versions on disk: while an evaluation holds one back, the trainer may be `max_lag` ahead."""
    return max(config.trainer.keep_published, config.orchestrator.max_lag + 1)


def evaluation_source(
    source: EvalEnvironmentConfig, section: SamplingConfig
) -> EvaluationSourceConfig:
    """One evaluated environment; `section` completes its sampling."""
    return EvaluationSourceConfig(
        name=source.unique_name,
        num_tasks=source.num_tasks,
        group_size=source.group_size,
        sampling=merged_sampling(source.sampling, section),
        timeout=source.timeout,
        address=source.address,
        state_columns=source.state_columns,
        unmeasured_agents=untrained_agents(source),
    )


def environment_process_config(
    source: EnvironmentConfig, *, run_dir: str, term: int, purpose: Purpose
) -> EnvironmentProcessConfig:
    """The process that plays a source."""
    return EnvironmentProcessConfig(
        run_dir=run_dir,
        term=term,
        name=source.unique_name,
        pool=source.pool,
        verifiers=verifiers_config(source),
        env_var_names=sorted({*source.env_vars, *source.pass_env}),
        passed_env=sorted({*source.pass_env} - source.env_vars.keys()),
        purpose=purpose,
    )


def _train_process(
    config: RunConfig, source: TrainEnvironmentConfig, *, run_dir: str, term: int
) -> EnvironmentProcessConfig:
    """The process that plays a source that trains, with what learns from it."""
    process = environment_process_config(source, run_dir=run_dir, term=term, purpose="train")
    learning = {"algo": source_algo(config, source), "untrained_agents": untrained_agents(source)}
    learnt: EnvironmentProcessConfig = process.model_copy(update=learning)
    return learnt


def verifiers_config(source: EnvironmentConfig) -> dict[str, Any]:
    """verifiers' own EnvConfig for a source, as a dict.

    `id` names a taskset; with `taskset.id` given, it names the environment that plays that
    taskset. Every named role is a seat and takes from the source what it leaves open; EVERY_ROLE
    holds the seat of the others.
    """
    result: dict[str, Any] = {
        **source.settings,
        "taskset": {"id": source.id, **source.taskset},
        "timeout": {
            "episode": source.timeout.episode_seconds,
            "finalize": source.timeout.finalize_seconds,
        },
    }
    if "id" in source.taskset:
        result["id"] = source.id
    for name, role in {EVERY_ROLE: AgentRoleConfig(), **source.agents}.items():
        result[name] = _seat(source, role)
    return result


def _seat(source: EnvironmentConfig, role: AgentRoleConfig) -> dict[str, Any]:
    """verifiers' AgentConfig of one role."""
    seat: dict[str, Any] = {
        "harness": _harness(source.harness if role.harness is None else role.harness),
        "runtime": source.runtime,
        "max_turns": source.max_turns if role.max_turns is None else role.max_turns,
        "max_input_tokens": source.max_input_tokens,
        "max_output_tokens": source.max_output_tokens,
        "max_total_tokens": source.max_total_tokens,
        "timeout": {
            "setup": source.timeout.setup_seconds,
            "rollout": source.timeout.agent_seconds,
            "finalize": source.timeout.finalize_seconds,
            "scoring": source.timeout.scoring_seconds,
        },
    }
    if source.errors.agent_retries:
        # verifiers counts per rule, so each type has a budget of its own.
        rules = [
            {"type": kind, "max_retries": source.errors.agent_retries}
            for kind in source.errors.retry_on
        ]
        seat["retries"] = {"max_retries": 0, "rules": rules}
    if role.sampling is not None:
        seat["sampling"] = _sampling(role.sampling)
    if role.base_url is not None:
        # A null takes the key out: only vLLM knows it, and only the policy has versions.
        seat["sampling"] = {"cache_salt": None, **seat.get("sampling", {})}
        seat["model"] = role.model
        seat["client"] = {
            "type": "eval",
            "base_url": role.base_url,
            "api_key_var": role.api_key_var or NO_KEY_VARIABLE,
        }
    return seat


def _harness(harness: HarnessChoice) -> dict[str, Any]:
    """verifiers' HarnessConfig."""
    is_ours = harness.id == CHAT_HARNESS
    return {**harness.config, "id": CHAT_HARNESS_MODULE if is_ours else harness.id}


def _sampling(sampling: SamplingConfig) -> dict[str, Any]:
    """verifiers' SamplingConfig with only the values that are set."""
    values = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_completion_tokens,
    }
    given = {key: value for key, value in values.items() if value is not None}
    return {**sampling.extra_body, **given}
