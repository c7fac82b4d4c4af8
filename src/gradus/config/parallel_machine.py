"""What a way of splitting the trainer needs of the model at hand and of this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gradus.config.model import ModelConfig
from gradus.config.parallel import ParallelConfig
from gradus.config.problems import Problem
from gradus.config.schema import KeyPath

NO_COMPILER = (
    "torch.compile needs a C compiler and none is here (looked for $CXX, $CC, g++, gcc, clang++, "
    "clang, cc); install one, or turn compile off"
)


def machine_problems(
    path: KeyPath, parallel: ParallelConfig, model: ModelConfig, variables: Mapping[str, str]
) -> Iterator[Problem]:
    """A compiler for `compile`; heads that `context_parallel_size` can share.

    Reads the config.json of a model that lies in a directory here; of any other the trainer says
    the same once it has loaded it.
    """
    if parallel.compile and not has_compiler(variables):
        yield Problem((*path, "compile"), NO_COMPILER)
    if parallel.context_parallel_size == 1:
        return
    heads = _heads(Path(model.name) / "config.json")
    if heads is None:
        return
    if problem := head_problem(*heads, parallel.context_parallel_size):
        yield Problem((*path, "context_parallel_size"), f"{problem}; choose another size")


def _heads(config_file: Path) -> tuple[int, int] | None:
    """Attention heads and key heads; None when the file does not say."""
    try:
        config: Any = json.loads(config_file.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    config = config.get("text_config", config)
    heads = config.get("num_attention_heads")
    key_heads = config.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(key_heads, int):
        return None
    return heads, key_heads


def has_compiler(variables: Mapping[str, str]) -> bool:
    """Whether this machine has a C compiler, which torch.compile needs."""
    chosen = [variables[name] for name in ("CXX", "CC") if variables.get(name)]
    names = [*chosen, "g++", "gcc", "clang++", "clang", "cc"]
    return any(shutil.which(name, path=variables.get("PATH")) for name in names)


def head_problem(num_heads: int, num_key_heads: int, context_parallel_size: int) -> str | None:
    """Why attention heads cannot be shared out; None when they can.

    Key heads fewer than the processes are copied, so they must divide evenly one way or the other.
    """
    size = context_parallel_size
    if num_heads % size:
        return f"the model's {num_heads} attention heads cannot be shared by {size} processes"
    if num_key_heads % size and size % num_key_heads:
        return (
            f"the model's {num_key_heads} key heads can neither be shared by {size} processes nor "
            "copied evenly to them"
        )
    return None
