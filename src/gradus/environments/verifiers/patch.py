"""Replacing a function of a library, and whether it still has the source that was replaced."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


def wrap(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by `around(it)`, unless that is done already."""
    inner = getattr(owner, name)
    layers: tuple[str, ...] = getattr(inner, "layers", ())
    if around.__qualname__ not in layers:
        outer: Any = functools.update_wrapper(around(inner), inner)
        outer.layers = (*layers, around.__qualname__)
        setattr(owner, name, outer)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def source_digest(name: str) -> str:
    """The digest of a function's source or a file's content; empty when it cannot be found.

    `name` is `module:function`, `module:Class.function`, or `package/file.py`, which is not
    imported.
    """
    try:
        source = _content(name) if ":" not in name else inspect.getsource(_find(name)).encode()
    except (ImportError, AttributeError, OSError, TypeError):
        return ""
    return hashlib.sha256(source).hexdigest()[:16]


def _content(name: str) -> bytes:
    package, _, path = name.partition("/")
    spec = PathFinder.find_spec(package)
    if spec is None or spec.origin is None:
        raise ImportError(package)
    return (Path(spec.origin).parent / path).read_bytes()


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = inspect.getattr_static(found, part)
    if isinstance(found, property):
        found = found.fget
    return getattr(found, "__func__", found)
