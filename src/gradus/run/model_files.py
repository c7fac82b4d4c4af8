"""The files of a model: where they lie, which is the best, and digests that tell two apart."""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec

from gradus.errors import ConfigError, CorruptStateError, HubError, StorageError
from gradus.files import DurableFiles, file_digests, read_json, write_atomically
from gradus.log import get_logger
from gradus.run.lease import check_term
from gradus.run.paths import RunDirectory
from gradus.sealed import discard_unfinished, open_sealed, put_in_place, staging_path, sweep

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt")
"""Everything in a model folder that decides what a server of it answers."""
_TOKENIZER_CONFIG = "tokenizer_config.json"
_VOCABULARY = ("tokenizer.json", "*.model", "vocab.json", "merges.txt")
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TEXT_CHARACTERS = 16
"""Of a digest that only tells whether two are the same."""
_LOG = get_logger(__name__)
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_HUB_SECONDS = 5.0
"""In which the hub has to say what kind of model a name is."""
_TOO_MANY = 429
_TRY_AGAIN = frozenset({408, _TOO_MANY, *range(500, 600)})
"""What a hub answers that cannot say it now."""
_OF_A_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
"""Errors of a disk that may name no file."""


def model_folder(name: str, *, file: str = "config.json") -> Path | None:
    """The folder of a model: the one named, or the copy in the hub's local cache that holds `file`;
    None if absent. The network is never asked."""
    if Path(name).is_dir():
        return Path(name)
    if name.count("/") > 1 or name.startswith((".", "/")):
        return None
    # Its import takes a fifth of the start of every process, of which few have a name from the hub.
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        cached = hub.try_to_load_from_cache(name, file)
    except hub.errors.HFValidationError:  # no name that the hub could have, such as "~/model"
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def ask_hub(model: str) -> bool:
    """Fetch what says what kind of model it is, where it is not on this disk: its config.json, and
    how it makes pixels of images. Whether that was fetched.

    ConfigError when the hub does not give it, HubError when it is not reached within seconds,
    StorageError when the disk does not take it.
    """
    if model_folder(model) is not None:
        return False
    hub: Any = importlib.import_module("huggingface_hub")
    where = f"model: {model!r} is not a directory (seen from {Path.cwd()})"
    caught: list[Exception] = []
    # A name server, or an address that swallows packets, may hold it for longer than its time-out.
    asking = Thread(target=_fetch_kind, args=(hub, model, caught), name="ask-hub", daemon=True)
    asking.start()
    asking.join(_HUB_SECONDS + 1)
    error = TimeoutError("no answer") if asking.is_alive() else next(iter(caught), None)
    if error is None or isinstance(error, hub.errors.RemoteEntryNotFoundError):
        return error is None  # else it is there in another format, on which the engine decides
    said = str(error).strip()
    if isinstance(error, OSError) and (error.filename or error.errno in _OF_A_DISK):
        raise StorageError(
            f"{where}, and what the hub says of it cannot be kept on this disk ({said}); make "
            "room, or set HF_HOME to a folder that can be written"
        ) from error
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, ValueError) or (status or _TOO_MANY) not in _TRY_AGAIN:
        raise ConfigError(f"{where}, and the hub refuses it: {said}") from error
    raise HubError(
        f"{where}, and the hub cannot be reached to ask for it ({said}); give the folder of a "
        "model, or try again with a connection"
    ) from error


def _fetch_kind(hub: Any, model: str, caught: list[Exception]) -> None:
    """The first question is put once: a download would try again for half a minute."""
    try:
        address = hub.hf_hub_url(model, "config.json")
        hub.get_hf_file_metadata(address, timeout=_HUB_SECONDS)
        hub.hf_hub_download(model, "config.json")
        for name in _PROCESSOR_FILES if reads_images(model) else ():
            with suppress(hub.errors.RemoteEntryNotFoundError):
                hub.hf_hub_download(model, name)
    except Exception as error:  # of the network, of the hub, of the disk
        caught.append(error)


def is_on_this_machine(name: str) -> bool:
    """Whether a model, or a tokenizer, lies in a directory here or in the hub's cache."""
    files = ("config.json", "tokenizer_config.json")
    return any(model_folder(name, file=file) for file in files)


def is_model(folder: Path) -> bool:
    """Whether a folder is a whole model; an adapter is none."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def published_models(run_dir: RunDirectory) -> dict[int, Path]:
    """The trained versions of a run that lie in `weights/` as whole models, oldest first."""
    found = [path for path in sorted(run_dir.weights.glob("version_*")) if is_model(path)]
    numbers = [path.name.removeprefix("version_") for path in found]
    pairs = zip(numbers, found, strict=True)
    return {int(number): path for number, path in pairs if number.isdecimal() and int(number)}


def digest_files(folder: Path, patterns: Sequence[str]) -> dict[str, str]:
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    return dict(zip([path.name for path in paths], file_digests(paths), strict=True))


def model_digest(folder: Path) -> str:
    """One digest of the files that decide what a model computes."""
    return _digest_of(digest_files(folder, ["*.safetensors", "*.bin", "config.json"]))


def text_digests(model: str, tokenizer: str | None = None) -> dict[str, str]:
    """A digest of each part of a model's files that decides which tokens a text becomes; none of
    them where the files are not on this machine.

    >>> text_digests("no/model")
    {}
    """
    folder = model_folder(model)
    words = model_folder(tokenizer, file=_TOKENIZER_CONFIG) if tokenizer else folder
    if folder is None or words is None:
        return {}
    config, generation = _table(folder / "config.json"), _table(folder / "generation_config.json")
    settings = _table(words / _TOKENIZER_CONFIG)
    template = words / "chat_template.jinja"
    written = template.read_text("utf-8") if template.is_file() else settings.get("chat_template")
    special = {key: settings[key] for key in settings if key.endswith("_token")}
    ids = [{key: it.get(key) for key in _SPECIAL_IDS} for it in (config, generation)]
    parts = {
        "vocabulary": digest_files(words, _VOCABULARY),
        "chat template": written,
        "set of special tokens": [special, settings.get("added_tokens_decoder"), ids],
        "size of the vocabulary": text_part(config).get("vocab_size"),
    }
    return {name: _digest_of(part)[:_TEXT_CHARACTERS] for name, part in parts.items()}


def weights_digest(directory: Path) -> str | None:
    """One digest of the tensors of a published version, the same in every run.

    Read from the version's manifest; None when it has none, and for weights that were broadcast.
    """
    try:
        files = open_sealed(directory, dict).files
    except (ConfigError, CorruptStateError):
        return None
    tensors = {name: it.sha256 for name, it in files.items() if name.endswith(".safetensors")}
    return _digest_of(tensors) if tensors else None


def _digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def model_config(name: str) -> dict[str, Any]:
    """The config.json of a model, as far as it is here."""
    return json_table((model_folder(name) or Path(name)) / "config.json")


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config.json says of the part that reads text; nothing where that is no table."""
    text = config.get("text_config", config)
    return text if isinstance(text, Mapping) else {}


def reads_images(name: str) -> bool:
    """Whether a model has a part for images that is used, by its config.json."""
    config = model_config(name)
    return isinstance(config.get("vision_config"), dict) and unused_tower(config) is None


def unused_tower(config: Mapping[str, Any]) -> str | None:
    """What vLLM calls the part that reads text, of a config.json whose part for images is not
    used: images that attend both ways are in no packed row. None for all others.

    >>> text = {"use_bidirectional_attention": "vision"}
    >>> unused_tower({"model_type": "gemma4", "vision_config": {}, "text_config": text})
    'Gemma4ForCausalLM'
    """
    attends_both_ways = bool(text_part(config).get("use_bidirectional_attention"))
    is_used = isinstance(config.get("vision_config"), dict) and not attends_both_ways
    return None if is_used or config.get("model_type") != "gemma4" else "Gemma4ForCausalLM"


def merged_patches(tower: Mapping[str, Any]) -> int:
    """How many patches along each side a tower with this config makes one embedding of."""
    written = (tower.get("spatial_merge_size"), tower.get("pooling_kernel_size"))
    return next((it for it in written if type(it) is int and it > 0), 2)


def image_token(config: Mapping[str, Any]) -> int:
    """The id that stands for an image; Gemma 4's where config.json leaves it to its default."""
    token: int = config.get("image_token_id", 258_880)
    return token


def image_tokens(patches: int | None, name: str) -> int | None:
    """How many placeholders so many patches are for a model; None without a bound, and for a model
    that reads text alone."""
    tower = model_config(name).get("vision_config")
    if patches is None or not isinstance(tower, dict):
        return None
    return patches // merged_patches(tower) ** 2


def most_image_tokens(name: str) -> int | None:
    """The most placeholders that a model's processor makes of one image, however large; None where
    its files do not bound them."""
    folder, config = model_folder(name), model_config(name)
    if folder is None or not reads_images(name):
        return None
    own = json_table(folder / "processor_config.json").get("image_processor")
    given = json_table(folder / "preprocessor_config.json") or (
        own if isinstance(own, dict) else {}
    )
    if str(given.get("image_processor_type")).startswith("Gemma4"):
        most = given.get("max_soft_tokens", 280)
        return most if isinstance(most, int) else None
    size, tower = given.get("size"), config["vision_config"]
    pixels = given.get("max_pixels") or (size.get("longest_edge") if isinstance(size, dict) else 0)
    side = [given.get("patch_size"), given.get("merge_size", tower.get("spatial_merge_size"))]
    if not str(given.get("image_processor_type")).startswith("Qwen2VL"):
        return None  # Others bound a side, or cut an image in pieces.
    known = [it for it in (pixels, *side) if isinstance(it, int) and it > 0]
    return known[0] // math.prod(known[1:]) ** 2 if len(known) == 3 else None


def json_table(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one for a file that is missing, damaged or something else."""
    table: Any = None
    with suppress(OSError, ValueError, RecursionError):
        table = json.loads(path.read_bytes())
    return table if isinstance(table, dict) else {}


def _table(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one for a file that is not there."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    return content if isinstance(content, dict) else {}


class BestVersion(msgspec.Struct, frozen=True):
    """The evaluated version with the highest average; of equal ones the first."""

    version: int
    """0 is the model that the run started from, of which no copy is kept."""
    average: float
    """Mean reward over the environments, each counting the same."""
    low: float | None
    high: float | None
    """A 95 % interval over tasks; None where there are too few."""
    episodes: dict[str, int]
    """Environment → planned episodes; averages of other episodes are not compared."""
    finished: dict[str, int] = {}
    """Environment → how many of them ended without an error."""
    folder: str = ""
    """Name in `best/`; empty where no files are kept."""

    def __str__(self) -> str:
        between = ""
        if self.low is not None and self.high is not None:
            between = f" ({self.low:.3g} to {self.high:.3g})"
        finished = self.finished or self.episodes
        played = f"{sum(finished.values())} episodes of {', '.join(self.episodes)}"
        return f"version {self.version} earned {self.average:.3g}{between} in {played}"


def read_best(run_dir: RunDirectory) -> BestVersion | None:
    """The best version that was evaluated so far, whether or not its files are still there."""
    path = run_dir.best / "best.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=BestVersion)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptStateError(
            f"{path} does not say which version is best ({error}); delete {run_dir.best}"
        ) from error


@dataclass(frozen=True)
class BestKeeper:
    """Owns `<run>/best`: hard links to the files of the best version, or copies on another disk."""

    run_dir: RunDirectory
    term: int
    files: DurableFiles

    @classmethod
    def open(cls, run_dir: RunDirectory, term: int) -> BestKeeper:
        files = DurableFiles()
        discard_unfinished(run_dir.best, files, last_term=term)
        return cls(run_dir, term, files)

    def stage(self, version: int) -> None:
        """Hold on to the files of a version before it is evaluated: the trainer deletes old ones.

        Without room for a copy, or without files, `settle` says that the version is not kept. Of
        weights that were broadcast only what they earned is kept.
        """
        source, staging = self.run_dir.version(version), self._staging(version)
        if not source.is_dir():
            return
        try:
            self.files.delete(staging)
            self.files.make_folder(staging)
            has_weights = any(source.glob("*.safetensors"))
            for path in source.iterdir() if has_weights else ():
                try:
                    os.link(path, staging / path.name)
                except OSError:
                    shutil.copyfile(path, staging / path.name)
        except (OSError, StorageError) as error:
            _LOG.warning("version %d cannot be kept if it is the best: %s", version, error)
            sweep(staging, self.files)

    def settle(self, found: BestVersion | None, version: int) -> None:
        """`version` earned what `found` says: keep it if it is the best, else let its files go.

        None stands for an evaluation without an average. A disk that fails costs the copy and not
        the run.
        """
        staging = self._staging(version)
        try:
            if found is not None and self._is_best(found):
                self._keep(found, staging)
        except (OSError, StorageError) as error:
            _LOG.warning("version %d is the best and was not kept: %s", version, error)
        sweep(staging, self.files)

    def _is_best(self, found: BestVersion) -> bool:
        try:
            best = read_best(self.run_dir)
        except CorruptStateError as error:
            _LOG.warning("%s", error)
            return True
        if best is None or best.episodes != found.episodes:
            return True
        is_there = not best.folder or (self.run_dir.best / best.folder).is_dir()
        return found.average > best.average or not is_there

    def _keep(self, found: BestVersion, staging: Path) -> None:
        if found.version and not staging.is_dir():
            _LOG.warning("version %d is the best and is not on disk to be kept", found.version)
            return
        has_files = found.version and any(staging.iterdir())
        name = self._target(found.version).name if has_files else ""
        check = partial(check_term, self.run_dir, self.term)
        if name:
            self.files.delete(self.run_dir.best / name)
            put_in_place(staging, self.run_dir.best / name, self.files, before_rename=check)
        check()
        write_atomically(
            self.run_dir.best / "best.json",
            msgspec.json.encode(msgspec.structs.replace(found, folder=name)),
        )
        for path in self.run_dir.best.glob("version_*"):
            if path.name != name:
                sweep(path, self.files)

    def _target(self, version: int) -> Path:
        return self.run_dir.best / f"version_{version:08d}.term_{self.term:08d}"

    def _staging(self, version: int) -> Path:
        return staging_path(self._target(version), self.term)


def quantised_problem(config: Mapping[str, Any]) -> str:
    """Why the weights of a model with this config.json are not loaded; empty where they are."""
    if not (stored := config.get("quantization_config")):
        return ""
    method = stored.get("quant_method", "") if isinstance(stored, dict) else ""
    return (
        f"its weights are quantised{f' ({method})' if method else ''}, which is neither "
        "trained nor published; load it dequantised in transformers, save it in bfloat16 "
        "without quantization_config, and name that folder"
    )
