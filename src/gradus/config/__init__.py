"""What the user writes, how it is read and checked, and the config of each process it becomes."""

from __future__ import annotations

from gradus.config.keys import dotted
from gradus.config.owned import variables_named_in
from gradus.config.processes import (
    EVERY_ROLE,
    EnvironmentProcessConfig,
    EvalProcessConfig,
    InferenceProcessConfig,
    RunProcessConfig,
    SftProcessConfig,
    TrackerProcessConfig,
    WorkingConfig,
)
from gradus.config.read.command_lines import converted
from gradus.config.read.load import (
    ReplayChoice,
    in_keywords,
    keyword_values,
    load_config,
    load_replay,
    top_level_keys,
)
from gradus.config.reference import command_help, sections
from gradus.config.resolve import (
    NO_KEY_VARIABLE,
    ProcessConfigs,
    ReplayConfig,
    resolve,
    run_name,
)
from gradus.config.schema import algorithms, learning
from gradus.config.schema.algorithms import OpsdConfig
from gradus.config.schema.base import StrictConfig
from gradus.config.schema.environment import (
    CurriculumConfig,
    DifficultyConfig,
    ElasticPoolConfig,
    EnvironmentConfig,
    ErrorPolicyConfig,
    EvalSourcesConfig,
    SftEvalConfig,
    StaticPoolConfig,
    TaskSelectionConfig,
    UniformConfig,
)
from gradus.config.schema.eval import EvalConfig
from gradus.config.schema.inference import InferenceConfig, SamplingConfig, ServeConfig
from gradus.config.schema.learning import (
    AdamWConfig,
)
from gradus.config.schema.model import ModelConfig
from gradus.config.schema.monitor import MonitorConfig, TrackConfig
from gradus.config.schema.orchestrator import (
    AlarmConfig,
    FilterConfig,
    GibberishConfig,
    RepetitionConfig,
    WatchdogConfig,
)
from gradus.config.schema.run import CheckpointConfig, LaunchConfig, NodesConfig, RunConfig
from gradus.config.schema.sft import SftConfig, SftDataConfig
from gradus.config.schema.trainer import (
    BenchConfig,
    LoraConfig,
    ParallelConfig,
    ServedLoraConfig,
    TrainerConfig,
)
from gradus.config.sources import (
    EvaluationSourceConfig,
    LaunchedConfig,
    SourceConfig,
    resolve_sources,
)

__all__ = [
    "AdamWConfig",
    "AlarmConfig",
    "BenchConfig",
    "CheckpointConfig",
    "CurriculumConfig",
    "DifficultyConfig",
    "EVERY_ROLE",
    "ElasticPoolConfig",
    "EnvironmentConfig",
    "EnvironmentProcessConfig",
    "ErrorPolicyConfig",
    "EvalConfig",
    "EvalSourcesConfig",
    "EvalProcessConfig",
    "EvaluationSourceConfig",
    "FilterConfig",
    "GibberishConfig",
    "InferenceConfig",
    "InferenceProcessConfig",
    "LaunchConfig",
    "LaunchedConfig",
    "LoraConfig",
    "ModelConfig",
    "MonitorConfig",
    "NO_KEY_VARIABLE",
    "NodesConfig",
    "OpsdConfig",
    "ParallelConfig",
    "ProcessConfigs",
    "ReplayChoice",
    "ReplayConfig",
    "RepetitionConfig",
    "RunConfig",
    "RunProcessConfig",
    "SamplingConfig",
    "ServeConfig",
    "ServedLoraConfig",
    "SftConfig",
    "SftDataConfig",
    "SftEvalConfig",
    "SftProcessConfig",
    "SourceConfig",
    "StaticPoolConfig",
    "StrictConfig",
    "TaskSelectionConfig",
    "TrackConfig",
    "TrackerProcessConfig",
    "TrainerConfig",
    "UniformConfig",
    "WatchdogConfig",
    "algorithms",
    "WorkingConfig",
    "command_help",
    "converted",
    "dotted",
    "in_keywords",
    "keyword_values",
    "learning",
    "load_config",
    "load_replay",
    "resolve",
    "resolve_sources",
    "run_name",
    "sections",
    "top_level_keys",
    "variables_named_in",
]
