"""What a trainer will need is compared with what there is before its model is loaded."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradus.config import ModelConfig, ParallelConfig, TrainerConfig
from gradus.errors import ConfigError
from gradus.testing.tiny_model import build_tiny_model
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
        compare(tiny_model, alone, usable=10**8, device="cuda")
    said = str(refused.value)
    assert "of the GPU, of which 0.1 GiB can be used (weights 0.0" in said
    assert "activations: a lower micro_batch_tokens" in said
    assert said.endswith("parallel.memory_check = 'warn' tries all the same")


def test_a_user_may_try_all_the_same(
    tiny_model: Path, alone: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        parallel = ParallelConfig(memory_check="warn")
        compare(tiny_model, alone, usable=10**8, device="cuda", parallel=parallel)
    assert "of the GPU, of which 0.1 GiB can be used" in caplog.text


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


MEASURE = """
import sys
from pathlib import Path
import torch
from gradus.config import ModelConfig, TrainerConfig
from gradus.plan.memory.prediction import predict_memory
from builders import build_sample
from gradus.trainer.distributed import CPU, join_world
from gradus.trainer.learner import Learner
from gradus.trainer.throughput import Stopwatch
from gradus.wire.micro_batch import MicroBatch

def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

model, settings = Path(sys.argv[1]), TrainerConfig.model_validate_json(sys.argv[2])
torch.set_num_threads(1)
with join_world(CPU) as world:
    learner = Learner.build(
        ModelConfig(name=str(model)), settings, settings.loss, max_steps=1, world=world
    )
    samples = [build_sample(128, prompt_length=1, seed=n, vocabulary=9) for n in range(8)]
    learner.learn(0, [[MicroBatch.join(samples)]], Stopwatch())
    found = peak()
predicted = predict_memory(model, settings, on_gpu=False)
print(found, predicted.host_bytes - predicted.host["version being published"], predicted)
"""


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"parallel": {"activation_checkpointing": "full"}}])
def test_what_is_predicted_is_what_a_trainer_on_a_cpu_holds(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Within a third of the whole process. What a library takes for itself depends on the processor
    and on what its allocator makes of a step (50 MB from one run to the next here), and fused
    layers keep fewer activations."""
    model = build_tiny_model(tmp_path / "model", hidden_size=512, num_layers=6)
    script = tmp_path / "measure.py"
    script.write_text(MEASURE)
    given = {"compute_dtype": "float32", "micro_batch_tokens": 1024, **settings}
    done = subprocess.run(
        [sys.executable, str(script), str(model), json.dumps(given)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "support")},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found, predicted = (int(word) for word in done.stdout.split()[:2])
    assert found == pytest.approx(predicted, rel=1 / 3), done.stdout
