"""Loading a tokenizer by transformers without torch, which costs a process 3 s of CPU and 300 MiB.

Since 5.17, `from transformers import AutoTokenizer` imports torch and all of generation, because
four modules on its way name what no tokenizer uses. While a tokenizer is loaded here, those
believe that torch is missing; afterwards they have stand-ins that import it at the first use, so
that an environment which loads a model of transformers later on finds everything.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

VERSION = "5.17.0"
"""Of transformers, whose modules were looked at. Any other imports what it does, only slower."""
_ROOT = "transformers"
_CONFIGS = f"{_ROOT}.configuration_utils"
_FACTORY = f"{_ROOT}.models.auto.auto_factory"
_GENERATION = f"{_ROOT}.generation.configuration_utils"
_PROCESSORS = ("SynthIDTextWatermarkLogitsProcessor", "WatermarkLogitsProcessor")
_NAME_TORCH = (f"{_ROOT}.modeling_rope_utils", f"{_ROOT}.modeling_gguf_pytorch_utils")
_LAZY = (f"{_ROOT}.generation", f"{_ROOT}.integrations")
"""Packages that list what they have as they are imported, and import none of it."""
_FIRST = (_CONFIGS, _FACTORY, _GENERATION, *_NAME_TORCH)
_LOADING = threading.RLock()


@contextmanager
def torch_waits() -> Iterator[None]:
    """Let this thread load a tokenizer in the block without torch, where that is still to come."""
    with _LOADING:
        if "torch" in sys.modules or importlib.import_module(_ROOT).__version__ != VERSION:
            yield
            return
        if not any(name in sys.modules for name in _FIRST):
            _import_alone()
        configs: Any = importlib.import_module(_CONFIGS)
        if "torch" in sys.modules:
            yield
            return
        # A model's config is read for the name of its tokenizer; its dtype would import torch.
        asked, configs.is_torch_available = configs.is_torch_available, _hidden(configs)
        try:
            yield
        finally:
            configs.is_torch_available = asked


def _hidden(owner: Any) -> Callable[[], bool]:
    """What `owner` says of torch to all threads but this one, which it tells that none is there."""
    here, ask = threading.get_ident(), owner.is_torch_available
    return lambda: threading.get_ident() != here and ask()


def _import_alone() -> None:
    owners: list[Any] = [
        importlib.import_module(f"{_ROOT}.utils{part}") for part in ("", ".import_utils")
    ]
    for name in _LAZY:
        importlib.import_module(name)
    asked = owners[1].is_torch_available
    hidden = _hidden(owners[1])
    for owner in owners:
        owner.is_torch_available = hidden
    try:
        importlib.import_module(f"{_ROOT}.models.auto.tokenization_auto")
    finally:
        for module in _modules():
            for name, value in list(vars(module).items()):
                if value is hidden:
                    setattr(module, name, asked)
        _stand_in()


def _modules() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == _ROOT and module is not None
    ]


def _stand_in() -> None:
    """Give the four modules what they miss, unless another thread has imported them with torch."""
    for name in _NAME_TORCH:
        vars(importlib.import_module(name)).setdefault("torch", _Torch("torch"))
    for name in _PROCESSORS:
        make = functools.partial(_make, f"{_ROOT}.generation.logits_process", name)
        vars(importlib.import_module(_GENERATION)).setdefault(name, make)
    factory: Any = importlib.import_module(_FACTORY)
    if not hasattr(factory, "GenerationMixin"):
        factory.add_generation_mixin_to_remote_model = functools.partial(
            _add_mixin, factory, factory.add_generation_mixin_to_remote_model
        )


class _Torch(ModuleType):
    """torch, imported at the first look at it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(self.__name__), name)


def _make(module: str, name: str, *arguments: Any, **options: Any) -> Any:
    return getattr(importlib.import_module(module), name)(*arguments, **options)


def _add_mixin(factory: ModuleType, add: Callable[[Any], Any], model_class: Any) -> Any:
    """What makes a class of remote code generate; it finds the base in its module's globals."""
    mixin = importlib.import_module(_LAZY[0]).GenerationMixin
    vars(factory).setdefault("GenerationMixin", mixin)
    return add(model_class)
