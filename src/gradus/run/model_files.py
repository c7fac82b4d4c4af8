"""The files of a model: where they lie, and digests that tell two models apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from gradus.errors import ConfigError, CorruptStateError
from gradus.files import file_digests
from gradus.run.paths import RunDirectory
from gradus.sealed import open_sealed

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt")
"""Everything in a model folder that decides what a server of it answers."""


def model_folder(name: str, *, file: str = "config.json") -> Path | None:
    """The folder of a model: the one named, or the copy in the hub's local cache that holds `file`;
    None if absent. The network is never asked."""
    if Path(name).is_dir():
        return Path(name)
    if name.count("/") > 1 or name.startswith((".", "/")):
        return None
    try:
        cached = try_to_load_from_cache(name, file)
    except HFValidationError:  # no name that the hub could have, such as "~/model"
        return None
    return Path(cached).parent if isinstance(cached, str) else None


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


def _digest_of(digests: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
