"""Examples are scripts, not a package: load one as a module by its path."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def load_example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Loads `examples/<path>`; the modules beside it can be imported, as when it is run."""

    def load(path: str) -> ModuleType:
        file = EXAMPLES / path
        name = "example_" + path.removesuffix(".py").replace("/", "_")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.syspath_prepend(str(file.parent))
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load
