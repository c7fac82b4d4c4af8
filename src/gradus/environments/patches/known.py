"""Whether a library still has the code that a patch was written for.

A version says little about an edited checkout or a back-port. So each patch names the functions
that it relies on, with a digest of their source. Where one differs, a patch that only saves time is
left out; one without which episodes would be others is not, and nothing starts.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gradus.errors import ConfigError
from gradus.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class Patch:
    """One change of a library, and the code that it relies on."""

    install: Callable[[], None]
    """Puts it in place; twice is harmless."""
    relies_on: Mapping[str, str]
    """`module:function` or `module:Class.function`, and the digest of its source."""
    otherwise: str = ""
    """What is wrong without it; empty where episodes only cost more."""

    @property
    def name(self) -> str:
        """What the log calls it."""
        return str(getattr(self.install, "func", self.install).__name__)

    def changed(self) -> list[str]:
        """The functions whose source is another one."""
        return [name for name, digest in self.relies_on.items() if source_digest(name) != digest]


def refuse_changed(patches: Iterable[Patch]) -> None:
    """Raise ConfigError where a library changed what an episode depends on."""
    changed = [(patch.otherwise, patch.changed()) for patch in patches if patch.otherwise]
    effects = dict.fromkeys(effect for effect, found in changed if found)
    names = sorted({name for _, found in changed for name in found})
    if not names:
        return
    package = names[0].partition(".")[0].partition(":")[0]
    raise ConfigError(
        f"{package} {importlib.metadata.version(package)} is not the version that gradus was made "
        f"for: {', '.join(names)} changed, so that {'; '.join(effects)}. "
        f"Install gradus again, which brings the version that it requires"
    )


def install_known(patches: Iterable[Patch]) -> list[str]:
    """Install every patch whose code is as expected; the names of those left out, also logged.

    Raises ConfigError where an episode would be another one without a patch.
    """
    patches = tuple(patches)
    refuse_changed(patches)
    left_out = []
    for patch in patches:
        changed = patch.changed()
        if changed:
            left_out.append(patch.name)
            log.warning(
                "%s is not used, episodes cost more: %s changed", patch.name, ", ".join(changed)
            )
        else:
            patch.install()
    return left_out


def source_digest(name: str) -> str:
    """The digest of a function's source as installed; empty when it cannot be found."""
    try:
        return hashlib.sha256(inspect.getsource(_find(name)).encode()).hexdigest()[:16]
    except (ImportError, AttributeError, OSError, TypeError):
        return ""


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = inspect.getattr_static(found, part)
    if isinstance(found, property):
        found = found.fget
    return getattr(found, "__func__", found)
