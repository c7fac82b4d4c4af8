"""A checkpoint as a Hugging Face model directory, which transformers and vLLM load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from gradus.checkpoints import Checkpoint, Checkpoints
from gradus.config.lora import LoraConfig
from gradus.config.model import ModelConfig
from gradus.config.process import SftProcessConfig, TrainerProcessConfig
from gradus.errors import ConfigError, CorruptStateError
from gradus.log import get_logger
from gradus.run_dir import RunDirectory, read_json
from gradus.trainer.distributed import join_world
from gradus.trainer.model.load import load_model, load_tokenizer
from gradus.trainer.model.lora import add_adapters
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.publish import PolicyPublisher, model_files
from gradus.trainer.trainer import serving_dtype
from gradus.trainer.training_state import PART, load_weights

logger = get_logger(__name__)


@dataclass(frozen=True)
class _Trained:
    """What the trainer of a run started from, and in which precision it computed."""

    model: ModelConfig
    lora: LoraConfig | None
    compute_dtype: str


def export(source: Path, directory: Path) -> int:
    """Write the newest checkpoint of a run, or one that is named, to `directory`; gives its step.

    Every byte of the checkpoint is verified first. Adapters are added into the weights. Refuses
    (ConfigError) a source that is neither a run nor a checkpoint, and a directory that exists.
    """
    if directory.exists():
        raise ConfigError(f"{directory} exists already; choose another name or delete it")
    run_dir, checkpoint = _find(source.absolute())
    trained = _trained(run_dir)
    dtype = serving_dtype(trained.compute_dtype)
    with join_world() as world:
        model = load_model(trained.model, world.device)
        files = model_files(model, load_tokenizer(trained.model), dtype)
        if trained.lora is not None:
            add_adapters(model, trained.lora, dtype)
        load_weights(PolicyModel(model), checkpoint.part(PART))
        PolicyPublisher(model, world, dtype=dtype, weights=None).save(directory, files)
    logger.info("%s holds the weights of %s", directory, checkpoint.folder)
    return checkpoint.step


def _find(source: Path) -> tuple[RunDirectory, Checkpoint]:
    """The run and the verified checkpoint that `source` means."""
    if source.parent.name == "checkpoints":
        run_dir = RunDirectory(source.parent.parent)
        return run_dir, Checkpoints(run_dir, epoch=0).load_folder(source)
    run_dir = RunDirectory(source)
    checkpoint = Checkpoints(run_dir, epoch=0).latest()
    if checkpoint is None:
        hint = f"; its final model is {run_dir.model}" if run_dir.model.is_dir() else ""
        raise ConfigError(f"{source} holds no checkpoints{hint}")
    return run_dir, checkpoint


def _trained(run_dir: RunDirectory) -> _Trained:
    path = run_dir.config / "trainer.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing; the config says which model the run started from")
    text = path.read_text()
    try:
        if "sft" in read_json(path):
            sft = SftProcessConfig.model_validate_json(text).sft
            return _Trained(sft.model, sft.lora, sft.compute_dtype)
        config = TrainerProcessConfig.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise CorruptStateError(
            f"{path} is not a config of this gradus: {'.'.join(map(str, first['loc']))}: "
            f"{first['msg']}; export with the version that trained"
        ) from error
    return _Trained(config.model, config.trainer.lora, config.trainer.compute_dtype)
