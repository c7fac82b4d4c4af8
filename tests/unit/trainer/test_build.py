"""What a trainer will need is compared with what there is before its model is loaded."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradus.config import ModelConfig, TrainerConfig
from gradus.errors import ConfigError
from gradus.trainer.distributed import World
from gradus.trainer.model.build import refuse_too_large

pytestmark = pytest.mark.torch


def compare(model: Path, world: World, *, usable: int, device: str, **settings: Any) -> None:
    """As if the ranks had `device` with so many bytes."""
    world = replace(world, device=torch.device(device))
    refuse_too_large(
        ModelConfig(name=str(model)),
        TrainerConfig.model_validate(settings),
        world,
        usable_memory=lambda _: usable,
    )


class _Agreeing(World):
    """One rank: what it says is agreed, whatever its device."""

    def all_agree(self, condition: bool) -> bool:
        return condition


@pytest.fixture
def alone(world: World) -> World:
    return _Agreeing(**{name: getattr(world, name) for name in ("rank", "size", "device", "mesh")})


def test_a_gpu_that_is_clearly_too_small_is_refused(tiny_model: Path, alone: World) -> None:
    with pytest.raises(ConfigError) as refused:
        compare(tiny_model, alone, usable=10**6, device="cuda")
    said = str(refused.value)
    assert "of the GPU, of which 0.0 GiB can be used (weights 0.0" in said
    assert "parallel.offload_optimizer" in said


def test_a_gpu_that_is_large_enough_is_not_spoken_of(
    tiny_model: Path, alone: World, caplog: pytest.LogCaptureFixture
) -> None:
    compare(tiny_model, alone, usable=80 * 2**30, device="cuda")
    assert caplog.text == ""


def test_a_machine_without_gpu_is_only_warned(
    tiny_model: Path, alone: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        compare(tiny_model, alone, usable=1, device="cpu")
    assert "of the main memory, of which 0.0 GiB can be used" in caplog.text


def test_a_model_that_is_not_here_yet_is_not_spoken_of(tmp_path: Path, alone: World) -> None:
    compare(Path("someone/model"), alone, usable=1, device="cuda")


def test_all_ranks_end_when_one_gpu_is_too_small(tiny_model: Path, alone: World) -> None:
    class Refused(_Agreeing):
        def all_agree(self, condition: bool) -> bool:
            return False

    other = Refused(**{name: getattr(alone, name) for name in ("rank", "size", "device", "mesh")})
    with pytest.raises(ConfigError, match="another rank's GPU"):
        compare(tiny_model, other, usable=80 * 2**30, device="cuda")
