"""What the user writes, as one strict tree, and how it becomes one config per process."""

from __future__ import annotations

from gradus.config.algorithm_options import ALGORITHM_OPTIONS
from gradus.config.check import ALGORITHMS, CURRICULA, FILTERS, LOSSES, parallel_problems
from gradus.config.keys import dotted
from gradus.config.machine import (
    NO_COMPILER,
    check_eval,
    check_run,
    check_serve,
    check_sft,
    has_compiler,
    has_module,
    head_problem,
    is_on_this_machine,
    plugin_module,
)
from gradus.config.problems import nearest, refuse
from gradus.config.processes import (
    EVERY_ROLE,
    EnvironmentProcessConfig,
    EvaluationSourceConfig,
    EvaluatorProcessConfig,
    InferenceProcessConfig,
    OrchestratorProcessConfig,
    Purpose,
    ReplayProcessConfig,
    SftEvaluatorProcessConfig,
    SftProcessConfig,
    SourceConfig,
    TrainerProcessConfig,
    environment_process,
)
from gradus.config.read.layers import MergedConfig
from gradus.config.read.load import load_config, top_level_keys
from gradus.config.read.prime_rl import from_prime_rl
from gradus.config.read.toml import read_config_file
from gradus.config.reference import command_help, option_sections, sections
from gradus.config.replay import (
    ReplayChoice,
    ReplayConfigs,
    differences,
    load_replay,
    one_config,
    recorded_config,
    resolve_replay,
)
from gradus.config.resolve import NO_KEY_VARIABLE, resolve_run, run_name
from gradus.config.resolve_eval import continued_identity, resolve_eval
from gradus.config.resolve_sft import resolve_sft
from gradus.config.schema.algorithms import AlgorithmConfig, ReferenceConfig
from gradus.config.schema.base import StrictConfig
from gradus.config.schema.environment import (
    RETRIED_ERRORS,
    CurriculumConfig,
    ElasticPoolConfig,
    EnvironmentConfig,
    ErrorPolicyConfig,
    EvalSourcesConfig,
    SftEvalConfig,
    StaticPoolConfig,
    TrainEnvironmentConfig,
)
from gradus.config.schema.eval import EvalConfig
from gradus.config.schema.inference import InferenceConfig, SamplingConfig, ServeConfig
from gradus.config.schema.losses import option_problems
from gradus.config.schema.model import ModelConfig, renderer_settings
from gradus.config.schema.optimizers import AdamWConfig, MuonConfig, OptimizerConfig, SgdConfig
from gradus.config.schema.orchestrator import FilterConfig, WatchdogConfig
from gradus.config.schema.run import CheckpointConfig, LaunchConfig, RunConfig
from gradus.config.schema.sft import SftConfig, SftDataConfig
from gradus.config.schema.trainer import (
    BenchConfig,
    LoraConfig,
    LossConfig,
    ParallelConfig,
    ServedLoraConfig,
    TrainerConfig,
)
from gradus.config.seats import LEARNER_SEAT, seat_refusal
from gradus.config.show import describe_eval, describe_run, describe_sft
from gradus.config.sources import source_algo
from gradus.config.variables import PASSED_TO_EVERY_PROCESS, variables_named_in

__all__ = [
    "ALGORITHMS",
    "ALGORITHM_OPTIONS",
    "AdamWConfig",
    "AlgorithmConfig",
    "BenchConfig",
    "CURRICULA",
    "CheckpointConfig",
    "CurriculumConfig",
    "EVERY_ROLE",
    "ElasticPoolConfig",
    "EnvironmentConfig",
    "EnvironmentProcessConfig",
    "ErrorPolicyConfig",
    "EvalConfig",
    "EvalSourcesConfig",
    "EvaluationSourceConfig",
    "EvaluatorProcessConfig",
    "FILTERS",
    "FilterConfig",
    "InferenceConfig",
    "InferenceProcessConfig",
    "LEARNER_SEAT",
    "LOSSES",
    "LaunchConfig",
    "LoraConfig",
    "LossConfig",
    "MergedConfig",
    "ModelConfig",
    "MuonConfig",
    "NO_COMPILER",
    "NO_KEY_VARIABLE",
    "OptimizerConfig",
    "OrchestratorProcessConfig",
    "PASSED_TO_EVERY_PROCESS",
    "ParallelConfig",
    "Purpose",
    "RETRIED_ERRORS",
    "ReferenceConfig",
    "ReplayChoice",
    "ReplayConfigs",
    "ReplayProcessConfig",
    "RunConfig",
    "SamplingConfig",
    "ServeConfig",
    "ServedLoraConfig",
    "SftConfig",
    "SftDataConfig",
    "SftEvalConfig",
    "SftEvaluatorProcessConfig",
    "SftProcessConfig",
    "SgdConfig",
    "SourceConfig",
    "StaticPoolConfig",
    "StrictConfig",
    "TrainEnvironmentConfig",
    "TrainerConfig",
    "TrainerProcessConfig",
    "WatchdogConfig",
    "check_eval",
    "check_run",
    "check_serve",
    "check_sft",
    "command_help",
    "continued_identity",
    "describe_eval",
    "describe_run",
    "describe_sft",
    "differences",
    "dotted",
    "environment_process",
    "from_prime_rl",
    "has_compiler",
    "has_module",
    "head_problem",
    "is_on_this_machine",
    "load_config",
    "load_replay",
    "nearest",
    "one_config",
    "option_problems",
    "option_sections",
    "parallel_problems",
    "plugin_module",
    "read_config_file",
    "recorded_config",
    "refuse",
    "renderer_settings",
    "resolve_eval",
    "resolve_replay",
    "resolve_run",
    "resolve_sft",
    "run_name",
    "seat_refusal",
    "sections",
    "source_algo",
    "top_level_keys",
    "variables_named_in",
]
