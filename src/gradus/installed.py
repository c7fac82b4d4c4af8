"""Which plug-ins of verifiers are installed and which one an id means; packages beside gradus."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from gradus.errors import ConfigError

BUILTIN_TASKSETS = "tasksets"
BUILTIN_ENVIRONMENTS = "envs"
BUILTIN_HARNESSES = "harnesses"
PLAYED = (BUILTIN_TASKSETS, BUILTIN_ENVIRONMENTS)
"""Where verifiers looks for the id of a source among its own plug-ins."""

CHAT_HARNESS_MODULE = "gradus_chat"
"""The id under which verifiers can import the harness `chat`."""

_HUB_OWNER = "primeintellect/"
"""Whose task sets on the hub ours are named after."""
_OURS = "gradus_"
"""What the modules of our own plug-ins begin with, and their short ids leave out."""
_FORMER_BASH = "default"
"""What verifiers called its harness `bash` before."""
_CODE = re.compile(r"(?<=[\w.]):[A-Za-z_]\w*$")
"""What follows the module in the name of a class or a function."""
_NOT_OWN = ("gradus.", _OURS, "verifiers.")
_MAX_MODULE_BYTES = 200_000


def has_module(name: str) -> bool:
    """Whether `import name` would find a module; parents are not imported either."""
    return _spec_of(name) is not None


def load_part(group: str, name: str, package: str) -> Any:
    """What a package beside gradus offers under a name; ConfigError that says what installs it."""
    for door in entry_points(group=group, name=name):
        return door.load()
    raise ConfigError(f"a part of gradus-{package}: pip install 'gradus-rl[{package}]'")


def see_folder() -> None:
    """Let this process import modules of the folder that it was started in, after all others.

    A file there may have the name of a library's module (`random.py`, `tokenizers.py`); our own
    processes start by `python -P`, which does not look there first.
    """
    if "" not in sys.path:
        sys.path.append("")


def plugin_module(plugin_id: str) -> str:
    """The module that verifiers imports for an id.

    >>> plugin_module("someone/reverse-text@1.2")
    'reverse_text'
    """
    return plugin_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def builtin_plugins(kind: str) -> list[str]:
    """The plug-ins of one kind that ship with verifiers."""
    spec = PathFinder.find_spec("verifiers", [*sys.path, ""]) or _other_finder(["verifiers"])
    if spec is None or not spec.submodule_search_locations:
        return []
    folder = Path(spec.submodule_search_locations[0]) / "v1" / kind
    modules = pkgutil.iter_modules([str(folder)])
    return sorted(module.name for module in modules if module.ispkg and module.name != "utils")


def has_plugin(plugin_id: str, kinds: Sequence[str]) -> bool:
    """Whether verifiers would find a plug-in: among its own of these kinds, or as a module."""
    module = plugin_module(installed_id(plugin_id, kinds))
    if any(module in builtin_plugins(kind) for kind in kinds):
        return True
    return is_module_name(module) and has_module(module)


def is_module_name(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def installed_id(plugin_id: str, kinds: Sequence[str] = PLAYED) -> str:
    """The id that verifiers understands: ours may be written without `gradus-`.

    What ships with verifiers goes before, and so does a module of that name that uses verifiers: a
    game package or a module of Python may have the same name as one of our task sets. The version
    after `@` chooses nothing: what is installed is used, as in verifiers.

    >>> installed_id("primeintellect/reverse-text-v1"), installed_id("null", [BUILTIN_HARNESSES])
    ('gradus-reverse-text', 'null')
    """
    module = plugin_module(plugin_id)
    is_owned = "/" in plugin_id.removeprefix(_HUB_OWNER)
    if is_owned or not module.isidentifier():
        return plugin_id
    if any(module in builtin_plugins(kind) for kind in kinds):
        return plugin_id
    if module == _FORMER_BASH and BUILTIN_HARNESSES in kinds and not has_module(module):
        return "bash"
    if not has_module(_OURS + module):
        # Other systems end the id of a task set with the version of verifiers.
        plain = module.removesuffix("_v1")
        if plain == module or has_module(module) or not has_module(_OURS + plain):
            return plugin_id
        module = plain
    spec = _spec_of(module)
    if spec is not None and any(b"verifiers" in _head(file) for file in _files(spec)):
        return plugin_id
    return (_OURS + module).replace("_", "-")


def module_digest(plugin_id: str) -> str | None:
    """SHA-256 of the module that an id means, without its sub-packages; None where it is not found.

    Versions say less: most task sets are edited where they lie.
    """
    spec = _spec_of(plugin_module(installed_id(plugin_id)))
    if spec is None:
        return None
    digest = hashlib.sha256()
    for file in _files(spec):
        with contextlib.suppress(OSError):  # Such as the link that an editor leaves beside a file.
            digest.update(file.read_bytes())
    return digest.hexdigest()


def own_code(
    value: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Where a config, as JSON values, names code that is not of gradus or verifiers: the module.

    >>> list(own_code({"monitor": [{"type": "json.tool:Mine"}, {"type": "wandb"}]}))
    [(('monitor', 0, 'type'), 'json.tool')]
    """
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield from own_code(member, (*path, key))
    elif isinstance(value, list | tuple):
        for number, member in enumerate(value):
            yield from own_code(member, (*path, number))
    elif isinstance(value, str):
        is_id = path[-1:] == ("id",)
        module = plugin_module(installed_id(value)) if is_id else _CODE.sub("", value)
        is_named = (is_id or module != value) and is_module_name(module)
        # Beside verifiers' own task set, a game package may have its name.
        is_ours = module.startswith(_NOT_OWN) or (
            is_id and any(module in builtin_plugins(kind) for kind in (*PLAYED, BUILTIN_HARNESSES))
        )
        if is_named and not is_ours and has_module(module):
            yield path, module


def known_ids(kinds: Sequence[str]) -> list[str]:
    """Ids of installed plug-ins: verifiers' own of these kinds, and ours in their short form.

    Ours are named whatever their kind: which one it is only its code says.
    """
    ours = {
        module.name.removeprefix(_OURS)
        for module in pkgutil.iter_modules([*sys.path, str(Path.cwd())])
        if module.name.startswith(_OURS)
    }
    builtin = {name for kind in kinds for name in builtin_plugins(kind)}
    return sorted(name.replace("_", "-") for name in ours | builtin)


def _spec_of(name: str) -> ModuleSpec | None:
    """Where a module lies; None when `import name` would not find it."""
    path: Sequence[str] = [*sys.path, ""]
    walked: list[str] = []
    spec: ModuleSpec | None = None
    for part in name.split("."):
        walked.append(part)
        # By the last part alone: under its whole name, a folder without __init__.py needs its
        # parent to be imported.
        spec = PathFinder.find_spec(part, path) or _other_finder(walked)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec


def _other_finder(walked: list[str]) -> ModuleSpec | None:
    """Top-level modules that only another import finder knows, e.g. of an editable install."""
    try:
        return importlib.util.find_spec(walked[0]) if len(walked) == 1 else None
    except (ImportError, ValueError):
        return None


def _files(spec: ModuleSpec) -> Iterator[Path]:
    if spec.submodule_search_locations:
        for folder in spec.submodule_search_locations:
            yield from sorted(Path(folder).glob("*.py"))
    elif spec.origin is not None and spec.origin.endswith(".py"):
        yield Path(spec.origin)


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(_MAX_MODULE_BYTES)
    except OSError:
        return b""
