"""Whether engine and trainer fit on one GPU, on machines that a test makes up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configs import build_run_config, build_sft_config, write_headers

from gradus.plan.gpus import FoundGpus, Gpu
from gradus.plan.machine import check
from gradus.plan.show import describe_config

GIB = 1 << 30
ONE_BILLION = {
    "model.embed_tokens.weight": [151936, 2048],
    "model.layers.0.a.weight": [2048, 400000],
}
"""1.1 billion parameters: 16.8 GiB of weights, gradients and moments."""


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Any]:
    folder = write_headers(tmp_path / "model", {}, ONE_BILLION)
    return {"model": {"name": str(folder)}, "output_dir": str(tmp_path)}


def gpus(number: int, gib: float | None) -> FoundGpus:
    memory = None if gib is None else int(gib * GIB)
    return FoundGpus(tuple(Gpu(str(n), "NVIDIA L40S", memory) for n in range(number)))


def problems(changes: dict[str, Any], found: FoundGpus) -> list[str]:
    return [str(problem) for problem in check(build_run_config(changes), gpus=found)]


def shared(share: float, how: str = "memory", **trainer: Any) -> dict[str, Any]:
    inference = {"gpu_sharing": how, "gpu_memory_utilization": share}
    return {"inference": inference, "trainer": trainer}


def test_two_that_fit_may_stay_on_one_gpu(model: dict[str, Any]) -> None:
    assert problems({**model, **shared(0.3)}, gpus(1, 80)) == []


def test_two_that_do_not_fit_are_refused_with_both_numbers(model: dict[str, Any]) -> None:
    (told,) = problems({**model, **shared(0.9)}, gpus(1, 80))
    assert told.startswith("inference.gpu_sharing: 'memory': GPU 0 (NVIDIA L40S, 80.0 GiB) cannot")
    assert "the engine takes 72.0 GiB (gpu_memory_utilization = 0.9) and the trainer at" in told
    advised = float(told.split("lower inference.gpu_memory_utilization below ")[1].split(",")[0])
    assert problems({**model, **shared(advised - 0.01)}, gpus(1, 80)) == []
    assert problems({**model, **shared(advised + 0.02)}, gpus(1, 80)) != []


def test_a_trainer_that_lies_in_main_memory_leaves_room(model: dict[str, Any]) -> None:
    small = {"parallel": {"offload_optimizer": True, "activation_checkpointing": "full"}}
    changes = shared(0.3, micro_batch_tokens=2048, **small)
    assert problems({**model, **changes}, gpus(1, 24)) == []


def test_a_gpu_of_its_own_must_hold_what_is_certain(model: dict[str, Any]) -> None:
    (told,) = problems(model, gpus(2, 16))
    assert told.startswith("trainer.gpus: GPU 1 (NVIDIA L40S, 16.0 GiB) is too small: ")
    assert problems(model, gpus(2, 24)) == []
    supervised = build_sft_config({**model, "num_processes": 1})
    (problem,) = check(supervised, gpus=gpus(1, 16))
    assert str(problem).startswith("gpus: GPU 0")


def test_memory_that_nobody_told_is_left_to_the_trainer(model: dict[str, Any]) -> None:
    assert problems(model, gpus(2, None)) == []
    assert problems({**model, **shared(0.9)}, gpus(1, None)) == []


def test_a_model_in_the_cache_of_the_hub_is_measured_too(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "models--someone--one-billion"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    (cache / "snapshots").mkdir()
    (tmp_path / "model").rename(cache / "snapshots" / "abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    changes = {**model, "model": {"name": "someone/one-billion"}}
    assert "is too small" in problems(changes, gpus(2, 16))[0]


def test_an_engine_that_sleeps_needs_room_only_beside_what_the_trainer_keeps(
    model: dict[str, Any],
) -> None:
    assert "cannot hold both" in problems({**model, **shared(0.7)}, gpus(1, 48))[0]
    assert problems({**model, **shared(0.7, "turns")}, gpus(1, 48)) == []
    (told,) = problems({**model, **shared(0.9, "turns")}, gpus(1, 48))
    assert told.startswith("inference.gpu_sharing: 'turns': GPU 0 (NVIDIA L40S, 48.0 GiB) cannot")
    assert "lower inference.gpu_memory_utilization below 0." in told


def test_a_supervised_trainer_takes_no_turns(model: dict[str, Any]) -> None:
    evaluation = {"eval": {"env": [{"id": "gradus-reverse-text"}]}}
    turns = {"inference": {"gpu_sharing": "turns", "gpu_memory_utilization": 0.2}}
    config = build_sft_config({**model, **evaluation, **turns})
    (told,) = [str(problem) for problem in check(config, gpus=gpus(1, 80))]
    assert told.startswith("inference.gpu_sharing: 'turns': a supervised trainer does not wait")


def test_two_processes_on_one_gpu_cannot_broadcast(model: dict[str, Any]) -> None:
    changes = shared(0.3, weight_transfer="broadcast")
    (told,) = problems({**model, **changes}, gpus(1, 80))
    assert told.startswith("trainer.weight_transfer: broadcast with inference.gpu_sharing = 'mem")


def test_the_overview_shows_what_a_trainer_needs_by_part(model: dict[str, Any]) -> None:
    on_gpu = describe_config(build_run_config({**model, **shared(0.3)}), gpus(1, 80))
    (line,) = (line for line in on_gpu if line.startswith("memory of each trainer process"))
    assert "at least: device " in line
    assert "weights 4.2, gradients 4.2, optimizer 8.4" in line
    assert "; host " in line
    on_cpu = describe_config(build_sft_config(model), FoundGpus(()))
    (line,) = (line for line in on_cpu if line.startswith("memory of each trainer process"))
    assert "at least: host " in line
    absent = describe_config(build_run_config({"model": {"name": "someone/else"}}), FoundGpus(()))
    assert not any("memory of each" in line for line in absent)


def test_the_plan_advises_replay_for_a_mixture_in_bfloat16(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "glm4_moe", "n_routed_experts": 8}')
    model = {"model": {"name": str(tmp_path)}, "trainer": {"compute_dtype": "bfloat16"}}
    notes = [it for it in describe_config(build_run_config(model), FoundGpus(())) if "note:" in it]
    assert any("router_replay = 'engine'" in it for it in notes)
