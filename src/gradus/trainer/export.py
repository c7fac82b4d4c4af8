"""A checkpoint as a Hugging Face model directory, which transformers and vLLM load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from gradus.checkpoints import Checkpoint, Checkpoints
from gradus.config.lora import LoraConfig, ServedLoraConfig
from gradus.config.model import ModelConfig
from gradus.errors import ConfigError, CorruptStateError
from gradus.lease import read_marker
from gradus.log import get_logger
from gradus.run_dir import RunDirectory
from gradus.trainer.distributed import join_world
from gradus.trainer.model.load import load_model, load_tokenizer
from gradus.trainer.model.lora import add_adapters, base_digest
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.publish import PolicyPublisher, model_files
from gradus.trainer.trainer import serving_dtype
from gradus.trainer.training_state import (
    PART,
    Origin,
    load_weights,
    read_progress,
    refuse_other_base,
)

logger = get_logger(__name__)


@dataclass(frozen=True)
class _Trained:
    """What the trainer of a run started from."""

    model: ModelConfig
    lora: LoraConfig | None


def export(source: Path, directory: Path) -> int:
    """Write the newest checkpoint of a run, or one that is named, to `directory`; gives its step.

    Every byte of the checkpoint is verified first. Adapters are added into the weights. Refuses
    (ConfigError) a source that is neither a run nor a checkpoint, and a directory that exists.
    """
    if directory.exists():
        raise ConfigError(f"{directory} exists already; choose another name or delete it")
    while True:
        checkpoint = _find(source.absolute())
        try:
            _write(checkpoint, directory)
            return checkpoint.step
        except (CorruptStateError, FileNotFoundError) as error:
            if checkpoint.folder.exists():
                raise
            if checkpoint.folder == source.absolute():
                raise ConfigError(
                    f"{source} was deleted by its run while it was read; export a newer one"
                ) from error
            logger.info("checkpoint %d was deleted while it was read", checkpoint.step)


def _write(checkpoint: Checkpoint, directory: Path) -> None:
    origin = read_progress(checkpoint.part(PART)).origin
    trained = _trained(checkpoint, origin)
    dtype = serving_dtype(origin.compute_dtype)
    with join_world() as world:
        model = load_model(trained.model, world.device)
        files = model_files(model, load_tokenizer(trained.model), dtype)
        if trained.lora is not None:
            refuse_other_base(origin, base_digest(model))
            add_adapters(model, trained.lora, dtype)
        load_weights(PolicyModel(model), checkpoint.part(PART))
        PolicyPublisher(model, world, dtype=dtype, weights=None).save(directory, files)
    logger.info("%s holds the weights of %s", directory, checkpoint.folder)


def _find(source: Path) -> Checkpoint:
    """The verified checkpoint that `source` means."""
    if source.parent.name == "checkpoints":
        run_dir = RunDirectory(source.parent.parent)
        return Checkpoints(run_dir, epoch=0).load_folder(source)
    run_dir = RunDirectory(source)
    checkpoint = Checkpoints(run_dir, epoch=0).latest()
    if checkpoint is None:
        raise ConfigError(f"{source} holds no checkpoints; {_instead_of_checkpoints(run_dir)}")
    return checkpoint


def _instead_of_checkpoints(run_dir: RunDirectory) -> str:
    """What a folder without checkpoints is, for who wanted one of them."""
    if (run_dir.root / "config.json").is_file():
        return "it is a model directory already: load it as it is"
    if (run_dir.model / "config.json").is_file():
        return f"{run_dir.model} is its final model, a Hugging Face directory: use or copy that"
    if read_marker(run_dir) is None:
        return "it is no run of gradus; name the folder of a run, or one of its checkpoints"
    return "the run has not saved one; checkpoint.interval_minutes says how often it does"


def _trained(checkpoint: Checkpoint, origin: Origin) -> _Trained:
    """What the checkpoint says of itself, in the words of this version's config."""
    try:
        return _Trained(
            ModelConfig.model_validate(origin.model),
            None if origin.lora is None else ServedLoraConfig.model_validate(origin.lora),
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise CorruptStateError(
            f"{checkpoint.folder} is not of this gradus: {'.'.join(map(str, first['loc']))}: "
            f"{first['msg']}; export with the version that trained"
        ) from error
