"""Valid configs in one line, for tests that change one thing about them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradus.config import (
    CurriculumConfig,
    EvalConfig,
    FilterConfig,
    LaunchedConfig,
    Layers,
    RunConfig,
    RunProcessConfig,
    SftConfig,
    algorithms,
    learning,
    resolve,
    resolve_sources,
)
from gradus.config.check import contradictions

RUN_TOML = """\
max_steps = 20
[model]
name = "someone/tiny"
[[orchestrator.train.env]]
id = "gradus-reverse-text"
"""
"""The shortest config of an RL run that works: everything else has a default."""

SFT_TOML = """\
[model]
name = "someone/tiny"
[data]
path = "someone/conversations"
"""
"""The shortest config of a supervised run."""


def build_run_values(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a minimal RL config file holds, with changes merged over it like an overlay."""
    merged = Layers(object)
    base = {
        "max_steps": 20,
        "model": {"name": "someone/tiny"},
        "orchestrator": {"train": {"env": [{"id": "gradus-reverse-text"}]}},
    }
    for layer in (base, changes or {}):
        merged.add(layer)
    return merged.values


def build_run_config(changes: dict[str, Any] | None = None) -> RunConfig:
    """A valid RL config.

    >>> build_run_config({"trainer": {"num_processes": 2}}).trainer.num_processes
    2
    """
    config: RunConfig = RunConfig.model_validate(build_run_values(changes))
    return config


def build_run_process(
    run_dir: Path, changes: dict[str, Any], *, term: int = 0, resume_step: int | None = None
) -> RunProcessConfig:
    """What the trainer, the orchestrator or the replayer of a run reads."""
    config = build_run_config(changes)
    launched = resolve(config, run_dir=run_dir, term=term, resume_step=resume_step).launched
    assert isinstance(launched, RunProcessConfig)
    return launched


def build_sft_config(changes: dict[str, Any] | None = None) -> SftConfig:
    """A valid config of a supervised run."""
    base = {"model": {"name": "someone/tiny"}, "data": {"path": "someone/conversations"}}
    config: SftConfig = SftConfig.model_validate({**base, **(changes or {})})
    return config


def build_eval_config(changes: dict[str, Any] | None = None) -> EvalConfig:
    """An evaluation of a model that gradus serves."""
    base = {"model": {"name": "someone/tiny"}, "env": [{"id": "gradus-reverse-text"}]}
    config: EvalConfig = EvalConfig.model_validate({**base, **(changes or {})})
    return config


def build_algorithm_config(kind: str, **keys: Any) -> algorithms.AlgorithmConfig:
    """The config of an algorithm.

    >>> build_algorithm_config("grpo", leave_one_out=True).type
    'grpo'
    """
    changes = {"orchestrator": {"train": {"algo": {"type": kind, **keys}}}}
    return build_run_config(changes).orchestrator.train.algo


def build_curriculum_config(kind: str, **keys: Any) -> CurriculumConfig:
    """The config of a curriculum."""
    source = {"id": "words", "curriculum": {"type": kind, **keys}}
    changes = {"orchestrator": {"train": {"env": [source]}}}
    return build_run_config(changes).orchestrator.train.env[0].curriculum


def build_filter_config(kind: str, **keys: Any) -> FilterConfig:
    """The config of a filter."""
    changes = {"orchestrator": {"filters": [{"type": kind, **keys}]}}
    return build_run_config(changes).orchestrator.filters[0]


def build_loss_config(kind: str = "dppo", **keys: Any) -> learning.LossConfig:
    """The config of a loss."""
    return build_run_config({"trainer": {"loss": {"type": kind, **keys}}}).trainer.loss


def contradictions_of(config: LaunchedConfig) -> list[Any]:
    """What keeps a config from working on any machine.

    >>> [str(problem) for problem in contradictions_of(build_run_config({"seed": 1}))]
    []
    """
    return list(contradictions(config, resolve_sources(config)))


def write_headers(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> Path:
    """A folder with a config.json and a safetensors header without tensors behind it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header = {
        name: {"dtype": "BF16", "shape": it, "data_offsets": [0, 0]} for name, it in shapes.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return folder
