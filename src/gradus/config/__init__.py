"""What the user writes, as one strict tree, and how it becomes one config per process."""

from __future__ import annotations

from gradus.config.algorithm import AlgorithmConfig
from gradus.config.algorithm_options import ALGORITHM_OPTIONS
from gradus.config.base import StrictConfig
from gradus.config.bench import BenchConfig
from gradus.config.checkpoint import CheckpointConfig
from gradus.config.checks import ALGORITHMS, CURRICULA, FILTERS, LOSSES, parallel_problems
from gradus.config.curriculum import CurriculumConfig
from gradus.config.differences import differences
from gradus.config.document import option_sections, sections
from gradus.config.environment import (
    ElasticPoolConfig,
    EnvironmentConfig,
    StaticPoolConfig,
    TrainEnvironmentConfig,
)
from gradus.config.environment_variables import PASSED_TO_EVERY_PROCESS, variables_named_in
from gradus.config.error_policy import RETRIED_ERRORS, ErrorPolicyConfig
from gradus.config.eval import EvalConfig
from gradus.config.evaluation import EvalSourcesConfig, SftEvalConfig
from gradus.config.files import read_config_file
from gradus.config.help import command_help
from gradus.config.inference import InferenceConfig
from gradus.config.installed import has_module, plugin_module
from gradus.config.load import load_config, top_level_keys
from gradus.config.lora import LoraConfig, ServedLoraConfig
from gradus.config.loss_options import option_problems
from gradus.config.merge import MergedConfig
from gradus.config.model import ModelConfig, renderer_settings
from gradus.config.optimizer import AdamWConfig, MuonConfig, OptimizerConfig, SgdConfig
from gradus.config.orchestrator import FilterConfig
from gradus.config.overview import describe_eval, describe_run, describe_sft
from gradus.config.parallel import ParallelConfig
from gradus.config.parallel_machine import NO_COMPILER, has_compiler, head_problem
from gradus.config.preflight import (
    check_eval,
    check_run,
    check_serve,
    check_sft,
    is_on_this_machine,
)
from gradus.config.prime_rl import from_prime_rl
from gradus.config.problems import nearest, refuse
from gradus.config.process import (
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
from gradus.config.reference import ReferenceConfig
from gradus.config.replay import (
    ReplayChoice,
    ReplayConfigs,
    load_replay,
    one_config,
    recorded_config,
    resolve_replay,
)
from gradus.config.resolve import NO_KEY_VARIABLE, resolve_run, run_name
from gradus.config.resolve_eval import continued_identity, resolve_eval
from gradus.config.resolve_sft import resolve_sft
from gradus.config.run import LaunchConfig, RunConfig
from gradus.config.sampling import SamplingConfig
from gradus.config.schema import dotted
from gradus.config.seats import LEARNER_SEAT, seat_refusal
from gradus.config.serve import ServeConfig
from gradus.config.sft import SftConfig, SftDataConfig
from gradus.config.sources import source_algo
from gradus.config.trainer import LossConfig, TrainerConfig
from gradus.config.watchdog import WatchdogConfig

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
