"""Imports of verifiers that cost half of its time and that most processes never use.

`import verifiers.v1` takes 2.1 s of CPU and 200 MiB. Half of both go to anthropic's package, for
one dialect of the interception server, and to sympy, for one reward function. A run has at least
four processes that import verifiers, so both are imported when something first asks for them.
httpx also imports its own command line, which no process of a run uses: a sixth of what is left.

Each is tied to the digest of the file of verifiers that imports it; where that changed, Python
imports as usual, only slower. What the stand-ins say of the dialect is tested against the real one.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from gradus.environments.verifiers.patch import source_digest

DIALECT = "verifiers.v1.dialects.anthropic"
MATHS = "math_verify"
IMPORTERS = {
    DIALECT: ("verifiers/v1/dialects/anthropic.py", "ed9314135289e2a5"),
    MATHS: ("verifiers/v1/utils/score.py", "e3ddf2255330f2d7"),
}
"""Module → the file that imports it and need not, with its digest."""
_ROUTES = {
    "routes": ("/v1/messages",),
    "aux_routes": ("/v1/messages/count_tokens",),
    "upstream_path": "/v1/messages",
}
"""Of the dialect; a server reads them when it starts."""
_COMMAND = "httpx._main"
"""httpx does without it where what it needs is not installed."""
_LOADING = threading.RLock()


class _Deferred(ModuleType):
    """A module that is imported at the first look at anything but its `stand_ins`."""

    def __init__(self, name: str, stand_ins: dict[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(stand_ins)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(load(self.__name__), name)


class _DeferringFinder:
    """Finds the modules of `names` before anyone else does, once each."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = set(names)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The real spec with a loader that does not run the module."""
        if name not in self.names:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path, target)
        if found is not None:
            found.loader = _DeferringLoader()
        return found


class _DeferringLoader(importlib.abc.Loader):
    """Makes a module that waits."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Deferred(spec.name, _STAND_INS[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs yet."""


class _DeferredClass:
    """Stands for the dialect's class: makes instances, has subclasses, is asked by isinstance."""

    def __call__(self) -> AnthropicDialect:
        return AnthropicDialect()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type]:
        return (load(DIALECT).AnthropicDialect,)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, AnthropicDialect | load(DIALECT).AnthropicDialect)

    def __getattr__(self, name: str) -> Any:
        return getattr(load(DIALECT).AnthropicDialect, name)


class AnthropicDialect:
    """Stands for the one instance that verifiers keeps; the name appears in its messages."""

    def __init__(self) -> None:
        self.__dict__.update(_ROUTES)

    def __getattr__(self, name: str) -> Any:
        # Kept, so that later looks find it without asking again.
        if "_real" not in self.__dict__:
            self.__dict__["_real"] = load(DIALECT).AnthropicDialect()
        return getattr(self.__dict__["_real"], name)


def _parse(*arguments: Any, **options: Any) -> Any:
    return load(MATHS).parse(*arguments, **options)


def _verify(*arguments: Any, **options: Any) -> Any:
    return load(MATHS).verify(*arguments, **options)


_STAND_INS: dict[str, dict[str, Any]] = {
    DIALECT: {"AnthropicDialect": _DeferredClass()},
    MATHS: {"parse": _parse, "verify": _verify},
}


def load(name: str) -> ModuleType:
    """The module itself, imported now unless it is already."""
    with _LOADING:
        if isinstance(sys.modules.get(name), _Deferred):
            _FINDER.names.discard(name)
            del sys.modules[name]
        return importlib.import_module(name)


def defer_imports() -> None:
    """Let what this process imports later wait; what it has imported stays. Twice is harmless."""
    if "httpx" not in sys.modules:
        # Python's word for a module that cannot be imported.
        sys.modules[_COMMAND] = None  # type: ignore[assignment]
    if _FINDER not in sys.meta_path:
        _FINDER.names = {
            name
            for name, (file, digest) in IMPORTERS.items()
            if name not in sys.modules and source_digest(file) == digest
        }
        sys.meta_path.insert(0, _FINDER)


_FINDER = _DeferringFinder(())
