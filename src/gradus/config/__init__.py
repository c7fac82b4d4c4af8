"""What the user writes, how it is read and checked, and the config of each process it becomes."""

from __future__ import annotations

from gradus.config import keys
from gradus.config.front import (
    Layers,
    given_values,
    load_config,
    read_config_file,
    top_level_keys,
)
from gradus.config.keys import dotted
from gradus.config.owned import variables_named_in
from gradus.config.problems import unknown_key
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
    EnvironmentConfig,
    ErrorPolicyConfig,
    EvalSourcesConfig,
    SftEvalConfig,
    TaskSelectionConfig,
    UniformConfig,
)
from gradus.config.schema.eval import EvalConfig
from gradus.config.schema.inference import InferenceConfig, SamplingConfig, ServeConfig
from gradus.config.schema.learning import AdamWConfig
from gradus.config.schema.model import ModelConfig
from gradus.config.schema.monitor import MonitorConfig, TrackConfig
from gradus.config.schema.orchestrator import (
    AlarmConfig,
    FilterConfig,
    GibberishConfig,
    RepetitionConfig,
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
