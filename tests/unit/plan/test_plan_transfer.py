"""How weights travel between processes: decided by the plan, and told to both ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configs import build_run_config

from gradus.config import InferenceProcessConfig, RunProcessConfig
from gradus.plan.gpus import FoundGpus, Gpu
from gradus.plan.processes import Machine, plan_config
from gradus.run.paths import RunDirectory


def told(num_gpus: int, trainer: dict[str, Any], **others: Any) -> tuple[str, str, str]:
    """Transfer and backend of the trainer, backend of the engine."""
    gpus = tuple(Gpu(str(number), "NVIDIA A100", 80 << 30) for number in range(num_gpus))
    machine = Machine("/bin/python", 8, {"PATH": "/bin"}, FoundGpus(gpus, "" if gpus else "none"))
    config = build_run_config({"trainer": trainer, **others})
    configs = plan_config(config, machine, RunDirectory(Path("/runs/demo")), 1).configs
    ours, theirs = configs["run"], configs["inference"]
    assert isinstance(ours, RunProcessConfig)
    assert isinstance(theirs, InferenceProcessConfig)
    return ours.trainer.weight_transfer, ours.trainer.broadcast_backend, theirs.broadcast_backend


AUTO = {"weight_transfer": "auto"}


@pytest.mark.parametrize(
    ("num_gpus", "trainer", "others", "expected"),
    [
        (0, AUTO, {}, ("filesystem", "gloo", "gloo")),
        (2, AUTO, {}, ("broadcast", "nccl", "nccl")),
        (2, {}, {}, ("filesystem", "nccl", "nccl")),
        (1, AUTO, {"inference": {"gpu_sharing": "memory"}}, ("filesystem", "gloo", "gloo")),
        (2, AUTO | {"gpus": []}, {}, ("filesystem", "gloo", "gloo")),
        (2, AUTO | {"lora": {"rank": 8}}, {}, ("filesystem", "nccl", "nccl")),
        (0, {"weight_transfer": "broadcast"}, {}, ("broadcast", "gloo", "gloo")),
        (2, AUTO | {"broadcast_backend": "gloo"}, {}, ("broadcast", "gloo", "gloo")),
    ],
    ids=["cpu", "apart", "default", "shared", "cpu_trainer", "adapter", "cpu_broadcast", "written"],
)
def test_weights_go_from_gpu_to_gpu_only_where_both_sides_have_their_own(
    num_gpus: int,
    trainer: dict[str, Any],
    others: dict[str, Any],
    expected: tuple[str, str, str],
) -> None:
    assert told(num_gpus, trainer, **others) == expected
