"""A checkpoint as a Hugging Face model directory, for transformers and vLLM, and on the hub."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from pydantic import ValidationError

from gradus.config import LoraConfig, ModelConfig, ServedLoraConfig
from gradus.errors import ConfigError, CorruptStateError, GradusError, HubError
from gradus.files import PatientFiles, read_json
from gradus.log import get_logger
from gradus.run.checkpoints import Checkpoint, CheckpointStore
from gradus.run.lease import read_marker
from gradus.run.model_files import BestVersion, is_model, published_models, read_best
from gradus.run.paths import RunDirectory
from gradus.run.recording import read_launched
from gradus.sealed import open_sealed, put_in_place, stage
from gradus.trainer.checkpoint.training_state import (
    PART,
    Origin,
    load_weights,
    read_progress,
    refuse_other_base,
)
from gradus.trainer.distributed import CPU, join_world
from gradus.trainer.model.load import load_model, load_tokenizer
from gradus.trainer.model.lora import (
    ADAPTER_CONFIG,
    adapter_config,
    add_adapters,
    base_digest,
    load_adapter,
)
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.publish import model_files, save_model, serving_dtype
from gradus.weights.published import BASE_FILE, VersionLabel

logger = get_logger(__name__)


@dataclass(frozen=True)
class _Trained:
    """What the trainer of a run started from."""

    model: ModelConfig
    lora: LoraConfig | None


def export(source: Path, directory: Path) -> int:
    """Write the newest checkpoint of a run, or the one given, to `directory`; returns its step.

    A run without checkpoints gives the newest version that it published. Every byte is verified
    first. Adapters are added into the weights. Refuses (ConfigError) a source that is neither a run
    nor a checkpoint, and a directory that exists.
    """
    if directory.exists():
        raise ConfigError(f"{directory} exists already; choose another name or delete it")
    while True:
        checkpoint = _find(source.absolute())
        if checkpoint is None:
            step, folder = published_models(RunDirectory(source)).popitem()
        else:
            step, folder = checkpoint.step, checkpoint.folder
        try:
            if checkpoint is None:
                _copy_version(source, folder, directory)
            else:
                _write(checkpoint, directory)
            return step
        except (CorruptStateError, FileNotFoundError) as error:
            if folder.exists():
                raise
            if folder == source.absolute():
                raise ConfigError(
                    f"{source} was deleted by its run while it was read; export a newer one"
                ) from error
            logger.info("%s was deleted while it was read", folder.name)


def export_best(source: Path, directory: Path) -> BestVersion:
    """Write the best evaluated version of a run to `directory`; returns what it earned.

    Refuses (ConfigError) a folder that is no run, a run in which nothing was evaluated or whose
    best is the model that it started from, and a version that somebody deleted.
    """
    if directory.exists():
        raise ConfigError(f"{directory} exists already; choose another name or delete it")
    run_dir = RunDirectory(source.absolute())
    if read_marker(run_dir) is None:
        raise ConfigError(f"--best: {source} is not a run of gradus; name the folder of a run")
    while True:
        best = _best_of(run_dir, source)
        folder = run_dir.best / best.folder
        try:
            if not folder.is_dir():
                raise ConfigError(
                    f"--best: {best}, but {folder} was deleted; restore it, or leave --best out"
                )
            if is_model(folder):
                _copy_sealed(folder, directory)
            else:
                _merge_adapter(run_dir, folder, directory)
            return best
        except (ConfigError, CorruptStateError, FileNotFoundError):
            if folder.exists() or read_best(run_dir) == best:
                raise
            logger.info("%s was deleted while it was read: a better one came", folder.name)


def _best_of(run_dir: RunDirectory, source: Path) -> BestVersion:
    """The best version, of which there are files."""
    best = read_best(run_dir)
    if best is None:
        raise ConfigError(
            f"--best: no evaluation of {source} has an average yet that counts (at most 5 % "
            "of its episodes failed); leave --best out, or let runs evaluate: "
            "orchestrator.eval of `gradus rl`, eval of `gradus sft`"
        )
    if not best.version:
        raise ConfigError(
            f"--best: {best}, the most of all: the model that the run started from is the best, "
            "and training has not improved on it; use that model, or leave --best out"
        )
    if not best.folder:
        raise ConfigError(
            f"--best: {best}, and its weights were broadcast, which leaves no files; leave --best "
            "out for the newest checkpoint, or name a folder of checkpoints/"
        )
    return best


def _merge_adapter(run_dir: RunDirectory, folder: Path, directory: Path) -> None:
    """Add the adapter in a sealed folder into the base model that it was trained beside."""
    sealed = open_sealed(folder, VersionLabel)
    sealed.verify()
    settings = read_json(folder / ADAPTER_CONFIG)
    config = read_launched(run_dir).config
    try:
        name = settings["base_model_name_or_path"]
        base = ModelConfig.model_validate({**config["model"], "name": name})
        dtype = serving_dtype(config["trainer"]["compute_dtype"])
        lora = adapter_config(settings)
    except (KeyError, TypeError, ValidationError) as error:
        raise CorruptStateError(
            f"{run_dir.launched} does not name the model of {folder} ({error!r}); export the "
            "newest checkpoint instead, without --best"
        ) from error
    with join_world(CPU) as world:
        model = load_model(base, CPU)
        files = model_files(model, load_tokenizer(base), dtype)
        expected = read_json(folder / BASE_FILE)["sha256"]
        if base_digest(model) != expected:
            raise ConfigError(
                f"{folder} is an adapter of other files than those of {base.name}; restore them"
            )
        add_adapters(model, lora, dtype)
        load_adapter(model, folder)
        save_model(model, world, dtype, directory, files)


def _write(checkpoint: Checkpoint, directory: Path) -> None:
    origin = read_progress(checkpoint.part(PART)).origin
    trained = _trained(checkpoint, origin)
    dtype = serving_dtype(origin.compute_dtype)
    with join_world(CPU) as world:
        model = load_model(trained.model, CPU)
        files = model_files(model, load_tokenizer(trained.model), dtype)
        if trained.lora is not None:
            refuse_other_base(origin, base_digest(model))
            add_adapters(model, trained.lora, dtype)
        load_weights(PolicyModel(model), checkpoint.part(PART))
        save_model(model, world, dtype, directory, files)
    logger.info("%s holds the weights of %s", directory, checkpoint.folder)


def _copy_version(source: Path, folder: Path, directory: Path) -> None:
    _copy_sealed(folder, directory)
    logger.warning("%s has no checkpoint; %s is a copy of %s", source, directory, folder)


def _copy_sealed(folder: Path, directory: Path) -> None:
    """Copy the files of a published version, every byte verified first."""
    sealed = open_sealed(folder, VersionLabel)
    sealed.verify()
    files = PatientFiles()
    with stage(directory, files) as staging:
        for name in sealed.files:
            shutil.copyfile(folder / name, staging / name)
        put_in_place(staging, directory, files)


def _find(source: Path) -> Checkpoint | None:
    """The verified checkpoint that `source` means; None for a run that has only published."""
    if source.parent.name == "checkpoints":
        run_dir = RunDirectory(source.parent.parent)
        return CheckpointStore(run_dir, term=0).load_folder(source)
    run_dir = RunDirectory(source)
    checkpoint = CheckpointStore(run_dir, term=0).latest()
    if checkpoint is None and not published_models(run_dir):
        raise ConfigError(f"{source} holds no checkpoints; {_instead_of_checkpoints(run_dir)}")
    return checkpoint


def _instead_of_checkpoints(run_dir: RunDirectory) -> str:
    """What a folder without checkpoints is, and what to do with it."""
    if (run_dir.root / "config.json").is_file():
        return "it is a model directory already: load it as it is"
    if (run_dir.model / "config.json").is_file():
        return f"{run_dir.model} is its final model, a Hugging Face directory: use or copy that"
    if read_marker(run_dir) is None:
        return "it is not a run of gradus; name the folder of a run, or one of its checkpoints"
    return "the run has not saved one; checkpoint.interval_minutes says how often it does"


def _trained(checkpoint: Checkpoint, origin: Origin) -> _Trained:
    """The model and the adapters that the checkpoint names, as configs of this version."""
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


# The Hugging Face hub: the directory in a repository of the user's.

UNAUTHORIZED, FORBIDDEN = 401, 403
_HIDDEN = "<token>"


@dataclass(frozen=True)
class HubRepository:
    """Where a model goes, and the right to put it there."""

    name: str
    """`owner/name`."""
    token: str = field(repr=False)
    """The user's own; part of no message."""
    private: bool = False
    """True if only the owner may see it."""
    endpoint: str | None = None
    """Another hub. None means the one that HF_ENDPOINT names, else huggingface.co."""


def open_repository(
    name: str, *, private: bool = False, endpoint: str | None = None
) -> HubRepository:
    """The repository `owner/name` with the user's token; contacts no server.

    ConfigError for what no hub would take: a name without owner, no token, a machine that is set
    to stay offline.
    """
    if name.count("/") != 1:
        raise ConfigError(f"--push {name!r} must be owner/name, e.g. --push someone/my-model")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"--push {name!r} cannot name a repository: {error}") from error
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"--push {name}: HF_HUB_OFFLINE is set; unset it to reach the hub")
    token = get_token()
    if token is None:
        raise ConfigError(
            f"--push {name}: there is no token for the hub; set HF_TOKEN to one that may write, or "
            "log in with `hf auth login`"
        )
    return HubRepository(name, token, private, endpoint)


def push(directory: Path, repository: HubRepository, *, message: str) -> str:
    """Upload all files of `directory` in one commit; returns the address of the repository.

    Creates the repository if there is none. ConfigError when the hub refuses the token or the
    right to write, or when a repository that should be private is public; HubError for everything
    else that keeps the files from the hub. `directory` stays as it is.
    """
    api = HfApi(endpoint=repository.endpoint, token=repository.token)
    name = repository.name
    try:
        api.create_repo(name, private=repository.private or None, exist_ok=True)
        if repository.private and not api.model_info(name).private:
            raise ConfigError(
                f"--private: {name} exists already and is public, so nothing was sent; make it "
                "private on the hub, choose another name, or leave --private out"
            )
        api.upload_folder(repo_id=name, folder_path=directory, commit_message=message)
    # The client raises its own errors below httpx.HTTPError, and plain ones where a part of the
    # upload fails or the hub answers nonsense.
    except (httpx.HTTPError, OSError, RuntimeError, ValueError, KeyError) as error:
        # Of a large file the client only says which; why is in the cause.
        is_part = isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception)
        raise _explained(error.__cause__ if is_part else error, directory, repository) from None
    return f"{api.endpoint}/{name}"


def _explained(
    error: BaseException | None, directory: Path, repository: HubRepository
) -> GradusError:
    """What went wrong on the hub or on the way to it, with the token blotted out."""
    name, kept = repository.name, f"the export is whole and stays in {directory}"
    private = " --private" if repository.private else ""
    again = f"send it again with `hf upload{private} {name} {shlex.quote(str(directory))}`"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    said = error.server_message if isinstance(error, HfHubHTTPError) else None
    reason = " ".join((said or str(error) or type(error).__name__).split())
    reason = reason.replace(repository.token, _HIDDEN)
    if status == UNAUTHORIZED:
        return ConfigError(
            f"--push {name}: the hub does not know this token ({reason}); set HF_TOKEN to one that "
            f"is valid. {kept.capitalize()}; {again}"
        )
    if status == FORBIDDEN:
        return ConfigError(
            f"--push {name}: this token may not write there ({reason}); use one with the right to "
            f"write, or a name of your own. {kept.capitalize()}; {again}"
        )
    what = "did not take the files" if status is None else f"answered {status}"
    if isinstance(error, httpx.TransportError):
        what = "was not reached"
    what = f"{repository.endpoint or constants.ENDPOINT} {what}"
    return HubError(f"--push {name}: {what} ({reason}); {kept}, {again}")
