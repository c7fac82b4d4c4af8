"""The config of `gradus sft`."""

from __future__ import annotations

from pydantic import Field

from gradus.config.schema.base import Precision, Seed, StrictConfig
from gradus.config.schema.environment import NAME_PATTERN, SftEvalConfig
from gradus.config.schema.inference import InferenceConfig
from gradus.config.schema.learning import AdamWConfig, OptimizerConfig
from gradus.config.schema.model import ModelConfig
from gradus.config.schema.monitor import LogConfig, MonitorChoice
from gradus.config.schema.run import CheckpointConfig, LaunchConfig, SlurmConfig
from gradus.config.schema.trainer import LearningConfig, LoraConfig


class SftMixedDataConfig(StrictConfig):
    """A further data set; what `data` says of roles and rewards holds for it too."""

    path: str
    """As in `data.path`."""
    split: str = "train"
    """As `data.split`."""
    subset: str | None = None
    """As `data.subset`."""
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """As `data.weight`."""


class SftDataConfig(StrictConfig):
    """Conversations to learn."""

    path: str
    """Rows with `messages`, or with `prompt` and `completion`: a file (.jsonl, .json, .csv, .tsv,
    .parquet; text also as .gz), a folder of them or of `save_to_disk`, or a data set of the hub; or
    the `episodes` folder of a run, or one of its files."""
    split: str = "train"
    """Split of a folder or a hub data set."""
    subset: str | None = None
    """Subset of a folder or a hub data set that has several, such as "main". None means the only
    one."""
    shuffle: bool = True
    """Shuffle the conversations each pass."""
    train_roles: list[str] = Field(default_factory=lambda: ["assistant"], min_length=1)
    """Roles whose tokens are learned."""
    min_reward: float | None = None
    """Least reward of an episode's trace to be learned. None means to learn all that finished."""
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """How often a conversation of `path` is drawn, relative to the weights of `mix`, whatever the
    sizes of the data sets; each begins again when all of it was drawn."""
    mix: list[SftMixedDataConfig] = Field(default_factory=list)
    """Data sets to learn beside `path`."""

    @property
    def data_sets(self) -> list[SftDataConfig]:
        own = self.model_copy(update={"mix": []})
        return [own, *(own.model_copy(update=one.model_dump()) for one in self.mix)]


class SftValidationConfig(StrictConfig):
    """Held-out conversations; what `data` says of roles and rewards holds for them too."""

    path: str
    """As in `data.path`."""
    split: str = "validation"
    """As `data.split`."""
    subset: str | None = None
    """As `data.subset`."""
    interval_steps: int = Field(10, ge=1)
    """Steps between validations; there is one after the last step too."""
    patience: int | None = Field(None, ge=1)
    """Validations without a lower loss after which the run ends as `stalled`. None means that
    `max_steps` alone ends the run."""
    max_conversations: int = Field(256, ge=1)
    """Conversations used, from the beginning of the data."""


class SftConfig(LearningConfig):
    """One supervised run, from data to a Hugging Face model directory."""

    name: str | None = Field(None, pattern=NAME_PATTERN)
    """Name of the run. None means one made from data and model."""
    output_dir: str = "runs"
    """Folder that holds the run's folder."""
    model: ModelConfig
    """The model to start from."""
    data: SftDataConfig
    """What to learn."""
    validation: SftValidationConfig | None = None
    """What to measure the loss on. None means no validation."""
    eval: SftEvalConfig | None = None
    """What to play while training, for rewards beside the loss. None means no evaluation."""
    inference: InferenceConfig = InferenceConfig()
    """Serving for `eval`; without one nothing is served."""
    optimizer: OptimizerConfig = AdamWConfig()
    """Optimizer and schedule."""
    lora: LoraConfig | None = None
    """Train low-rank adapters beside frozen weights. None means to train every weight."""
    max_steps: int = Field(100, ge=1)
    """Optimizer updates."""
    batch_conversations: int = Field(64, ge=1)
    """Conversations per step."""
    compute_dtype: Precision = "auto"
    """Precision of forward and backward. "auto" is bfloat16 on GPUs and on CPUs that multiply it,
    float32 on others."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving what a restart needs."""
    monitor: list[MonitorChoice] = Field(default_factory=list)
    """Trackers that get the numbers of the run, besides `metrics.jsonl` in its folder."""
    log: LogConfig = LogConfig()
    """What the processes write into `logs/`."""
    launch: LaunchConfig = LaunchConfig()
    """Starting and stopping."""
    slurm: SlurmConfig = SlurmConfig()
    """What `gradus sft --slurm` asks for."""
    seed: Seed = 0
    """Seed of shuffling, initialisation and the engine of `eval`."""
