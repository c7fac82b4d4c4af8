"""A child process that trains a tiny model for one step in bfloat16: see `plan/precision`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from gradus.config import ModelConfig, TrainerConfig
from gradus.plan.precision import end_trial
from gradus.trainer.distributed import CPU, World, join_world
from gradus.trainer.learner import Learner
from gradus.wire.micro_batch import MicroBatch
from gradus.wire.tokens import TokenArrays

LARGEST_DISTANCE = 0.05
"""Of the norm of all gradients. Rounding was measured to move them by 1 %; what is wrong is off by
the norm itself."""
_VOCABULARY = 512
_LENGTHS = (70, 33)


def fault() -> str:
    """Empty when a step in bfloat16 has the gradients of one in float32."""
    with tempfile.TemporaryDirectory(prefix="gradus-") as directory, join_world(CPU) as world:
        _write_model(Path(directory))
        exact, found = (
            gradients_of_a_step(Path(directory), dtype, world) for dtype in ("float32", "bfloat16")
        )
    distance = float((found - exact).norm() / exact.norm())
    if distance <= LARGEST_DISTANCE:
        return ""
    return (
        f"computed other gradients than in float32: {distance:.2g} of their norm away, where "
        f"rounding explains {LARGEST_DISTANCE:g}"
    )


def gradients_of_a_step(model: Path, dtype: str, world: World) -> Tensor:
    """All of them in one row, of a step that a run would do; its update is done too."""
    settings = TrainerConfig.model_validate({"compute_dtype": dtype})
    base = ModelConfig(name=str(model))
    learner = Learner.build(base, settings, settings.loss, max_steps=1, world=world)
    learner.gradients.run([_micro_batch()])
    gradients = [it.grad for it in learner.policy.parameters() if it.grad is not None]
    found = torch.cat([getattr(it, "full_tensor", it.clone)().flatten() for it in gradients])
    learner.optimizer.step(0)
    return found


def _write_model(directory: Path) -> None:
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)  # type: ignore[no-untyped-call]


def _micro_batch() -> MicroBatch:
    """Two samples of tokens that are learned by cross entropy."""
    token_ids = np.random.default_rng(0).integers(0, _VOCABULARY, sum(_LENGTHS))
    weights = {"ce": np.ones(sum(_LENGTHS), np.float32)}
    names = [f"trial/{number}" for number, _ in enumerate(_LENGTHS)]
    return MicroBatch(names, list(_LENGTHS), TokenArrays.build(token_ids, weights))


if __name__ == "__main__":
    end_trial(fault())
