"""Loads what a package offers when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def on_first_use(package: str, **names_of: list[str]) -> Callable[[str], Any]:
    """A package's `__getattr__`: module → what it offers under the package's own name.

    The package's other modules can then be imported without verifiers, which takes seconds.
    """
    home_of = {name: f"{package}.{module}" for module, names in names_of.items() for name in names}

    def load(name: str) -> Any:
        if name in home_of:
            return getattr(importlib.import_module(home_of[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load
