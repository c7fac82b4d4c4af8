"""Whether a library still has the code that a patch was written for.

A version says little about an edited checkout or a back-port. So each patch names the functions
that it relies on, with a digest of their source; where one differs, the patch is left out and the
library works as it is, only slower.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gradus.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class Shortcut:
    """One patch, and the code that it relies on."""

    install: Callable[[], None]
    """Puts it in place; twice is harmless."""
    relies_on: Mapping[str, str]
    """`module:function` or `module:Class.function`, and the digest of its source."""

    @property
    def name(self) -> str:
        """What the log calls it."""
        return self.install.__name__

    def changed(self) -> list[str]:
        """The functions whose source is another one."""
        return [name for name, digest in self.relies_on.items() if source_digest(name) != digest]


def install_known(shortcuts: tuple[Shortcut, ...]) -> list[str]:
    """Install every shortcut whose code is as expected; the names of the others, also logged."""
    left_out = []
    for shortcut in shortcuts:
        changed = shortcut.changed()
        if changed:
            left_out.append(shortcut.name)
            log.warning(
                "%s is not used, episodes cost more: %s changed", shortcut.name, ", ".join(changed)
            )
        else:
            shortcut.install()
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
